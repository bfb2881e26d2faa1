"""Train models, export them, and keep the answers of Ultralytics' predictor beside them: `./just task-models`.

The folder then has `pictures/NNN.png` and `pictures/truth.json`, the shapes in them; and for each task, in `seg`, `pose` and
`obb`, `raw.onnx`, `nms.onnx` and `e2e.onnx`, and as `raw.json` and so on what the predictor finds in the pictures.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
import torch
import yaml
from pycocotools import mask as rle
from ultralytics import YOLO
from ultralytics.engine.results import Results
from ultralytics.utils.ops import scale_masks

EXPORTS = {"yolo11": {"raw": None, "nms": True}, "yolo26": {"e2e": False}}
"""Exports of each family, with Ultralytics' argument `nms`: none, in the graph, or a head that needs none."""
SIZES = ((256, 256), (320, 240), (400, 300), (192, 256), (240, 320), (500, 375), (333, 251), (640, 480))
LARGE = ((1280, 960), (720, 1280))


def main(target: Path) -> None:
    """Make what is missing."""
    if not (target / "pictures" / "truth.json").exists():
        write_pictures(target / "pictures")
    start = None
    for family, exports in EXPORTS.items():
        for task in TASKS:
            weights = target / task / f"{family}.pt"
            if not weights.exists():
                weights.parent.mkdir(exist_ok=True)
                with TemporaryDirectory() as folder:
                    shutil.copyfile(train(family, task, Path(folder), start), weights)
            start = weights
            for name, nms in exports.items():
                if not weights.with_name(f"{name}.json").exists():
                    write_export(weights, name, target / "pictures", nms=nms)


def write_pictures(folder: Path) -> None:
    """Draw 64 pictures that are not for training: most are not square, and four are large."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    truth = {}
    for number, size in enumerate((*SIZES * 7, *SIZES[4:], *LARGE * 2)):
        picture, shapes = draw(rng, *size)
        name = f"{number:03}.png"
        cv2.imwrite(str(folder / name), picture)
        truth[name] = [describe(shape) for shape in shapes]
    (folder / "truth.json").write_text(json.dumps(truth), encoding="utf-8")


def write_export(weights: Path, name: str, pictures: Path, *, nms: bool | None) -> None:
    """Export a model, and write the predictor's answers last: they say that the export is complete."""
    # With NMS in the graph, more than `batch` images get no answers.
    exported = YOLO(weights).export(format="onnx", imgsz=SIZE, dynamic=True, batch=8, nms=nms, simplify=False, device="cpu")
    Path(exported).rename(weights.with_name(f"{name}.onnx"))
    answers = predict(weights, sorted(pictures.glob("*.png")), nms=False if nms is False else None)
    weights.with_name(f"{name}.json").write_text(json.dumps(answers), encoding="utf-8")


NAMES = ("oval", "box", "triangle")
KEYPOINTS = ("nose", "left", "right")
SIZE = 256
"""Width and height of the models' input, and of the pictures for training, in pixels."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape, in pixels of its picture."""

    kind: int
    """Index in `NAMES`."""
    outline: np.ndarray
    """Polygon, float [P, 2]."""
    corners: np.ndarray
    """Rotated box, float [4, 2]."""
    keypoints: np.ndarray
    """x, y and visibility (0 or 2) of each of `KEYPOINTS`, float [3, 3]."""


def draw(rng: np.random.Generator, width: int, height: int) -> tuple[np.ndarray, list[Shape]]:
    """Draw up to eight shapes on a dark background with noise; they do not overlap, and are clear of the edges.

    Returns:
        The picture, uint8 [height, width, 3] in BGR, and its shapes.
    """
    coarse = rng.integers(20, 90, (5, 5, 3)).astype(np.uint8)
    picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.float32)
    picture = np.clip(picture + rng.normal(0, 12, picture.shape), 0, 255).astype(np.uint8)
    shapes: list[Shape] = []
    circles: list[tuple[np.ndarray, float]] = []
    for _ in range(rng.integers(6, 20)):
        length = rng.uniform(0.14, 0.32) * max(width, height)
        breadth = length * rng.uniform(0.45, 0.75)
        radius = float(np.hypot(length, breadth)) / 2
        centre = rng.uniform((radius, radius), (width - radius, height - radius))
        if len(shapes) == 8 or any(np.linalg.norm(centre - other) < radius + reach for other, reach in circles):
            continue
        circles.append((centre, radius))
        shapes.append(_draw_shape(rng, picture, centre, length, breadth))
    return picture, shapes


def _draw_shape(rng: np.random.Generator, picture: np.ndarray, centre: np.ndarray, length: float, breadth: float) -> Shape:
    """Draw a shape in one colour, with a white dot at its nose and a black dot at each of its other visible keypoints."""
    kind = int(rng.integers(len(NAMES)))
    angle = rng.uniform(0, 2 * np.pi)
    across = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    corners = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    turns = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    outline = (np.stack([np.cos(turns), np.sin(turns)], 1) / 2, corners, np.array([[0.5, 0], [-0.5, 0.5], [-0.5, -0.5]]))[kind]
    # Inside every kind of shape.
    keypoints = np.array([[0.25, 0], [-0.25, -0.25], [-0.25, 0.25]])
    placed = [points * (length, breadth) @ across + centre for points in (outline, corners, keypoints)]
    _fill(picture, placed[0], rng.integers(120, 230, 3))
    visible = np.array([True, *(rng.random(2) > 0.15)])
    for number in np.flatnonzero(visible):
        dot = placed[2][number] + np.stack([np.cos(turns), np.sin(turns)], 1) * length * 0.08
        _fill(picture, dot, 0 if number else 255)
    return Shape(kind, placed[0], placed[1], np.column_stack([placed[2], visible * 2.0]) * visible[:, None])


