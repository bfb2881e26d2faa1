"""Read the controls for shapes on images from a labeling configuration of Label Studio.

Source: label_studio_ml/model.py, `build_label_map`, and label_studio_ml/examples/yolo in label-studio-ml-backend.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple
from urllib.parse import quote
from xml.etree.ElementTree import ParseError

from defusedxml.ElementTree import fromstring
from litestar.exceptions import ClientException

TASKS = {"RectangleLabels": "detect", "PolygonLabels": "segment", "BrushLabels": "segment", "KeyPointLabels": "pose"}
"""The gateway's route for each kind of control."""
_MAX_CONTROLS = 16
"""Each asks the gateway once for each image."""
_TRUE = {"1", "true", "yes"}

Attributes = Mapping[str, str]


class Label(NamedTuple):
    """A label of the project."""

    name: str
    """Its name in annotations."""
    value: str
    """Its name in the configuration, in lower case."""
    classes: frozenset[str]
    """The classes in `predicted_values`."""
    point: str | None
    """`model_index`, the index of a keypoint."""

    @classmethod
    def read(cls, label: Attributes) -> "Label":
        """Read an element with a `value`."""
        classes = frozenset(filter(None, map(str.strip, label.get("predicted_values", "").split(","))))
        return cls(label.get("alias") or label["value"], label["value"].casefold(), classes, label.get("model_index"))


class Control(NamedTuple):
    """A control of the project, for an `Image`."""

    kind: str
    name: str
    to_name: str
    """Name of the `Image`."""
    key: str
    """Key of the image in the data of a task."""
    attributes: Attributes
    labels: Sequence[Label]
    point_threshold: float
    """Minimum confidence of a keypoint."""
    box_name: str | None
    """Name of the `RectangleLabels` for the boxes around keypoints; None for no boxes."""

    @property
    def question(self) -> tuple[str, dict[str, str]]:
        """Path and parameters of the question to the gateway, which checks them."""
        model = self.attributes.get("model_path", "").removesuffix(".pt")
        threshold = self.attributes.get("model_score_threshold") or self.attributes.get("score_threshold") or "0.5"
        parameters = {"boxes": "pixel", "max_detections": "300", "confidence": threshold}
        if self.kind == "BrushLabels":
            parameters |= {"masks": "png", **({"model": model} if model else {})}
        elif model:
            return f"/predict/{quote(model, safe='')}", parameters
        return f"/{TASKS[self.kind]}", parameters

    def label_of(self, class_name: str) -> str | None:
        """Return the label for a class: the one that has it in `predicted_values`, or else the one with its name, in any case."""
        predicting = (label.name for label in self.labels if class_name in label.classes)
        alike = (label.name for label in self.labels if label.value == class_name.casefold())
        return next(chain(predicting, alike), None)

    def label_of_point(self, class_name: str, index: int, name: str) -> str | None:
        """Return the label for a keypoint: by `model_index`, or else by its name; `predicted_values` limit it to classes."""
        for label in self.labels:
            is_point = label.value == name.casefold() if label.point is None else label.point == str(index)
            if is_point and class_name in (label.classes or {class_name}):
                return label.name
        return None


def read(config: str) -> list[Control]:
    """Return the controls for shapes on the first image that has such controls; raise ClientException if it cannot be read."""
    try:
        root = fromstring(config, forbid_dtd=True)
    except (ParseError, ValueError) as error:  # ValueError: a document type, or characters that XML cannot have
        raise ClientException("the labeling configuration is not well-formed XML, or has a document type") from error
    keys = {image.get("name"): key[1:] for image in root.iter("Image") if (key := image.get("value", "")).startswith("$")}
    names = {element.get("name") for element in root.iter("RectangleLabels")}
    controls: list[Control] = []
    for element in root.iter():
        name, to_name = element.get("name"), element.get("toName", "").partition(",")[0].strip()
        is_asked = element.get("model_skip", "").lower() not in _TRUE
        if element.tag in TASKS and name and to_name in keys and is_asked:
            if len(controls) == _MAX_CONTROLS:
                raise ClientException(f"the labeling configuration has more than {_MAX_CONTROLS} controls for shapes")
            labels = [Label.read(label.attrib) for label in element.iter("Label") if label.get("value")]
            has_boxes = f"{name}_bbox" in names and element.get("model_add_bboxes", "true").lower() in _TRUE
            box_name = f"{name}_bbox" if has_boxes else None
            points = _fraction("model_point_threshold", element.get("model_point_threshold") or "0")
            controls.append(Control(element.tag, name, to_name, keys[to_name], element.attrib, labels, points, box_name))
    return [control for control in controls if control.to_name == controls[0].to_name]


def _fraction(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1
    if not 0 <= number <= 1:
        raise ClientException(f"{name}: expected a number from 0 to 1")
    return number
