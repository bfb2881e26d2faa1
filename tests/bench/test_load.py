"""The load driver, against servers on real sockets: nothing is lost, hidden or sent twice, however a server behaves."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from typing import Any

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.overload import Caller, drive_arrivals, drive_crowd, drive_open_loop, flood
from bench.load.target import local_target
from tests.bench.support import CAT, SAMPLE, always, answer, serving, silent

FULL = "429 Too Many Requests"
LARGE = Sample("large", b"\xff\xd8" + bytes(32 * 2**20), frozenset())
"""More than the buffers of two sockets hold."""


async def test_clients_keep_their_connections_and_every_answer_is_counted() -> None:
    response = answer(CAT, "200 OK", "Server-Timing: decode;dur=1.5, total;dur=4", "x-more: 1")
    async with serving(always(response)) as server:
        outcome = await drive_closed_loop(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=200)

    assert outcome.requests == server.requests == outcome.correct == outcome.histogram.total_count == 200
    assert server.connections == 4
    assert outcome.stages == {"decode": 1.5, "total": 4.0}
    assert 0 < outcome.percentile(50) <= outcome.percentile(99) <= outcome.max
    assert outcome.rate == pytest.approx(200 / outcome.seconds)


async def test_run_ends_when_its_time_is_over() -> None:
    reported: list[tuple[float, int]] = []
    async with serving(always(answer(CAT))) as server:
        outcome = await drive_closed_loop(
            server.url, [SAMPLE], clients=2, seconds=0.2, progress=lambda seconds, requests: reported.append((seconds, requests))
        )

    assert outcome.requests == server.requests > 2
    assert reported == sorted(reported)
    assert reported[-1][1] == outcome.requests


async def test_samples_are_sent_in_turn_with_path_query_key_and_type() -> None:
    received: list[bytes] = []

    async def reply(_number: int, request: bytes) -> bytes:
        received.append(request)
        return answer(CAT)

    bodies = [SAMPLE.body, b"\x89PNG\r\n\r\n", b"--edge\r\n\r\nform\r\n--edge--", b'{"a":1}']
    async with serving(reply) as server:
        target = local_target(f"{server.url}/predict/m?confidence=0.4")._replace(key="id.secret")
        await drive_closed_loop(target, [Sample("", body, None) for body in bodies], clients=1, seconds=30, requests=5)

    assert [request.partition(b"\r\n\r\n")[2] for request in received] == [*bodies, SAMPLE.body]
    assert all(request.startswith(b"POST /predict/m?confidence=0.4 HTTP/1.1\r\n") for request in received)
    assert all(b"Authorization: Bearer id.secret\r\n" in request for request in received)
    types = [b"image/jpeg", b"application/octet-stream", b"multipart/form-data; boundary=edge", b"application/json"]
    assert [request.partition(b"Content-Type: ")[2].partition(b"\r\n")[0] for request in received[:4]] == types


@pytest.mark.faults
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "closed"])
async def test_only_a_constant_rate_shows_how_many_requests_a_stall_delays(is_constant: bool) -> None:  # noqa: FBT001
    """Clients that wait stop asking while the server stalls; at a constant rate all requests due meanwhile are late."""
    stalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == 10:
            loop.call_later(0.5, stalled.set)
        if number >= 10:
            await stalled.wait()
        return answer(CAT)

    async with serving(reply) as server:
        if is_constant:
            outcome = await drive_open_loop(server.url, [SAMPLE], rate=100, seconds=1, connections=2)
        else:
            outcome = await drive_closed_loop(server.url, [SAMPLE], clients=2, seconds=30, requests=100)

    assert outcome.requests == outcome.correct == 100
    late = _count_above(outcome, 250)  # half of the 50 that are due during the stall, however fast the answers come afterwards
    assert (late >= 20) == is_constant
    assert late >= 1


def _count_above(outcome: Outcome, milliseconds: float) -> int:
    counted = outcome.histogram.get_recorded_iterator()
    return sum(item.count_at_value_iterated_to for item in counted if item.value_iterated_to > milliseconds * 1e3)


@pytest.mark.parametrize(("drive", "at_once"), [(partial(drive_open_loop, connections=3), 3), (drive_arrivals, 40)])
async def test_requests_are_sent_when_due_as_far_as_there_are_connections(drive: Callable[..., Any], at_once: int) -> None:
    everyone = asyncio.Event()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == at_once - 1:
            everyone.set()
        await everyone.wait()
        return answer(CAT)

    async with serving(reply) as server:
        outcome = await drive(server.url, [SAMPLE], rate=200, seconds=0.2)

    assert outcome.statuses == {"200": 40}
    assert server.connections == at_once


async def test_arrivals_without_a_connection_are_dropped() -> None:
    never = asyncio.Event()
    async with serving(silent(never)) as server:
        outcome = await drive_arrivals(server.url, [SAMPLE], rate=200, seconds=0.2, connections=3, patience=1)
        never.set()

    assert outcome.statuses == {"dropped": 37, "error": 3}
    assert server.requests == 3


@pytest.mark.parametrize(
    ("response", "requests", "statuses"),
    [
        (answer(CAT, "200 OK", "Connection: close"), 6, {"200": 6}),
        (None, 2, {"error": 2}),
        (b"HTTP/1.1 200 OK\r\n\r\n", 2, {"error": 2}),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", 2, {"error": 2}),
        (b"SSH-2.0\r\ncontent-length: 1\r\n\r\nx", 2, {"error": 2}),
        (answer(b'{"code":"gateway_full"}', FULL), 3, {"429": 3}),
    ],
    ids=["closed", "broken", "no length", "no number", "no HTTP", "rejected"],
)
async def test_connections_that_end_are_replaced(response: bytes | None, requests: int, statuses: dict[str, int]) -> None:
    async with serving(always(response)) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=requests)

    assert outcome.statuses == statuses
    assert outcome.codes == ({"429": ["gateway_full"]} if "429" in statuses else {})
    assert server.connections == (1 if "429" in statuses else requests)


async def test_request_without_an_answer_has_the_latency_of_the_whole_patience() -> None:
    """But under overload only answers are timed: latency tells how long the served ones took."""
    never = asyncio.Event()
    async with serving(silent(never)) as server:
        closed = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=1, patience=0.1)
        constant = await drive_open_loop(server.url, [SAMPLE], rate=200, seconds=0.2, connections=2, patience=0.2)
        arrivals = await drive_arrivals(server.url, [SAMPLE], rate=50, seconds=0.1, patience=0.1)
        crowd = await drive_crowd(server.url, [SAMPLE], clients=2, seconds=0.1, patience=0.1)
        never.set()

    assert (closed.statuses, constant.statuses, arrivals.statuses) == ({"error": 1}, {"error": 40}, {"error": 5})
    assert closed.max >= 99
    assert set(crowd.statuses) == {"error"}
    assert arrivals.histogram.total_count == crowd.histogram.total_count == 0


async def test_server_that_vanishes_costs_each_arrival_an_error() -> None:
    async with serving(always(answer(CAT))) as server:

        async def vanish(_number: int, _request: bytes) -> None:
            server.stop()

        server.reply = vanish
        outcome = await drive_arrivals(server.url, [SAMPLE], rate=50, seconds=0.4)

    assert outcome.statuses == {"error": 20}
    with pytest.raises(ConnectionRefusedError):
        await drive_closed_loop(server.url, [SAMPLE], clients=2, seconds=1)


@asynccontextmanager
async def rejecting(response: bytes) -> AsyncIterator[str]:
    """Serve an answer as soon as a request's head has arrived, without reading its body; yield the URL."""
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, OSError):  # the driver has left
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
            await writer.drain()
            await is_over.wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_over.set()


