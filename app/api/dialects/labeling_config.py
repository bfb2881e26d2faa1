"""Read the controls for rectangles on images from a labeling configuration of Label Studio.

Source: label_studio_ml/model.py, `build_label_map`, and label_studio_ml/examples/yolo in label-studio-ml-backend.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple
from xml.etree import ElementTree as ET
from xml.etree.ElementTree import Element

from app.errors import MalformedRequest

MAX_CHARACTERS = 1 << 16
DEFAULT_THRESHOLD = 0.5
"""Minimum score if the configuration sets none; the value in Label Studio's YOLO example."""

_MAX_CONTROLS = 16
"""Limits the response, which repeats all objects of an image for each control."""
_CONTROL, _IMAGE, _LABEL = "RectangleLabels", "Image", "Label"
_TRUE = {"1", "true", "yes"}
_THRESHOLDS = ("model_score_threshold", "score_threshold")


class Label(NamedTuple):
    """A label of the project, and the model classes that map to it; if empty, the class with the label's own name."""

    value: str
    predicted: list[str]


class Control(NamedTuple):
    """A `RectangleLabels` of the project, for an `Image`."""

    name: str
    to_name: str
    """Name of the `Image`."""
    key: str
    """Key of the image in the data of a task."""
    threshold: float
    """Minimum score of an object."""
    model: str | None
    """Name of the model; None for the default model."""
    labels: list[Label]

    def map_labels(self, classes: Iterable[str]) -> dict[str, str]:
        """Return the labels by class name, for the classes that have one."""
        known = dict.fromkeys(classes)
        folded = {name.casefold(): name for name in known}
        labels: dict[str, str] = {}
        for value, predicted in self.labels:
            own = value if value in known else folded.get(value.casefold())
            found = [name for name in predicted if name in known] or ([] if own is None else [own])
            labels |= dict.fromkeys(found, value)
        return labels


@lru_cache(maxsize=64)  # a project sends the same configuration with each request
def read(config: str) -> Sequence[Control]:
    """Return the controls for rectangles on the first image that has such controls; raise MalformedRequest if it cannot be read."""
    if len(config) > MAX_CHARACTERS:
        raise MalformedRequest(f"the labeling configuration has more than {MAX_CHARACTERS} characters")
    if "<!DOCTYPE" in config:  # excludes custom entities and external references
        raise MalformedRequest("the labeling configuration has a document type, which is not supported")
    try:
        root = ET.fromstring(config)  # noqa: S314 - without a document type there are no entities to expand
    except (ET.ParseError, UnicodeEncodeError) as error:
        raise MalformedRequest("the labeling configuration is not well formed XML") from error
    images = [image for image in root.iter(_IMAGE) if image.get("value", "").startswith("$")]
    keys = {image.get("name", ""): image.get("value", "")[1:] for image in images}
    elements = [element for element in root.iter(_CONTROL) if _is_for_image(element, keys)]
    if len(elements) > _MAX_CONTROLS:
        raise MalformedRequest(f"the labeling configuration has more than {_MAX_CONTROLS} controls for rectangles")
    controls = [_to_control(element, keys) for element in elements]
    return tuple(control for control in controls if control.to_name == controls[0].to_name)


def _is_for_image(control: Element, keys: Iterable[str]) -> bool:
    return bool(control.get("name")) and _image_of(control) in keys and control.get("model_skip", "").lower() not in _TRUE


def _image_of(control: Element) -> str:
    return control.get("toName", "").partition(",")[0].strip()


def _to_control(control: Element, keys: Mapping[str, str]) -> Control:
    to_name = _image_of(control)
    threshold = next(filter(None, map(control.get, _THRESHOLDS)), None)
    model = control.get("model_path", "").removesuffix(".pt") or None
    labels = [
        Label(value, [name.strip() for name in label.get("predicted_values", "").split(",") if name.strip()])
        for label in control.iter(_LABEL)
        if (value := label.get("alias") or label.get("value"))
    ]
    return Control(control.get("name", ""), to_name, keys[to_name], _to_threshold(threshold), model, labels)


def _to_threshold(text: str | None) -> float:
    try:
        threshold = DEFAULT_THRESHOLD if text is None else float(text)
    except ValueError:
        threshold = -1
    if not 0 <= threshold <= 1:
        raise MalformedRequest(f"{_THRESHOLDS[0]}: expected a number from 0 to 1")
    return threshold