def _fill(picture: np.ndarray, polygon: np.ndarray, colour: np.ndarray | int) -> None:
    """Fill a polygon whose points lie between pixels' centres."""
    cv2.fillPoly(
        picture, [np.round((polygon - 0.5) * 16).astype(np.int32)], np.broadcast_to(colour, 3).tolist(), cv2.LINE_AA, shift=4
    )


TASKS = ("seg", "pose", "obb")


def write_data_set(folder: Path, task: str, number: int) -> str:
    """Write square pictures with their labels in Ultralytics' format.

    Returns:
        The file that describes the data set.
    """
    rng = np.random.default_rng(1)
    for part in ("images", "labels"):
        (folder / part).mkdir(parents=True)
    for index in range(number):
        picture, shapes = draw(rng, SIZE, SIZE)
        cv2.imwrite(str(folder / "images" / f"{index:03}.png"), picture)
        lines = [" ".join(f"{value:g}" for value in (shape.kind, *_label(task, shape))) for shape in shapes]
        (folder / "labels" / f"{index:03}.txt").write_text("\n".join(lines), encoding="utf-8")
    description: dict[str, object] = {"path": str(folder), "train": "images", "val": "images", "names": dict(enumerate(NAMES))}
    if task == "pose":
        description |= {
            "kpt_shape": [len(KEYPOINTS), 3],
            "flip_idx": [0, 2, 1],
            "kpt_names": dict.fromkeys(range(len(NAMES)), KEYPOINTS),
        }
    file = folder / "data.yaml"
    file.write_text(yaml.safe_dump(description), encoding="utf-8")
    return str(file)


def _label(task: str, shape: Shape) -> np.ndarray:
    if task == "seg":
        return np.asarray(shape.outline / SIZE).ravel()
    if task == "obb":
        return np.asarray(shape.corners / SIZE).ravel()
    low, high = shape.outline.min(0) / SIZE, shape.outline.max(0) / SIZE
    return np.concatenate([(low + high) / 2, high - low, (shape.keypoints / (SIZE, SIZE, 1)).ravel()])


def train(family: str, task: str, folder: Path, start: Path | None) -> Path:
    """Train a model, and return the file of its weights.

    Args:
        family: `yolo11` or `yolo26`.
        task: One of `TASKS`.
        folder: Where the pictures and weights are written.
        start: Weights of another model, from which training takes less than half the time.
    """
    model = YOLO(f"{family}n-{task}.yaml")
    if start:
        model.load(start)
    model.train(
        data=write_data_set(folder / "data", task, 320),
        imgsz=SIZE,
        epochs=5 if start else 12,
        # A step with each batch, as there are few.
        batch=8,
        nbs=8,
        optimizer="AdamW",
        lr0=0.002,
        lrf=0.02,
        warmup_epochs=0.5,
        warmup_bias_lr=0.01,
        # The pictures differ enough, and a mirrored shape has its keypoints in another order.
        mosaic=0,
        fliplr=0,
        scale=0.2,
        val=False,
        plots=False,
        amp=False,
        workers=0,
        device="cpu",
        project=folder,
        verbose=False,
    )
    return Path(model.trainer.last)


Answer = dict[str, object]


def describe(shape: Shape) -> Answer:
    """Return a shape in the form of an answer."""
    return {
        "class": shape.kind,
        "box": [*shape.outline.min(0), *shape.outline.max(0)],
        "polygon": shape.outline.tolist(),
        "keypoints": shape.keypoints.tolist(),
        "corners": shape.corners.tolist(),
    }


def predict(weights: Path, pictures: list[Path], *, nms: bool | None) -> dict[str, list[Answer]]:
    """Ask the predictor, whose input is the padded square as with an exported model.

    Returns:
        For each picture's name the objects, best first, with `class`, `score` and, in pixels of the picture, `box`
        [x1, y1, x2, y2] and what the task adds: `polygon` [P, 2] and `mask` in COCO's compressed RLE, or `keypoints` [3, 3] with
        confidence, or `rotated` [x, y, width, height, radians] and `corners` [4, 2].
    """
    model = YOLO(weights)
    options = {
        "imgsz": SIZE,
        "rect": False,
        "conf": 0.25,
        "iou": 0.7,
        "max_det": 300,
        "nms": nms,
        "device": "cpu",
        "verbose": False,
    }
    return {picture.name: _answers(model(picture, **options)[0]) for picture in pictures}


def _answers(result: Results) -> list[Answer]:
    found = result.boxes if result.obb is None else result.obb
    columns = {"class": found.cls.int().tolist(), "score": found.conf.tolist(), "box": found.xyxy.tolist()}
    if result.masks is not None:
        masks = scale_masks(result.masks.data[None], result.orig_shape)[0] > 0.5
        columns |= {"polygon": [polygon.tolist() for polygon in result.masks.xy], "mask": [_encode(mask) for mask in masks]}
    if result.keypoints is not None:
        columns["keypoints"] = result.keypoints.data.tolist()
    if result.obb is not None:
        columns |= {"rotated": found.xywhr.tolist(), "corners": found.xyxyxyxy.tolist()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _encode(mask: torch.Tensor) -> dict[str, object]:
    """Return a mask [height, width] in COCO's compressed RLE."""
    encoded = rle.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}


main(Path(sys.argv[1]))
