"""The registry of models that can be pulled."""

import tomllib

import msgspec
import pytest

from app.zoo import registry
from app.zoo.recipe import DetectionRecipe, Recipe

RECIPE = """
task = "detection"
size = [640, 640]
channels = "RGB"
scale = 255.0
head = "yolo"
iou = 0.7
"""


def test_registry_of_the_project_is_valid() -> None:
    entries = registry.load()

    assert "yolo11n" in entries
    for entry in entries.values():
        assert [entry.url, entry.wheel, entry.npm].count(None) == 2
        assert bool(entry.member) != bool(entry.url)
        assert entry.recipe.architecture or entry.file_name.endswith(".onnx")
    assert [*registry.select(entries, "ocr")] == ["ocr_detection", "ocr_direction", "ocr_recognition"]
    assert [*registry.select(entries, "ocr_direction")] == ["ocr_direction"]


@pytest.mark.parametrize(
    ("right", "wrong", "place"),
    [
        pytest.param("size = [640, 640]", "size = [640, 0]", "size", id="too small"),
        pytest.param('task = "detection"', 'task = "ranking"', "task", id="unknown task"),
        pytest.param('task = "detection"', "", "task", id="no task"),
        pytest.param('task = "detection"', 'task = "classification"', "head", id="recipe of another task"),
        pytest.param(
            'task = "detection"', 'task = "detection"\narchitecture = "resnet"', "architecture", id="unknown architecture"
        ),
        pytest.param("scale = 255.0", 'scale = 255.0\nresize = "line"', "resize", id="line of text"),
        pytest.param("iou = 0.7", "iou = 1.5", "iou", id="iou above one"),
    ],
)
def test_invalid_recipe_says_where(right: str, wrong: str, place: str) -> None:
    assert isinstance(msgspec.convert(tomllib.loads(RECIPE), Recipe), DetectionRecipe)
    with pytest.raises(msgspec.ValidationError, match=place):
        msgspec.convert(tomllib.loads(RECIPE.replace(right, wrong)), Recipe)
