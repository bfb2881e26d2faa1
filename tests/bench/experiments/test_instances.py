"""The variants of a model with other instances and threads."""

from pathlib import Path

import pytest

from bench.experiments.instances import write_variant
from bench.harness.errors import ContestantError
from tests.support import REPOSITORY


def test_a_variant_has_other_instances_and_threads(tmp_path: Path) -> None:
    """Everything else of the config stays."""
    write_variant(REPOSITORY / "yolo11n", tmp_path / "yolo11n", 1, 2)
    config = Path("configs", "embedded.pbtxt")
    before, after = ((folder / "yolo11n" / config).read_text() for folder in (REPOSITORY, tmp_path))

    assert before.replace("count: 2 kind", "count: 1 kind") in after
    assert after.endswith('parameters { key: "intra_op_thread_count" value { string_value: "2" } }\n')


def test_a_config_without_the_expected_instances_is_rejected(tmp_path: Path) -> None:
    """The measurement would otherwise compare a model with itself."""
    (tmp_path / "model" / "configs").mkdir(parents=True)
    (tmp_path / "model" / "configs" / "embedded.pbtxt").write_text('name: "model"\n')
    with pytest.raises(ContestantError, match="does not contain"):
        write_variant(tmp_path / "model", tmp_path / "variant", 1, 2)
