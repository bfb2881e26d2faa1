"""The client of this project, against a served gateway."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nereid_client import AsyncClient, Client, DetectResult, Problem
from tests.support import IMAGES

PHOTOS = [IMAGES / name for name in ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")]


def boxes(own: httpx.Client, photo: Path) -> list[float]:
    """Return the left edges of the objects in a photo, as the gateway says."""
    return [one["x1"] for one in own.post("/detect?boxes=pixel", content=photo.read_bytes()).json()["detections"]]


def edges(outcome: object) -> list[float]:
    """Return the left edges of the objects in an outcome, which must be a result."""
    assert isinstance(outcome, DetectResult)
    return [one.x1 for one in outcome.detections]


@pytest.mark.client("nereid-client")
async def test_client_and_async_client(gateway: str, own: httpx.Client) -> None:
    """Photos one by one, several at a time and as a batch with a broken one, by `Client` and by `AsyncClient`."""
    with Client(gateway) as client:
        assert edges(client.detect(PHOTOS[0], boxes="pixel")) == boxes(own, PHOTOS[0]) != []
        *found, broken = client.detect_batch([*PHOTOS, b"no picture"], boxes="pixel")
    assert isinstance(broken, Problem)
    assert broken.status == 415
    async with AsyncClient(gateway) as other:
        each = {photo: outcome async for photo, outcome in other.detect_each(PHOTOS, boxes="pixel")}
    for outcomes in (found, [each[photo] for photo in PHOTOS]):
        assert [edges(outcome) for outcome in outcomes] == [boxes(own, photo) for photo in PHOTOS]


@pytest.mark.client("nereid-client")
def test_command(gateway: str, own: httpx.Client, tmp_path: Path) -> None:
    """The command, for a folder of photos, twice: the second time it has nothing left to send."""
    for photo in PHOTOS:
        shutil.copy(photo, tmp_path)
    out = tmp_path / "results.jsonl"
    arguments = (str(tmp_path), "--url", gateway, "--out", str(out), "--boxes", "pixel")
    command = [sys.executable, "-m", "nereid_client.command", "detect", *arguments]
    said = [subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()[-1] for _ in range(2)]

    assert said == [f"pictures: 3, new: {new}, with a result: 3" for new in (3, 0)]
    found = {line["file"]: line for line in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    for photo in PHOTOS:
        assert [one["x1"] for one in found[photo.name]["detections"]] == boxes(own, photo)
