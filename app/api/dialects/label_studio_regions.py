"""Regions of Label Studio: rectangles, polygons, brush masks and keypoints, in percent of the image.

Source: label_studio_ml/examples/yolo/control_models in label-studio-ml-backend; converter/utils.py in label-studio-sdk.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from app.api.answering.native import objects, rounded
from app.api.dialects.dialect import side_lengths
from app.api.dialects.label_studio_brush import encode_mask
from app.api.dialects.labeling_config import Control, ControlKind
from app.errors import GatewayError
from app.model.heads import PoseHead
from app.model.reference import refer_to
from app.pipeline.results import Detections

_PERCENT_DIGITS = 4
_SCORE_DIGITS = 4
# Memory of one region, one vertex and one byte of a PNG, as objects and in the response.
_REGION_BYTES = 1500
_VERTEX_BYTES = 300
_PNG_BYTES = 100
# Of the largest mask, while it is encoded.
_PIXEL_BYTES = 6

Shape = dict[str, Any]
Region = dict[str, Any]


def estimate_bytes(found: Sequence[Detections | Exception], controls: Sequence[Control]) -> int:
    """Return about how much memory the regions in some images take."""
    nbytes = pixels = 0
    for each in found:
        if not isinstance(each, Exception):
            points = 0 if each.keypoints is None else each.keypoints.shape[1]
            nbytes += len(each.scores) * (1 + points) * _REGION_BYTES
            for mask in each.masks or ():
                nbytes += sum(map(len, mask.parts)) * _VERTEX_BYTES + len(mask.encoded or b"") * _PNG_BYTES
                pixels = max(pixels, each.width * each.height if mask.encoded else 0)
    return nbytes * len(controls) + _PIXEL_BYTES * pixels


def describe(found: Sequence[Detections | Exception], controls: Sequence[Control]) -> bytes:
    """Encode the response to a request with some images, of which all or some were answered."""
    answered = [each for each in found if not isinstance(each, Exception)]
    # Includes classes without a label in the model's config, which are named by their ids.
    names = {each.spec.class_name(id_) for each in answered for id_ in np.unique(each.class_ids).tolist()}
    known = [*answered[0].spec.labels, *sorted(names)] if answered else []
    return msgspec.json.encode({"results": [to_prediction(each, controls, known) for each in found]})


def to_prediction(found: Detections | Exception, controls: Sequence[Control], classes: Sequence[str]) -> dict[str, Any]:
    """Convert the detections in an image to regions, for the classes that the project has labels for.

    Label Studio logs an entry without `result` and continues with the next one. `classes` are the names of all classes.
    """
    if isinstance(found, Exception):
        return {"error": found.detail if isinstance(found, GatewayError) else "the failure has been logged"}
    kinds = {control.kind for control in controls}
    shapes = {kind: list(_shapes(found, kind)) for kind in kinds}
    regions: list[Region] = []
    for control in controls:
        to_regions = _to_keypoints if control.kind == "KeyPointLabels" else _to_regions
        regions += to_regions(found, control, classes, shapes[control.kind])
    mean = sum(region["score"] for region in regions) / max(len(regions), 1)
    return {"model_version": refer_to(found.spec.name, found.version), "score": round(mean, 4), "result": regions}


def _to_regions(found: Detections, control: Control, classes: Sequence[str], shapes: Iterable[list[Shape]]) -> Iterator[Region]:
    """Make the regions of a control from the shapes of each object; an object has several if its mask has several parts."""
    labels = control.map_labels(classes)
    for (_, score, _, name), own in zip(objects(found, "pixel"), shapes, strict=False):
        if name in labels and score >= control.threshold:
            yield from (_to_region(found, control, shape, labels[name], score) for shape in own)


def _to_keypoints(found: Detections, control: Control, classes: Sequence[str], boxes: Iterable[list[Shape]]) -> Iterator[Region]:
    """Make the regions of the keypoints, after that of the box to which they belong; nothing if the model has no keypoints."""
    if found.keypoints is None or not isinstance(found.spec.head, PoseHead):
        return
    labels = control.map_points(classes, found.spec.head.keypoint_names)
    percent = np.array([found.width, found.height]) / 100
    for number, ((_, score, _, name), (box,), points) in enumerate(
        zip(objects(found, "pixel"), boxes, found.keypoints, strict=True)
    ):
        if score < control.threshold:
            continue
        group = f"{control.name}-{number}"
        has_confidence = points.shape[1] > 2  # noqa: PLR2004 - x and y
        confidences = rounded(points[:, 2], _SCORE_DIGITS) if has_confidence else [score] * len(points)
        meta: Region = {"meta": {"text": (group,)}}
        parent: Region = {"parentID": group} if control.box_name else {}
        own = []
        for index, ((x, y), confidence) in enumerate(
            zip(rounded(points[:, :2] / percent, _PERCENT_DIGITS), confidences, strict=True)
        ):
            label = labels.get((name, index))
            if label is not None and confidence >= control.point_threshold:
                shape = {"x": x, "y": y, "width": 100 / found.width}  # one pixel
                own.append(_to_region(found, control, shape, label, confidence) | meta | parent)
        if own and control.box_name:
            box_control = control._replace(kind="RectangleLabels", name=control.box_name)
            yield {**_to_region(found, box_control, box, name, score), "id": group, "hidden": True, **meta}
        yield from own


def _to_region(found: Detections, control: Control, shape: Shape, label: str, score: float) -> Region:
    return {
        "from_name": control.name,
        "to_name": control.to_name,
        "type": control.kind.lower(),
        "original_width": found.width,
        "original_height": found.height,
        "image_rotation": 0,
        "score": score,
        "value": {**shape, control.kind.lower(): (label,)},
    }


def _shapes(found: Detections, kind: ControlKind) -> Iterator[list[Shape]]:
    """Return the shapes of each object, as the `value` of a region without its label; nothing if the model has none of the kind.

    The rectangle of an oriented box is turned by degrees around its first corner. Keypoints are in their object's box.
    """
    percent = np.array([found.width, found.height]) / 100
    match kind:
        case "PolygonLabels":
            for mask in found.masks or ():
                yield [{"points": rounded(part / percent, _PERCENT_DIGITS), "closed": True} for part in mask.parts]
        case "BrushLabels":
            for mask in found.masks or ():
                pngs = [mask.encoded] if isinstance(mask.encoded, bytes) and mask.parts else []
                yield [{"format": "rle", "rle": encode_mask(png, mask.offset, found.width, found.height)} for png in pngs]
        case "RectangleLabels" | "KeyPointLabels":
            if found.corners is None:
                starts, sides = found.boxes[:, :2], found.boxes[:, 2:] - found.boxes[:, :2]
                rotations = np.zeros(len(starts))
            else:
                starts, sides, rotations = found.corners[:, 0], side_lengths(found.corners), np.degrees(found.rotations)
            table = rounded(np.column_stack([starts / percent, sides / percent, rotations]), _PERCENT_DIGITS)
            for x, y, width, height, rotation in table:
                yield [{"x": x, "y": y, "width": width, "height": height, "rotation": rotation}]
