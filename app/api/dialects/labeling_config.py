"""Read the controls for shapes on images from a labeling configuration of Label Studio.

Source: label_studio_ml/model.py, `build_label_map`, and label_studio_ml/examples/yolo in label-studio-ml-backend.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, get_args
from xml.etree import ElementTree as ET

from app.api.parameters.parse import split_classes
from app.errors import MalformedRequest

MAX_CHARACTERS = 1 << 16
DEFAULT_THRESHOLD = 0.5
"""Minimum score if the configuration sets none; the value in Label Studio's YOLO example."""

_MAX_CONTROLS = 16
"""Limits the response, which repeats all objects of an image for each control."""
_TRUE = {"1", "true", "yes"}

ControlKind = Literal["RectangleLabels", "PolygonLabels", "BrushLabels", "KeyPointLabels"]
KINDS: tuple[ControlKind, ...] = get_args(ControlKind)
Attributes = Mapping[str, str]


class Label(NamedTuple):
    """A label of the project, and the model classes that map to it; if empty, the class with the label's own name."""

    value: str
    predicted: list[str]
    point: str | None
    """For a keypoint, its index among those of the model."""


class Control(NamedTuple):
    """A control of the project, for an `Image`."""

    kind: ControlKind
    name: str
    to_name: str
    """Name of the `Image`."""
    key: str
    """Key of the image in the data of a task."""
    threshold: float
    model: str | None
    """Name of the model; None for the default model."""
    labels: list[Label]
    point_threshold: float
    box_name: str | None
    """Name of the `RectangleLabels` for the boxes around keypoints; None for no boxes."""

    def map_labels(self, classes: Iterable[str]) -> dict[str, str]:
        """Return the labels by class name, for the classes that have one."""
        known = dict.fromkeys(classes)
        folded = {name.casefold(): name for name in known}
        labels: dict[str, str] = {}
        for value, predicted, _ in self.labels:
            own = value if value in known else folded.get(value.casefold())
            found = [name for name in predicted if name in known] or ([] if own is None else [own])
            labels |= dict.fromkeys(found, value)
        return labels

    def map_points(self, classes: Sequence[str], points: Sequence[str]) -> Mapping[tuple[str, int], str]:
        """Return the labels by class name and index of a keypoint.

        Labels without `model_index` are for the keypoint with their name, and those without `predicted_values` for all classes.
        """
        indices = {str(index): index for index in range(len(points))}
        named = {name.casefold(): index for index, name in enumerate(points)}
        found = (
            (label, named.get(label.value.casefold()) if label.point is None else indices.get(label.point)) for label in self.labels
        )
        return {(name, index): label.value for label, index in found if index is not None for name in label.predicted or classes}


@lru_cache(maxsize=64)  # a project sends the same configuration with each request
def read(config: str) -> Sequence[Control]:
    """Return the controls for shapes on the first image that has such controls; raise MalformedRequest if it cannot be read."""
    if len(config) > MAX_CHARACTERS:
        raise MalformedRequest(f"the labeling configuration has more than {MAX_CHARACTERS} characters")
    if "<!DOCTYPE" in config:  # excludes custom entities and external references
        raise MalformedRequest("the labeling configuration has a document type, which is not supported")
    try:
        root = ET.fromstring(config)  # noqa: S314 - it has no document type, and a limited length
    except (ET.ParseError, UnicodeEncodeError) as error:
        raise MalformedRequest("the labeling configuration is not well formed XML") from error
    keys = {image.get("name", ""): key[1:] for image in root.iter("Image") if (key := image.get("value", "")).startswith("$")}
    elements = [(element.tag, element) for element in root.iter() if element.tag in KINDS]
    names = {element.get("name") for _, element in elements}
    controls = [found for kind, element in elements if (found := _to_control(kind, element, keys, names))]
    if len(controls) > _MAX_CONTROLS:
        raise MalformedRequest(f"the labeling configuration has more than {_MAX_CONTROLS} controls for shapes")
    return tuple(control for control in controls if control.to_name == controls[0].to_name)


def _to_control(kind: ControlKind, element: ET.Element, keys: Attributes, names: Container[str | None]) -> Control | None:
    """Make a control; return None if it is not for an image or has `model_skip`.

    `keys` are those of the images in the data of a task, by the name of the `Image`; `names` are those of all controls.
    """
    attributes = element.attrib
    name, to_name = attributes.get("name"), attributes.get("toName", "").partition(",")[0].strip()
    if not name or to_name not in keys or attributes.get("model_skip", "").lower() in _TRUE:
        return None
    has_boxes = attributes.get("model_add_bboxes", "true").lower() in _TRUE
    return Control(
        kind,
        name,
        to_name,
        key=keys[to_name],
        threshold=_to_threshold(attributes, DEFAULT_THRESHOLD, "model_score_threshold", "score_threshold"),
        model=attributes.get("model_path", "").removesuffix(".pt") or None,
        labels=[
            Label(value, split_classes(label.get("predicted_values", "")) or [], label.get("model_index"))
            for label in element.iter("Label")
            if (value := label.get("alias") or label.get("value"))
        ],
        point_threshold=_to_threshold(attributes, 0, "model_point_threshold"),
        box_name=box_name if (box_name := f"{name}_bbox") in names and has_boxes else None,
    )


def _to_threshold(attributes: Attributes, default: float, *names: str) -> float:
    text = next(filter(None, map(attributes.get, names)), None)
    try:
        threshold = default if text is None else float(text)
    except ValueError:
        threshold = -1
    if not 0 <= threshold <= 1:
        raise MalformedRequest(f"{names[0]}: expected a number from 0 to 1")
    return threshold
