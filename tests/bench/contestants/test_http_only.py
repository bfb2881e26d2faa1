"""The minimal server."""

import sys
from pathlib import Path

import pytest

from app.host.ports import is_free
from bench.contestants.http_only import App
from bench.harness.counters import read_counters
from bench.harness.meters import family
from bench.harness.ports import find_free
from bench.harness.processes import running
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import Sample
from tests.bench.support import arenas_of
from tests.support import call, receiving, sample_image

SAMPLE = Sample("coffee", sample_image("coffee.jpg"), frozenset())


@pytest.mark.parametrize("with_triton", [False, True])
def test_http_only_answers_every_request(fixtures: Triton, tmp_path: Path, with_triton: bool) -> None:  # noqa: FBT001
    (port,) = find_free(1)
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), "1"]
    before = read_counters(fixtures.address, "null_file")
    triton = {"BENCH_TRITON": fixtures.address} if with_triton else {}
    with running(command, triton, port, "/", tmp_path / "log") as server:
        outcome = run(drive_closed_loop(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=20))
        pids = [process.pid for process in family(server.process)]
        assert bool(arenas_of(pids)) is with_triton

    assert outcome.statuses == {"200": 20}
    assert read_counters(fixtures.address, "null_file").since(before).inferences == (20 if with_triton else 0)
    assert not arenas_of(pids)
    assert is_free("127.0.0.1", port)


async def test_a_body_is_read_to_its_end_before_it_is_answered() -> None:
    received: list[bytes] = []
    parts = [{"type": "http.request", "body": body, "more_body": body != b"c"} for body in (b"a", b"b", b"c")]
    receive = receiving(*parts)

    async def receive_and_note() -> dict[str, object]:
        message: dict[str, object] = await receive()
        received.append(bytes(message["body"]))  # type: ignore[call-overload]
        return message

    reply = await call(App(), receive_and_note, "/detect")  # type: ignore[arg-type]

    assert received == [b"a", b"b", b"c"]
    assert (reply.status, reply.headers["content-type"]) == (200, "application/json")
    assert reply.body == b'{"detections":[],"num_detections":0,"status":"success"}'
    assert reply.headers["content-length"] == str(len(reply.body))
