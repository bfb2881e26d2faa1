"""The client of this project, against a served gateway."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from nereid_client import AsyncClient, Client, DetectResult, Problem, Retries
from tests.callers.conftest import PATIENCE_SECONDS, serving
from tests.scrape import scrape
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
    expected = [boxes(own, photo) for photo in PHOTOS]
    assert all(expected)
    with Client(gateway) as client:
        each = dict(client.detect_each(PHOTOS, boxes="pixel"))
        *found, broken = client.detect_batch([*PHOTOS, b"no picture"], boxes="pixel")
        assert edges(client.detect(PHOTOS[0], boxes="pixel")) == expected[0]
    assert isinstance(broken, Problem)
    assert broken.status == 415
    async with AsyncClient(gateway) as other:
        batch = await other.detect_batch(PHOTOS, boxes="pixel")
        again = {photo: outcome async for photo, outcome in other.detect_each(PHOTOS, boxes="pixel")}
    for outcomes in (found, batch, [each[photo] for photo in PHOTOS], [again[photo] for photo in PHOTOS]):
        assert [edges(outcome) for outcome in outcomes] == expected


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


@pytest.mark.client("nereid-client")
async def test_a_full_gateway(repository: Path, tmp_path: Path) -> None:
    """Six photos at once to a gateway that takes one at a time: each refused one is sent again and answered."""
    with serving(tmp_path, repository, max_requests=1) as url:
        async with (
            AsyncClient(url, retries=Retries(attempts=100)) as client,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS) as own,
        ):
            while not (await scrape(own)).get('api_requests_total{endpoint="/detect",status="429"}'):
                outcomes = [outcome async for _, outcome in client.detect_each(PHOTOS * 2, in_flight=6)]
                assert len(outcomes) == 6
                assert all(edges(outcome) for outcome in outcomes)
