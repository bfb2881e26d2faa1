"""Training of Ultralytics' small models on drawn shapes."""

from pathlib import Path

import cv2
import numpy as np
import yaml
from ultralytics import YOLO

from tests.task_models.shapes import KEYPOINTS, NAMES, SIZE, Shape, draw

TASKS = ("seg", "pose", "obb")


def write_pictures(folder: Path, task: str, number: int) -> str:
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
        data=write_pictures(folder / "data", task, 320),
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
