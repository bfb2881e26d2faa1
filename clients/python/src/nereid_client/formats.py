"""Formats of result files other than JSON lines. Each is written anew from all lines, by replacing the file at once."""

import csv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec

from nereid_client.journal import Line

CLASSES = "classes.txt"
"""The names of the classes, in a folder of YOLO's labels."""


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
    images, annotations, categories = list[msgspec.Raw](), list[msgspec.Raw](), dict[int, str]()
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
            annotations.append(msgspec.Raw(msgspec.json.encode(annotation)))
            categories[found.class_id] = found.class_name
    named = [{"id": class_id, "name": name} for class_id, name in sorted(categories.items())]
    with _replacing(out) as file:
        file.buffer.write(msgspec.json.encode({"images": images, "annotations": annotations, "categories": named}))


def write_yolo(lines: Iterable[Line], out: Path, *, with_confidence: bool) -> None:
    """Write one text file per picture, with lines `class cx cy w h`; and `classes.txt`. Boxes of the lines must be fractions.

    Classes that were not found, and so have no known name, have their number there.
    """
    names: dict[int, str] = {}
    for line in lines:
        target = (out / line.file).with_suffix(".txt")
        target.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(target) as file:
            for found in line.detections:
                x1, y1, x2, y2 = found.x1, found.y1, found.x2, found.y2
                confidence = f" {found.confidence:g}" if with_confidence else ""
                box = f"{(x1 + x2) / 2:.6f} {(y1 + y2) / 2:.6f} {x2 - x1:.6f} {y2 - y1:.6f}"
                file.write(f"{found.class_id} {box}{confidence}\n")
                names[found.class_id] = found.class_name
    with _replacing(out / CLASSES) as file:
        file.writelines(f"{names.get(class_id, class_id)}\n" for class_id in range(max(names, default=-1) + 1))


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Write a file that takes the place of another one when it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        yield file
    unfinished.replace(path)
