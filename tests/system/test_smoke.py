"""Serve, detect, stop, with nothing but the project's own folder: what `./just smoke` runs under every interpreter."""

import signal
import sys
from pathlib import Path

import httpx

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.support import sample_image

READY_SECONDS = 300  # a first run downloads Triton and the model
STOP_SECONDS = 60


def test_serve_detects_and_stops(tmp_path: Path) -> None:
    (port,) = find_free(1)
    environment = {"NEREID_PORT": str(port)}
    command = [sys.executable, "-m", "app", "serve"]
    with running(command, environment, port, "/readyz", tmp_path / "serve.log", ready_seconds=READY_SECONDS) as server:
        for name, expected in (("chelsea.jpg", "cat"), ("coffee.jpg", "cup")):
            answer = httpx.post(f"{server.url}/detect", content=sample_image(name), timeout=30).raise_for_status().json()
            assert expected in {detection["class_name"] for detection in answer["detections"]}
        server.process.send_signal(signal.SIGINT)

        assert server.process.wait(STOP_SECONDS) == 0
