"""The reference, in its own environment."""

import socket
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from app.host.ports import is_free
from bench.harness.counters import read_counters
from bench.harness.lineup import Lineup
from bench.harness.meters import MIB, cpu_seconds, family, worker_memory
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples
from tests.bench.support import needs_reference
from tests.support import sample_image

pytestmark = [needs_reference, pytest.mark.system]


def post(url: str, declared: int) -> bytes:
    """Send the head of a request for /detect with this length, and return the head of the answer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port or 80), timeout=10) as connection:
        connection.sendall(b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % declared)
        return connection.recv(4096)


@pytest.mark.parametrize(("name", "model"), [("reference", "null_fp32"), ("reference_uint8", "null")])
def test_it_takes_images_as_nereid_does(fixtures: Triton, tmp_path: Path, name: str, model: str) -> None:
    """Each request is one inference of the model, and the server stops without leaving a process behind."""
    lineup = Lineup(fixtures, 1, tmp_path)
    contestant = lineup.contestant(name, "null")
    before = read_counters(fixtures.address, model)
    with lineup.start(contestant) as server:
        load = drive_closed_loop(f"{server.url}/detect", unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=20, requests=6)
        outcome = run(load)
        (memory,) = worker_memory(server.process, 1)
        assert sum(map(cpu_seconds, family(server.process))) > 0

    assert outcome.statuses == {"200": 6}
    assert read_counters(fixtures.address, model).since(before).inferences == 6
    assert memory.resident > 10 * MIB
    assert is_free("127.0.0.1", contestant.port)


def test_its_answers_describe_the_image_and_the_time(fixtures: Triton, tmp_path: Path) -> None:
    """An answer has the size of the image, and a header with the time; a body above 50 MiB is rejected by its length."""
    lineup = Lineup(fixtures, 1, tmp_path)
    with lineup.start(lineup.contestant("reference", "null")) as server:
        request = urllib.request.Request(f"{server.url}/detect", sample_image("coffee.jpg"))  # noqa: S310 - our own server
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
            body, duration = msgspec.json.decode(answer.read()), answer.headers["X-Process-Time"]
        rejected = post(server.url, 51 << 20)

    assert body == {"detections": [], "num_detections": 0, "status": "success", "image": {"width": 600, "height": 400}}
    assert float(duration.removesuffix("ms")) > 0
    assert rejected.startswith(b"HTTP/1.1 413 ")
