"""Clients of NVIDIA NIM."""

import os
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from tests.callers.client import environment
from tests.callers.conftest import KEY, MODEL
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import IMAGES

_SECONDS = 300


class Profile(NamedTuple):
    """What a run of aiperf exports."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    """One for each request, with its body and its answer."""
    server_metrics: dict[str, Any]


def profile(folder: Path, url: str, requests: int, *options: str) -> Profile:
    """Run `aiperf profile` with two requests at a time; its sockets and its copy of the images are in the folder, too."""
    out = folder / "out"
    program = environment("aiperf").python().with_name("aiperf")
    command = [
        *(str(program), "profile", "--model", MODEL, "--endpoint-type", "image_retrieval"),
        *("--url", url, "--concurrency", "2", "--request-count", str(requests)),
        *("--export-level", "raw", "--output-artifact-dir", str(out), *options),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False, env={**os.environ, "TMPDIR": str(folder)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = msgspec.json.decode
    return Profile(
        read((out / "profile_export_aiperf.json").read_bytes()),
        [read(line) for line in (out / "profile_export_raw.jsonl").read_bytes().splitlines()],
        read((out / "server_metrics_export.json").read_bytes()) if (out / "server_metrics_export.json").exists() else {},
    )


def images_of(record: dict[str, Any]) -> list[bytes]:
    return [b64decode(each["url"].partition(",")[2]) for each in record["payload"]["input"]]


def answer_of(record: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON
    (response,) = record["responses"]
    return msgspec.json.decode(response["text"])


@pytest.mark.client("aiperf")
def test_photos(gateway: str, own: httpx.Client, tmp_path: Path) -> None:
    """A profile with photos, after its wait for the model: no error, the boxes of `/detect`, and the gateway's own metrics."""
    listed = tmp_path / "images.jsonl"
    listed.write_text("".join(f'{{"image": "{IMAGES / name}"}}\n' for name in ("chelsea.jpg", "coffee.jpg")))
    wait = ("--wait-for-model-timeout", "60", "--wait-for-model-mode", "models")
    found = profile(tmp_path, gateway, 10, "--input-file", str(listed), "--custom-dataset-type", "single_turn", *wait)

    assert (found.summary["request_count"]["avg"], found.summary["error_summary"]) == (10, [])
    assert found.summary["num_images"]["avg"] == 1
    assert len(found.records) == 10
    for record in found.records:
        (image,) = images_of(record)
        expected = own.post("/detect?boxes=normalized&confidence=0.25", content=image).json()["detections"]
        (answer,) = answer_of(record)["data"]
        boxes = {(name, one["x_min"], one["y_max"]) for name, some in answer["bounding_boxes"].items() for one in some}
        assert expected
        assert boxes == {(one["class_name"], one["x1"], one["y2"]) for one in expected}
    assert found.server_metrics["metrics"]["api_requests"]


@pytest.mark.client("aiperf")
def test_several_images(locked: str, tmp_path: Path) -> None:
    """A profile with an API key and images that it makes, two in a request: no error, and an answer for each image."""
    images = ("--image-batch-size", "2", "--image-width-mean", "320", "--image-height-mean", "240")
    found = profile(tmp_path, locked, 4, *images, "--api-key", KEY)

    assert (found.summary["request_count"]["avg"], found.summary["error_summary"]) == (4, [])
    assert [[one["index"] for one in answer_of(record)["data"]] for record in found.records] == [[0, 1]] * 4
