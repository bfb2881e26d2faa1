"""The reference's steps as a candidate, in the reference's environment."""

import json
import subprocess
from pathlib import Path

import pytest

from bench.experiments.stages import spend
from bench.harness.counters import read_counters
from bench.harness.environments import REFERENCE
from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import Triton
from tests.bench.support import needs_reference
from tests.support import IMAGES

pytestmark = [needs_reference, pytest.mark.system]

# Runs the steps on one image, and prints what each returns.
PROGRAM = """
import json, sys
from pathlib import Path
from bench.experiments.candidates.reference import reference_steps

value, shown = Path(sys.argv[1]).read_bytes(), {}
for name, step in reference_steps().items():
    value = step(value)
    shown[name] = value.decode() if isinstance(value, bytes) else [str(value.dtype), *value.shape]
print(json.dumps(shown))
"""


def test_without_a_triton_an_image_becomes_planes_and_an_answer_is_encoded() -> None:
    """The planes are FP32, as the reference's model takes them; the answer has five detections."""
    command = [str(REFERENCE.python()), "-c", PROGRAM, str(IMAGES / "coffee.jpg")]
    environment = environment_of(ROOT) | {"BENCH_TRITON": ""}
    shown = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)

    assert list(shown) == ["decode and letterbox", "normalize", "encode"]
    assert shown["decode and letterbox"] == ["uint8", 640, 640, 3]
    assert shown["normalize"] == ["float32", 1, 3, 640, 640]
    assert len(json.loads(shown["encode"])["detections"]) == 5


def test_with_a_triton_its_client_and_framework_are_steps(fixtures: Triton, tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes((IMAGES / "coffee.jpg").read_bytes())
    before = read_counters(fixtures.address, "null_fp32")
    (spent,) = spend("reference", tmp_path, 0.05, triton=fixtures.settings)

    assert list(spent.milliseconds) == ["decode and letterbox", "normalize", "client", "framework", "encode", "free"]
    assert read_counters(fixtures.address, "null_fp32").since(before).inferences == spent.images + 1  # one warms up
