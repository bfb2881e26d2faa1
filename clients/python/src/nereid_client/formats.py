"""Formats of result files other than JSON lines. Each is written anew from all lines, by replacing the file at once."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import msgspec

from nereid_client.journal import Line
from nereid_client.results import Detection

CLASSES = "classes.txt"
"""The names of the classes, in a folder of YOLO's labels."""
_VISIBLE = 0.5
"""Confidence from which a keypoint counts as visible."""


def write_csv(lines: Iterable[Line], out: Path) -> None:
    """Write one row per detection."""
    with _replacing(out) as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("file", "class_id", "class_name", "confidence", "x1", "y1", "x2", "y2"))
        for line in lines:
            for found in line.detections:
                corners = found.x1, found.y1, found.x2, found.y2
                rows.writerow((line.file, found.class_id, found.class_name, found.confidence, *corners))


def write_coco(lines: Iterable[Line], out: Path) -> None:
    """Write a COCO dataset: `images`, `annotations` with a `score` each, and the `categories` that were found.

    A category's id is the model's class id; image ids count the lines, from 1. Boxes of the lines must be in pixels.
    """
    # Encoded one by one, because the objects of many thousand pictures take much memory.
    images, annotations, categories = list[msgspec.Raw](), list[msgspec.Raw](), dict[int, Any]()
    for image_id, line in enumerate(lines, 1):
        image = {"id": image_id, "file_name": line.file, "width": line.image.width, "height": line.image.height}
        images.append(msgspec.Raw(msgspec.json.encode(image)))
        for found in line.detections:
            width, height = found.x2 - found.x1, found.y2 - found.y1
            annotation = {
                "id": len(annotations) + 1,
                "image_id": image_id,
                "category_id": found.class_id,
                "bbox": [round(number, 2) for number in (found.x1, found.y1, width, height)],
                "area": round(width * height, 2),
                "iscrowd": 0,
                "score": found.confidence,
            }
            annotation |= _shape(found)
            annotations.append(msgspec.Raw(msgspec.json.encode(annotation)))
            points = {"keypoints": [point.name for point in found.keypoints]} if found.keypoints else {}
            categories[found.class_id] = {"id": found.class_id, "name": found.class_name, **points}
    named = [category for _, category in sorted(categories.items())]
    with _replacing(out) as file:
        file.buffer.write(msgspec.json.encode({"images": images, "annotations": annotations, "categories": named}))


def write_yolo(lines: Iterable[Line], out: Path, *, with_confidence: bool) -> None:
    """Write one text file per picture, with the labels of Ultralytics for the task; and `classes.txt`.

    The numbers of the lines must be fractions. An object whose mask is empty has no label. Classes that were not found, and so
    have no known name, have their number in `classes.txt`.
    """
    names: dict[int, str] = {}
    for line in lines:
        target = (out / line.file).with_suffix(".txt")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as file:
            for found in line.detections:
                names[found.class_id] = found.class_name
                if numbers := _label(found):
                    confidence = f" {found.confidence:g}" if with_confidence else ""
                    file.write(f"{found.class_id} {' '.join(f'{number:.6f}' for number in numbers)}{confidence}\n")
    with _replacing(out / CLASSES) as file:
        file.writelines(f"{names.get(class_id, class_id)}\n" for class_id in range(max(names, default=-1) + 1))


def _shape(found: Detection) -> dict[str, Any]:
    """Return what an annotation of COCO has beyond the box, in pixels."""
    if found.keypoints is not None:
        # 1 is labelled but not visible.
        points = [
            (point.x, point.y, 1 if point.confidence is not None and point.confidence < _VISIBLE else 2)
            for point in found.keypoints
        ]
        return {"keypoints": [*chain(*points)], "num_keypoints": len(points)}
    parts = found.mask if isinstance(found.mask, list) else [[*chain(*found.corners)]] if found.corners else None
    return {} if parts is None else {"segmentation": parts, "area": round(sum(map(_area, parts)), 2)}


def _area(polygon: list[float]) -> float:
    points = [*zip(polygon[::2], polygon[1::2], strict=True)]
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in zip(points, points[1:] + points[:1], strict=True))) / 2


def _label(found: Detection) -> list[float]:
    """Return the numbers of a label after the class; the polygons of a mask as one, which is what Ultralytics writes."""
    if isinstance(found.mask, list):
        return [*chain(*found.mask)]
    if found.corners is not None:
        return [*chain(*found.corners)]
    box = [(found.x1 + found.x2) / 2, (found.y1 + found.y2) / 2, found.x2 - found.x1, found.y2 - found.y1]
    points = ((point.x, point.y, 1 if point.confidence is None else point.confidence) for point in found.keypoints or ())
    return [*box, *chain(*points)]


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Write a file that takes the place of another one when it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        yield file
    unfinished.replace(path)
