"""Train models, export them, and keep the answers of Ultralytics' predictor beside them: `./just task-models`.

The folder then has `pictures/NNN.png` and `pictures/truth.json`, the shapes in them; and for each task, in `seg`, `pose` and
`obb`, `raw.onnx`, `nms.onnx` and `e2e.onnx`, and as `raw.json` and so on what the predictor finds in the pictures.
"""

import json
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import cv2
import numpy as np
from ultralytics import YOLO

from tests.task_models.answers import describe, predict
from tests.task_models.shapes import SIZE, draw
from tests.task_models.training import TASKS, train

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


main(Path(sys.argv[1]))
