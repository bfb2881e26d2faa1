"""pycocotools, with the results of a batch."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.dialects.test_tasks import IMAGE, triton_for
from tests.callers.client import run
from tests.callers.conftest import PATIENCE_SECONDS
from tests.fakes.triton import serving
from tests.support import IMAGES
from tests.system.gateway import running_gateway

PHOTOS = {139: IMAGES / "coffee.jpg", 285: IMAGES / "chelsea.jpg", 632: IMAGES / "astronaut.jpg"}
"""By their ids in the data set."""


def evaluate(folder: Path, truth: dict[str, Any], results: list[dict[str, Any]], kind: str) -> list[float]:
    """Return the AP, and that at an IoU of 0.5."""
    (folder / "truth.json").write_text(json.dumps(truth))
    (folder / "results.json").write_text(json.dumps(results))
    found: list[float] = run("pycocotools", "evaluate", str(folder / "truth.json"), str(folder / "results.json"), kind)[:2]
    return found


@pytest.mark.client("pycocotools")
def test_boxes(own: httpx.Client, tmp_path: Path) -> None:
    """Boxes of a batch, with gaps between the category ids: AP 1 for the own boxes, 0.7 if they move by a tenth of their width."""
    classes = next(one["classes"] for one in own.get("/models").json()["models"] if one["name"] == "yolo11n")
    truth: dict[str, Any] = {"images": [], "annotations": []}
    truth["categories"] = [{"id": 2 * class_ + 1, "name": name} for class_, name in enumerate(classes)]
    for id_, photo in PHOTOS.items():
        answer = own.post("/detect?boxes=coco&confidence=0.4", content=photo.read_bytes()).json()
        truth["images"].append({"id": id_, **answer["image"]})
        for one in answer["detections"]:
            _, _, width, height = one["bbox"]
            annotation = {"id": len(truth["annotations"]) + 1, "image_id": id_, "category_id": 2 * one["class_id"] + 1}
            truth["annotations"].append({**annotation, "bbox": one["bbox"], "area": width * height, "iscrowd": 0})
    data = {"image_ids": ",".join(map(str, PHOTOS))}
    files = [("images", photo.read_bytes()) for photo in PHOTOS.values()]
    results = own.post("/detect/batch?format=coco-results&confidence=0.4", data=data, files=files).json()
    moved = [{**one, "bbox": [one["bbox"][0] + one["bbox"][2] / 10, *one["bbox"][1:]]} for one in results]

    assert len(truth["annotations"]) > len(PHOTOS)
    assert evaluate(tmp_path, truth, results, "bbox") == pytest.approx([1, 1])
    # The IoU is 0.9 / 1.1: enough at 7 of the 10 thresholds from 0.5 to 0.95.
    assert evaluate(tmp_path, truth, moved, "bbox") == pytest.approx([0.7, 1])


@pytest.mark.client("pycocotools")
async def test_masks(tmp_path: Path) -> None:
    """Masks as `segm`: AP 1 for the own masks as RLE, less for their polygons, which are coarser."""
    fake = triton_for("segment")
    async with (
        serving(fake),
        running_gateway(fake.url, tmp_path, workers=1) as server,
        httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS) as client,
    ):
        answers = [(await client.post(f"/segment?boxes=coco&masks={masks}", content=IMAGE)).json() for masks in ("rle", "polygon")]
        results = (await client.post("/segment?format=coco-results&image_id=139", content=IMAGE)).json()
    found = []
    for answer in answers:
        one, empty = answer["detections"]
        annotation = {"id": 1, "image_id": 139, "category_id": 1, "area": 1, "iscrowd": 0, "segmentation": one["mask"]}
        categories = [{"id": id_, "name": name} for id_, name in ((0, empty["class_name"]), (1, one["class_name"]))]
        truth = {"images": [{"id": 139, **answer["image"]}], "annotations": [annotation], "categories": categories}
        found.append(await asyncio.to_thread(evaluate, tmp_path, truth, results, "segm"))

    assert found[0] == pytest.approx([1, 1])
    assert found[1][0] < 1
    assert found[1][1] == pytest.approx(1)
