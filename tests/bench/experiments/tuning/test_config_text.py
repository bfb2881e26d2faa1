"""Editing config files: what is not varied stays as it is written."""

import stat
from pathlib import Path

import msgspec
import pytest

from app.triton.config_file import read_config_file
from app.triton.repository import config_path
from app.zoo.description import Description, Serving
from app.zoo.recipe import DetectionRecipe
from app.zoo.repository import Repository
from bench.experiments.tuning import config_text
from bench.experiments.tuning.variant import Variant, read_variant
from bench.harness.errors import ContestantError
from tests.test_model_repository import EMBEDDED, PRODUCTION, generated


def _write(folder: Path, text: str) -> Path:
    path = folder / "config.pbtxt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("model", ["yolo11n", "yolox_nano"])
@pytest.mark.parametrize("is_embedded", [True, False])
def test_only_what_is_varied_changes(model: str, is_embedded: bool, tmp_path: Path) -> None:  # noqa: FBT001 - a parameter
    path = tmp_path / "config.pbtxt"
    path.write_text(generated(model, EMBEDDED if is_embedded else PRODUCTION), encoding="utf-8")
    present = read_variant(read_config_file(path), has_threads=is_embedded, calls=None)
    wanted = Variant(instances=3, threads=2 if is_embedded else None, max_batch=8, delay_us=2000)
    changes = config_text.difference(path, config_text.edit(path, wanted))

    assert config_text.edit(path, present) == path.read_text(encoding="utf-8")
    assert [line.split("#")[0].strip() for line in changes if line.startswith("+")] == [
        "+max_batch_size: 8",
        f"+instance_group [ {{ count: 3 kind: KIND_{'CPU' if is_embedded else 'GPU'} }} ]",
        "+  max_queue_delay_microseconds: 2000",
        *([] if is_embedded else ["+  batch_size: 8"]),
        *(['+parameters { key: "intra_op_thread_count" value { string_value: "2" } }'] if is_embedded else []),
    ]
    assert len(changes) == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max_batch_size: 4", "max_batch_size: 8\n\ninstance_group [ { count: 3 } ]\n"),
        ("max_batch_size:4 instance_group { kind: KIND_CPU }", "max_batch_size:8 instance_group { count: 3 kind: KIND_CPU }"),
        (
            "# max_batch_size: 4\nmax_batch_size: 4 # instance_group { count: 1 }\ninstance_group [{ count : 1 }]",
            "# max_batch_size: 4\nmax_batch_size: 8 # instance_group { count: 1 }\ninstance_group [{ count : 3 }]",
        ),
        (
            'name: "a # b" instance_group { count: 2 } max_batch_size: 4 # "',
            'name: "a # b" instance_group { count: 3 } max_batch_size: 8 # "',
        ),
    ],
    ids=["without instances", "without a count", "comments", "a comment in a string"],
)
def test_other_ways_to_write_a_config_are_edited(tmp_path: Path, text: str, expected: str) -> None:
    assert config_text.edit(_write(tmp_path, text), Variant(instances=3, max_batch=8)) == expected


def test_a_missing_delay_is_put_into_the_batcher(tmp_path: Path) -> None:
    """A batcher without a delay has zero, so zero is not written."""
    path = _write(tmp_path, "max_batch_size: 4 dynamic_batching {}")

    assert config_text.edit(path, Variant(max_batch=4, delay_us=0)) == path.read_text()
    assert "dynamic_batching { max_queue_delay_microseconds: 500}" in config_text.edit(path, Variant(max_batch=4, delay_us=500))


def test_a_config_that_is_not_understood_is_not_edited(tmp_path: Path) -> None:
    path = _write(tmp_path, "instance_group { rate_limiter { priority: 1 } count: 2 }")
    with pytest.raises(ContestantError, match=r"config\.pbtxt is written in a way .* edit it yourself: instances 3$"):
        config_text.edit(path, Variant(instances=3))


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = _write(tmp_path, "max_batch_size: 4")
    path.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(path)
    config_text.write(link, "max_batch_size: 8", Variant(max_batch=8))

    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), link.is_symlink()) == ("max_batch_size: 8", 0o640, True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.pbtxt", "link"]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").mkdir()
    with pytest.raises(ContestantError, match=r"config\.pbtxt cannot be written: "):
        config_text.write(tmp_path / "config.pbtxt", "max_batch_size: 8", Variant(max_batch=8))

    assert [entry.name for entry in tmp_path.iterdir()] == ["config.pbtxt"]


def test_choice_for_an_added_model_is_in_its_description(tmp_path: Path) -> None:
    found = Description(
        labels=("a",), default_version=1, last_version=1, versions={"1": ""}, recipe=DetectionRecipe(size=(64, 64), head="yolo")
    )
    repository = Repository(tmp_path)
    (tmp_path / "doors").mkdir()
    repository.write("doors", found)
    file = config_path(tmp_path / "doors", is_embedded=True)
    variant = Variant(instances=3, threads=2, max_batch=8, delay_us=500)
    text = config_text.edit(file, variant)
    config_text.write(file, text, variant)

    assert read_variant(read_config_file(file), has_threads=True, calls=None) == variant
    assert repository.load("doors") == msgspec.structs.replace(
        found, embedded=Serving(instances=3, threads=2, max_batch=8, delay_us=500)
    )