async def test_rejection_that_arrives_before_the_body_was_sent_counts() -> None:
    async with rejecting(answer(b"{}", FULL)) as url:
        outcome = await drive_arrivals(url, [LARGE], rate=20, seconds=0.2)

    assert outcome.statuses == {"429": 4}


@pytest.mark.parametrize("more", [[], ["Connection: close"]], ids=["stays", "closes"])
async def test_only_polite_clients_wait_as_long_as_they_were_told(more: list[str]) -> None:
    async with serving(always(answer(b"{}", FULL, "Retry-After: 60", *more))) as server:
        polite = await drive_crowd(server.url, [SAMPLE], clients=5, seconds=0.5, is_polite=True)
        others = await drive_crowd(server.url, [SAMPLE], clients=5, seconds=0.5)

    assert polite.statuses == {"429": 5}
    assert others.requests > 5


async def test_callers_of_a_flood_have_their_own_keys_and_counts() -> None:
    keys: Counter[bytes] = Counter()

    async def reply(_number: int, request: bytes) -> bytes:
        credential = request.partition(b"Bearer ")[2].partition(b"\r\n")[0]
        keys[credential] += 1
        return answer(b"", FULL, "retry-after: 60", "connection: close") if credential == b"one.secret" else answer(CAT)

    async with serving(reply) as server:
        targets = [local_target(server.url)._replace(key=f"{name}.secret", source="127.1.0.1") for name in ("one", "other")]
        rejected, served = await flood([Caller(targets[0], b"image", clients=3), Caller(targets[1], b"image")], 0.5)

    assert rejected["429"] > 6
    assert served["200"] > 6
    assert {*rejected, *served} == {"429", "200"}
    assert set(keys) == {b"one.secret", b"other.secret"}


async def test_slow_uploads_of_a_flood_arrive_whole_in_pieces() -> None:
    complete = []

    async def reply(_number: int, request: bytes) -> bytes:
        complete.append(request.endswith(bytes(200)))
        return answer(CAT)

    async with serving(reply) as server:
        (statuses,) = await flood([Caller(local_target(server.url), bytes(200), clients=2, bytes_per_second=200)], 3)

    assert statuses["200"] == len(complete) >= 2
    assert all(complete)


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1", "http://127.0.0.1.example.com", "https://127.0.0.1", "http://0.0.0.0", "detect"],
)
async def test_load_for_another_host_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"only be sent to this machine|does not start with"):
        await drive_closed_loop(url, [SAMPLE], clients=1, seconds=1)
