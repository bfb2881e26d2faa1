"""Serve, detect, stop, with nothing but the project's own folder: what `./just smoke` runs under every interpreter."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from app.host.ports import find_free
from app.host.processes import kill_group
from bench.harness.processes import wait_for_answer
from tests.support import ROOT, sample_image

READY_SECONDS = 300  # a first run downloads Triton and the model
STOP_SECONDS = 60


def test_serve_detects_and_stops(tmp_path: Path) -> None:
    (port,) = find_free(1)
    environment = {**os.environ, "NEREID_PORT": str(port)}
    log = tmp_path / "serve.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "app", "serve"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        assert wait_for_answer(f"{url}/readyz", server, READY_SECONDS, retry=[503]) == 200, log.read_text()
        for name, expected in (("chelsea.jpg", "cat"), ("coffee.jpg", "cup")):
            answer = httpx.post(f"{url}/detect", content=sample_image(name), timeout=30).raise_for_status().json()
            assert expected in {detection["class_name"] for detection in answer["detections"]}
        server.send_signal(signal.SIGINT)

        assert server.wait(STOP_SECONDS) == 0
    finally:
        kill_group(server)
