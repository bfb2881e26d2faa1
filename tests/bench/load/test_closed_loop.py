"""Clients that wait for their answers, against a server on a real socket."""

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.images import Sample
from tests.bench.support import CAT, SAMPLE, always, answer, serving


async def test_every_client_keeps_its_connection_and_every_answer_is_counted() -> None:
    response = answer(CAT, "200 OK", "Server-Timing: decode;dur=1.5, total;dur=4", "x-more: 1")
    async with serving(always(response)) as server:
        outcome = await drive_closed_loop(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=200)

    assert outcome.requests == server.requests == outcome.correct == 200
    assert outcome.statuses == {"200": 200}
    assert server.connections == 4
    assert outcome.stages == {"decode": 1.5, "total": 4.0}
    assert outcome.histogram.total_count == 200
    assert 0 < outcome.percentile(50) <= outcome.percentile(99) <= outcome.max
    assert outcome.failed == 0
    assert outcome.rate == pytest.approx(200 / outcome.seconds)


async def test_a_run_ends_when_its_time_is_over() -> None:
    reported: list[tuple[float, int]] = []
    async with serving(always(answer(CAT))) as server:
        outcome = await drive_closed_loop(
            server.url, [SAMPLE], clients=2, seconds=0.2, progress=lambda seconds, requests: reported.append((seconds, requests))
        )

    assert outcome.requests == server.requests > 2
    assert reported == sorted(reported)
    assert reported[-1][1] == outcome.requests


async def test_samples_are_sent_in_turn_to_the_path_and_query_of_the_url() -> None:
    received: list[bytes] = []

    async def reply(_number: int, request: bytes) -> bytes:
        received.append(request)
        return answer(CAT)

    other = Sample("other", b"\x89PNG\r\n\r\n", frozenset())
    async with serving(reply) as server:
        await drive_closed_loop(f"{server.url}/predict/m?confidence=0.4", [SAMPLE, other], clients=1, seconds=30, requests=4)

    assert [request.partition(b"\r\n\r\n")[2] for request in received] == [SAMPLE.body, other.body] * 2
    assert all(request.startswith(b"POST /predict/m?confidence=0.4 HTTP/1.1\r\n") for request in received)
    assert [b"Content-Type: image/jpeg" in request for request in received] == [True, False, True, False]
