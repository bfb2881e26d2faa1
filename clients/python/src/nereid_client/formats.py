"""Formats of result files other than JSON lines. Each is written anew from all lines, by replacing the file at once."""

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TextIO

import msgspec

from nereid_client.journal import Line
from nereid_client.results import Detection

Corners = tuple[float, float, float, float]
"""x1, y1, x2, y2 in pixels of the upright image."""


def write_csv(lines: Iterable[Line], out: Path) -> None:
    """Write one row per detection; corners are as the run asked for them."""
    with _replacing(out) as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("file", "class_id", "class_name", "confidence", "x1", "y1", "x2", "y2"))
        for line in lines:
            for found in line.detections:
                corners = found.x1, found.y1, found.x2, found.y2
                rows.writerow((line.file, found.class_id, found.class_name, found.confidence, *corners))


def write_coco(lines: Iterable[Line], out: Path) -> None:
    """Write a COCO dataset: `images`, `annotations` with a `score` each, and the `categories` that were found.

    A category's id is the model's class id; image ids count the pictures by path, from 1.
    """
    images, annotations, categories = list[Any](), list[Any](), dict[int, str]()
    for image_id, line in enumerate(sorted(lines, key=lambda line: line.file), 1):
        images.append({"id": image_id, "file_name": line.file, "width": line.image.width, "height": line.image.height})
        for found, (x1, y1, x2, y2) in _in_pixels(line):
            width, height = x2 - x1, y2 - y1
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image_id,
                    "category_id": found.class_id,
                    "bbox": [round(number, 2) for number in (x1, y1, width, height)],
                    "area": round(width * height, 2),
                    "iscrowd": 0,
                    "score": found.confidence,
                }
            )
            categories[found.class_id] = found.class_name
    named = [{"id": class_id, "name": name} for class_id, name in sorted(categories.items())]
    with _replacing(out) as file:
        file.write(msgspec.json.encode({"images": images, "annotations": annotations, "categories": named}).decode())


def write_yolo(lines: Iterable[Line], out: Path, *, with_confidence: bool) -> None:
    """Write one text file per picture, with lines `class cx cy w h`, fractions of the image; and `classes.txt`.

    Classes that were not found, and so have no known name, have their number there.
    """
    names: dict[int, str] = {}
    for line in lines:
        target = label_file(out, line.file)
        target.parent.mkdir(parents=True, exist_ok=True)
        rows = []
        for found, (x1, y1, x2, y2) in _in_pixels(line):
            width, height = line.image.width, line.image.height
            numbers = (x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height
            confidence = [f"{found.confidence:g}"] if with_confidence else []
            rows.append(" ".join([str(found.class_id), *(f"{number:.6f}" for number in numbers), *confidence]) + "\n")
            names[found.class_id] = found.class_name
        with _replacing(target) as file:
            file.writelines(rows)
    with _replacing(out / "classes.txt") as file:
        file.writelines(f"{names.get(class_id, class_id)}\n" for class_id in range(max(names, default=-1) + 1))


def label_file(out: Path, picture: str) -> Path:
    """Return the file in which YOLO expects the labels of a picture."""
    return out / PurePath(picture).with_suffix(".txt")


WRITERS: dict[str, Callable[[Iterable[Line], Path], None]] = {"csv": write_csv, "coco": write_coco}


def _in_pixels(line: Line) -> Iterator[tuple[Detection, Corners]]:
    is_pixel = line.parameters["boxes"] == "pixel"
    across, down = (1, 1) if is_pixel else (line.image.width, line.image.height)
    for found in line.detections:
        yield found, (found.x1 * across, found.y1 * down, found.x2 * across, found.y2 * down)


@contextmanager
def _replacing(path: Path) -> Iterator[TextIO]:
    """Write a file that takes the place of another one when it is complete."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8", newline="") as file:
        yield file
    unfinished.replace(path)
