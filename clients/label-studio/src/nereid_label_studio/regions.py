"""Regions of Label Studio: rectangles, polygons, brush masks and keypoints, in percent of the image.

Source: label_studio_ml/examples/yolo/control_models in label-studio-ml-backend; converter/utils.py in label-studio-sdk.
"""

from collections.abc import Iterable, Iterator
from math import degrees, dist
from typing import Any

from nereid_label_studio.brush import encode
from nereid_label_studio.labeling import Control

Json = dict[str, Any]
Size = tuple[int, int]
"""Width and height of the image, pixels."""


def regions_of(control: Control, answer: Json) -> Iterator[Json]:
    """Make the regions of a control from the gateway's answer, whose boxes are in pixels."""
    size = answer["image"]["width"], answer["image"]["height"]
    for number, detection in enumerate(answer["detections"]):
        if control.kind == "KeyPointLabels":
            yield from _keypoints(control, detection, f"{control.name}-{number}", size)
        elif label := control.label_of(detection["class_name"]):
            yield from (
                _region(control, label, detection["confidence"], shape, size) for shape in _shapes(control.kind, detection, size)
            )


def _region(control: Control, label: str, score: float, shape: Json, size: Size) -> Json:
    kind = control.kind.lower()
    return {
        "from_name": control.name,
        "to_name": control.to_name,
        "type": kind,
        "original_width": size[0],
        "original_height": size[1],
        "image_rotation": 0,
        "score": score,
        "value": {**shape, kind: [label]},
    }


def _percent(pixels: Iterable[float], size: Size) -> list[float]:
    return [round(100 * value / side, 4) for value, side in zip(pixels, size, strict=True)]


def _shapes(kind: str, detection: Json, size: Size) -> Iterator[Json]:
    """Return the shapes of an object, as the `value` of a region without its label; nothing if the model has none of the kind.

    A mask has a polygon for each of its parts. The rectangle of an oriented box is turned by degrees around its first corner.
    """
    match kind:
        case "PolygonLabels":
            for part in detection.get("mask", ()):
                yield {"points": [_percent(xy, size) for xy in zip(part[::2], part[1::2], strict=True)], "closed": True}
        case "BrushLabels":
            if rle := encode(detection["mask"], detection["mask_offset"], *size):
                yield {"format": "rle", "rle": rle}
        case _:
            start, sides = (
                (detection["x1"], detection["y1"]),
                (detection["x2"] - detection["x1"], detection["y2"] - detection["y1"]),
            )
            if "corners" in detection:
                start, second, third, _ = detection["corners"]
                sides = dist(start, second), dist(second, third)
            numbers = [*_percent(start, size), *_percent(sides, size), round(degrees(detection.get("rotation", 0)), 4)]
            yield dict(zip(("x", "y", "width", "height", "rotation"), numbers, strict=True))


def _keypoints(control: Control, detection: Json, group: str, size: Size) -> Iterator[Json]:
    """Make the regions of an object's keypoints, after that of the box to which they belong."""
    meta: Json = {"meta": {"text": [group]}}
    parent: Json = {"parentID": group} if control.box_name else {}
    points = []
    for index, point in enumerate(detection.get("keypoints", ())):
        label = control.label_of_point(detection["class_name"], index, point["name"])
        score = point.get("confidence", detection["confidence"])
        if label is not None and score >= control.point_threshold:
            x, y = _percent((point["x"], point["y"]), size)
            shape = {"x": x, "y": y, "width": 100 / size[0]}  # one pixel
            points.append(_region(control, label, score, shape, size) | meta | parent)
    if points and control.box_name:
        boxes = control._replace(kind="RectangleLabels", name=control.box_name)
        (box,) = _shapes(boxes.kind, detection, size)
        yield _region(boxes, detection["class_name"], detection["confidence"], box, size) | meta | {"id": group, "hidden": True}
    yield from points
