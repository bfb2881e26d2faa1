"""Served boxes are those of the detector's own pre- and post-processing."""

from pathlib import Path

import httpx
import pytest

from tests.conftest import PICTURES, SHARED, json
from tests.reference import Box, Reference, matches


async def served(client: httpx.AsyncClient, model: str, file: bytes) -> list[Box]:
    """Ask the API."""
    answer = json(await client.post(f"/predict/{model}?confidence=0.25&boxes=pixel&max_detections=300", content=file))
    return [Box(d["class_id"], d["confidence"], (d["x1"], d["y1"], d["x2"], d["y2"])) for d in answer["detections"]]


@pytest.mark.parametrize(("model", "least"), [("yolo11n", 0.98), ("yolox_nano", 0.97)])
@pytest.mark.parametrize(
    "pictures",
    [sorted(PICTURES.glob("*.jpg")), sorted((SHARED / "images").glob("*.jpg"))],
    ids=["sample", "coco"],
)
async def test_served_boxes_are_those_of_the_reference(
    client: httpx.AsyncClient, networks: dict[str, Path], model: str, least: float, pictures: list[Path]
) -> None:
    """Matched by class at IoU 0.9 and confidence 0.25, over all pictures together."""
    if model not in networks:
        pytest.skip(f"the published {model} is not here: there is no ../shared/models")
    if not pictures:
        pytest.skip("there are no pictures in ../shared/images")
    reference = Reference(model, networks[model])
    matched = expected = found = 0
    for path in pictures:
        file = path.read_bytes()
        ours, theirs = await served(client, model, file), reference.detect(file)
        matched += matches(theirs, ours, 0.9)
        expected += len(theirs)
        found += len(ours)
    f1 = 2 * matched / (expected + found)
    print(f"{model}: F1 {f1:.4f} on {len(pictures)} pictures, {expected} boxes expected, {found} served")  # noqa: T201

    assert expected >= len(pictures) / 2
    assert f1 >= least
