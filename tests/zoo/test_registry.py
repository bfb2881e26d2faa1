"""The registry of models that can be pulled."""

import errno
from pathlib import Path
from unittest.mock import Mock

import pytest

from app.host.program import CommandError
from app.zoo import registry

ENTRY = """
[detector]
title = "A detector"
licence = "MIT"
source = "https://example.org/detector"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
url = "https://example.org/files/detector.onnx"
recipe = { task = "detection", size = [640, 640], channels = "RGB", scale = 255.0, head = "yolo", iou = 0.7 }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_registry_of_the_project_is_valid() -> None:
    entries = registry.load(registry.PUBLISHED)

    assert "yolo11n" in entries
    for entry in entries.values():
        assert [entry.url, entry.wheel, entry.npm].count(None) == 2
        assert bool(entry.member) != bool(entry.url)
        assert entry.recipe.architecture or entry.file_name.endswith(".onnx")
    assert [*registry.select(entries, "ocr")] == ["ocr_detection", "ocr_direction", "ocr_recognition"]
    assert [*registry.select(entries, "ocr_direction")] == ["ocr_direction"]


def test_registry_in_the_model_repository_replaces_that_of_the_program(tmp_path: Path) -> None:
    assert registry.path_for(tmp_path) == registry.path_for(tmp_path / "nowhere") == registry.PUBLISHED

    path = write(tmp_path, ENTRY)
    assert registry.path_for(tmp_path) == path
    assert registry.load(path).keys() == {"detector"}


def test_model_repository_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no list that this user could read."""
    monkeypatch.setattr("os.stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))

    assert registry.path_for(tmp_path) == registry.PUBLISHED


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        pytest.param('title = "A detector"', "", "title", id="missing"),
        pytest.param('licence = "MIT"', 'licence = "MIT"\nauthor = "me"', "author", id="unknown"),
        pytest.param('"https://example.org/files/', '"http://example.org/files/', "url", id="not https"),
        pytest.param("0000000000000000000000000000000000000000000000000000000000000000", "abc", "sha256", id="short hash"),
        pytest.param("size = [640, 640]", "size = [640, 0]", "size", id="too small"),
        pytest.param('head = "yolo"', 'head = "ssd"', "head", id="unknown head"),
        pytest.param('channels = "RGB"', 'channels = "GBR"', "channels", id="unknown channels"),
        pytest.param('task = "detection"', 'task = "ranking"', "task", id="unknown task"),
        pytest.param('task = "detection", ', "", "task", id="no task"),
        pytest.param('task = "detection"', 'task = "classification"', "recipe", id="recipe of another task"),
        pytest.param(
            'task = "detection"', 'task = "detection", architecture = "resnet"', "architecture", id="unknown architecture"
        ),
        pytest.param("scale = 255.0", "scale = 255.0, std = [1, 0, 1]", "std", id="deviation of zero"),
        pytest.param("scale = 255.0", "scale = 0.0", "scale", id="scale of zero"),
        pytest.param("scale = 255.0", 'scale = 255.0, resize = "line"', "resize", id="line of text"),
        pytest.param("iou = 0.7", "iou = 1.5", "iou", id="iou above one"),
        pytest.param("[detector]", "[detector", "line 2", id="not TOML"),
    ],
)
def test_invalid_registry_says_where(tmp_path: Path, right: str, wrong: str, place: str) -> None:
    path = write(tmp_path, ENTRY.replace(right, wrong))
    with pytest.raises(CommandError) as caught:
        registry.load(path)

    assert str(path) in str(caught.value)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registry_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "models.toml", tmp_path):
        with pytest.raises(CommandError, match=str(path)):
            registry.load(path)


def test_names_of_classes_are_in_a_file_beside_the_registry(tmp_path: Path) -> None:
    path = write(tmp_path, ENTRY.replace('licence = "MIT"', 'licence = "MIT"\nlabels = "names.txt"'))
    with pytest.raises(CommandError, match=r"/names.txt: No such file or directory$"):
        registry.load(path)
    (tmp_path / "names.txt").write_text("cat\ndog, or another\n", encoding="utf-8")

    assert registry.load(path)["detector"].class_names == ("cat", "dog, or another")
