"""The reference's steps as a candidate, in the reference's environment."""

from pathlib import Path

from bench.experiments.stages import spend
from bench.harness.counters import read_counters
from bench.harness.triton import Triton
from tests.bench.support import needs_reference
from tests.support import IMAGES

pytestmark = needs_reference


def test_with_a_triton_its_client_and_framework_are_steps(fixtures: Triton, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes((IMAGES / "coffee.jpg").read_bytes())
    before = read_counters(fixtures.address, "null_fp32")
    (spent,) = spend("reference", tmp_path, 0.05, triton=fixtures.settings)

    assert list(spent.milliseconds) == ["decode and letterbox", "normalize", "client", "framework", "encode", "free"]
    assert read_counters(fixtures.address, "null_fp32").since(before).inferences == spent.images + 1  # one warms up
