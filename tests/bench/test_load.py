"""The load driver against a stand-in server on real sockets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import load, modes, pictures
from bench.load import Sample

CAT = b'{"detections":[{"class_name":"cat"},{"class_name":"person"}]}'
DOG = b'{"detections":[{"class_name":"dog"}]}'
SAMPLE = Sample("chelsea", b"\xff\xd8picture", frozenset({"cat"}))

Reply = Callable[[int, bytes], Awaitable[bytes | None]]
"""Gets the number and the head and body of a request; None closes the connection without an answer."""


def answer(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *more])
    return head.encode() + b"\r\n\r\n" + body


class StandIn:
    """Counts what it is asked and over how many connections."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.asked = 0
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                request = head + await reader.readexactly(length)
                self.asked += 1
                said = await self.reply(self.asked - 1, request)
                if said is None:
                    break
                writer.write(said)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def standing(reply: Reply) -> AsyncIterator[StandIn]:
    stand_in = StandIn(reply)
    server = await asyncio.start_server(stand_in.serve, "127.0.0.1", 0)
    stand_in.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stand_in
    finally:
        server.close()
        await asyncio.sleep(0.01)


def always(said: bytes | None) -> Reply:
    async def reply(_number: int, _request: bytes) -> bytes | None:
        return said

    return reply


async def test_every_client_keeps_its_connection_and_every_answer_is_counted() -> None:
    """The number of requests ends the run; each is counted once, with its Server-Timing."""
    said = answer(CAT, "200 OK", "Server-Timing: decode;dur=1.5, total;dur=4", "x-more: 1")
    async with standing(always(said)) as server:
        outcome = await load.closed(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=200)

    assert outcome.requests == server.asked == outcome.good == 200
    assert outcome.statuses == {"200": 200}
    assert server.connections == 4
    assert outcome.stages == {"decode": 1.5, "total": 4.0}
    assert outcome.histogram.total_count == 200
    assert 0 < outcome.percentile(50) <= outcome.percentile(99) <= outcome.max
    assert outcome.failed == 0
    assert outcome.rate == pytest.approx(200 / outcome.seconds)


async def test_the_time_ends_a_run() -> None:
    """Without a number of requests, the seconds decide, and progress is told."""
    told: list[tuple[float, int]] = []
    async with standing(always(answer(CAT))) as server:
        outcome = await load.closed(
            server.url, [SAMPLE], clients=2, seconds=0.2, progress=lambda seconds, requests: told.append((seconds, requests))
        )

    assert outcome.requests == server.asked > 2
    assert told == sorted(told)
    assert told[-1][1] == outcome.requests


async def test_samples_are_sent_in_turn_to_the_path_and_query_of_the_url() -> None:
    """Bodies arrive byte for byte, each sample as often as the others."""
    heard: list[bytes] = []

    async def reply(_number: int, request: bytes) -> bytes:
        heard.append(request)
        return answer(CAT)

    other = Sample("other", b"\x89PNG\r\n\r\n", frozenset())
    async with standing(reply) as server:
        await load.closed(f"{server.url}/predict/m?confidence=0.4", [SAMPLE, other], clients=1, seconds=30, requests=4)

    assert [request.partition(b"\r\n\r\n")[2] for request in heard] == [SAMPLE.body, other.body] * 2
    assert all(request.startswith(b"POST /predict/m?confidence=0.4 HTTP/1.1\r\n") for request in heard)
    assert [b"Content-Type: image/jpeg" in request for request in heard] == [True, False, True, False]


@pytest.mark.parametrize("body", [DOG, b"{}", b"no JSON", b""], ids=["other class", "no detections", "broken", "empty"])
async def test_wrong_answers_are_not_good_ones(body: bytes) -> None:
    """A 200 without what the picture shows counts as wrong, and its time as no latency."""
    async with standing(always(answer(body))) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.statuses == {"wrong": 1}
    assert outcome.good == outcome.rate == outcome.histogram.total_count == 0
    assert outcome.failed == 1


async def test_of_the_later_answers_every_sixteenth_is_read() -> None:
    """All of the first pass are, whatever the number of samples."""
    async with standing(always(answer(DOG))) as server:
        outcome = await load.closed(server.url, [SAMPLE] * 3, clients=1, seconds=30, requests=33)

    assert outcome.statuses == {"200": 28, "wrong": 5}  # 0, 1, 2, 16, 32


async def test_statuses_are_told_apart() -> None:
    """Refusals are counted by their status and add up to the requests."""
    said = [answer(CAT), answer(b"{}", "503 Service Unavailable"), answer(b"{}", "413 Content Too Large")]

    async def reply(number: int, _request: bytes) -> bytes:
        return said[number % 3]

    async with standing(reply) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=9)

    assert outcome.statuses == {"200": 3, "413": 3, "503": 3}
    assert outcome.failed == pytest.approx(2 / 3)


async def test_broken_connections_are_errors_and_opened_again() -> None:
    """A server that hangs up instead of answering loses that request only."""

    async def reply(number: int, _request: bytes) -> bytes | None:
        return None if number % 4 == 1 else answer(CAT)

    async with standing(reply) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=8)

    assert outcome.statuses == {"200": 6, "error": 2}
    assert server.connections >= 3


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0\r\ncontent-length: 1\r\n\r\nx"], ids=["no length", "no HTTP"]
)
async def test_answers_that_cannot_be_read_are_errors(said: bytes) -> None:
    """What has no length or is no HTTP/1.1 ends the connection."""
    async with standing(always(said)) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=2)

    assert outcome.statuses == {"error": 2}


async def test_a_server_may_close_after_its_answer() -> None:
    """`Connection: close` costs a new connection, not a request."""
    async with standing(always(answer(CAT, "200 OK", "Connection: close"))) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=3)

    assert outcome.statuses == {"200": 3}
    assert server.connections >= 3


async def test_own_time_is_what_neither_decoding_nor_triton_took() -> None:
    """Of each request, from what its client waited."""
    said = answer(CAT, "200 OK", "Server-Timing: decode;dur=0.2, infer;dur=0.1, post;dur=0.3, total;dur=0.6")
    async with standing(always(said)) as server:
        outcome = await load.closed(f"{server.url}/detect", [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.own_p50 == pytest.approx(outcome.mean - 0.3, abs=0.01)


async def test_answers_may_come_in_pieces() -> None:
    """Heads and bodies may be split anywhere."""
    said = answer(CAT, "200 OK", "server-timing: total;dur=1")

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(SAMPLE.body)
        for place in range(0, len(said), 7):
            writer.write(said[place : place + 7])
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(dribble, "127.0.0.1", 0)
    async with server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        outcome = await load.closed(url, [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.statuses == {"200": 1}
    assert outcome.stages == {"total": 1.0}


async def test_a_server_that_vanishes_ends_the_run_in_time() -> None:
    """Refused connections are counted as errors until the time is over."""
    asked = asyncio.Event()

    async def reply(_number: int, _request: bytes) -> bytes:
        asked.set()
        return answer(CAT)

    async with standing(reply) as server:
        sent = asyncio.ensure_future(load.closed(server.url, [SAMPLE], clients=2, seconds=0.5))
        await asked.wait()
        server.reply = always(None)
    outcome = await sent

    assert outcome.statuses["error"] >= 1
    assert sum(outcome.statuses.values()) == outcome.requests


async def test_an_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is given up is an error, and its time counts."""
    monkeypatch.setattr(load, "PATIENCE", 0.1)
    never = asyncio.Event()

    async def reply(_number: int, _request: bytes) -> None:
        await never.wait()

    async with standing(reply) as server:
        outcome = await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=1)
        never.set()

    assert outcome.statuses == {"error": 1}
    assert outcome.max >= 100


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_only_the_open_loop_shows_how_many_requests_a_stall_makes_late(is_open: bool) -> None:  # noqa: FBT001
    """While the server stalls, clients that wait stop asking; at a constant rate the requests due meanwhile are all late.

    The server answers nothing for half a second from the tenth request on. At 100 requests a second on two connections
    some 50 are due in that time. Half of them are more than 250 ms late, however fast the answers come afterwards.
    """
    stalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == 10:
            loop.call_later(0.5, stalled.set)
        if number >= 10:
            await stalled.wait()
        return answer(CAT)

    async with standing(reply) as server:
        if is_open:
            outcome = await load.constant(server.url, [SAMPLE], rate=100, seconds=1, connections=2)
        else:
            outcome = await load.closed(server.url, [SAMPLE], clients=2, seconds=30, requests=100)

    assert outcome.requests == outcome.good == 100
    late = _above(outcome, 250)
    assert (late >= 20) == is_open
    assert late >= 1


def _above(outcome: load.Outcome, milliseconds: float) -> int:
    counted = outcome.histogram.get_recorded_iterator()
    return sum(item.count_at_value_iterated_to for item in counted if item.value_iterated_to > milliseconds * 1e3)


async def test_a_constant_rate_sends_all_that_was_due() -> None:
    """Rate times seconds requests, however slowly they are answered; never two on one connection at a time."""
    busy = most = 0

    async def reply(_number: int, _request: bytes) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1
        return answer(CAT)

    async with standing(reply) as server:
        outcome = await load.constant(server.url, [SAMPLE], rate=400, seconds=0.25, connections=3)

    assert outcome.statuses == {"200": 100}
    assert most == 3
    assert server.connections == 3


async def test_a_constant_rate_against_a_dead_server_counts_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was due and could not be sent is an error."""
    monkeypatch.setattr(load, "PATIENCE", 0.2)
    async with standing(always(None)) as server:
        outcome = await load.constant(server.url, [SAMPLE], rate=200, seconds=0.2, connections=2)

    assert outcome.statuses == {"error": 40}


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1",
        "http://example.com:80/detect",
        "http://127.0.0.1.example.com",
        "https://127.0.0.1",
        "http://0.0.0.0",
        "detect",
    ],
)
async def test_load_is_put_on_this_machine_alone(url: str) -> None:
    """Another host is refused before a connection is opened."""
    with pytest.raises(ValueError, match=r"this machine alone|does not start with"):
        await load.closed(url, [SAMPLE], clients=1, seconds=1)


async def test_nobody_to_ask_is_an_error_of_the_caller() -> None:
    """A run does not begin without a server, samples, clients or a rate."""
    async with standing(always(answer(CAT))) as server:
        url = server.url
        with pytest.raises(ValueError, match="nothing to send"):
            await load.closed(url, [], clients=1, seconds=1)
        with pytest.raises(ValueError, match="nothing to send"):
            await load.closed(url, [SAMPLE], clients=0, seconds=1)
        with pytest.raises(ValueError, match="rate"):
            await load.constant(url, [SAMPLE], rate=0, seconds=1)
    with pytest.raises(ConnectionRefusedError):
        await load.closed(url, [SAMPLE], clients=2, seconds=1)


async def test_a_busy_driver_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Above a share of a core, the numbers may be the driver's own."""
    monkeypatch.setattr(load, "BUSY", -1.0)
    async with standing(always(answer(CAT))) as server:
        await load.closed(server.url, [SAMPLE], clients=1, seconds=30, requests=1)

    assert "the load driver used" in capsys.readouterr().err


def test_the_default_pictures_are_varied_and_known() -> None:
    """320 pixels to 12 megapixels, always the same, and all show something we know."""
    samples = pictures.given(None)
    names = [sample.name for sample in samples]

    assert len(samples) == 24
    assert any("320x" in name for name in names)
    assert "coffee 4000x3000" in names
    assert all(sample.expected and sample.body.startswith(b"\xff\xd8") for sample in samples)
    assert pictures.given(None) is samples
    assert pictures.varied.__wrapped__() == samples


def test_given_pictures_are_sent_as_they_are(tmp_path: Path) -> None:
    """A file or a folder; without pictures in it, a folder is refused."""
    (cat,) = pictures.given(pictures.FOLDER / "chelsea.jpg")

    assert cat == Sample("chelsea.jpg", (pictures.FOLDER / "chelsea.jpg").read_bytes(), frozenset({"cat"}))
    assert [sample.name for sample in pictures.given(pictures.FOLDER)] == ["astronaut.jpg", "chelsea.jpg", "coffee.jpg"]
    with pytest.raises(ValueError, match="no picture"):
        pictures.given(tmp_path)


@pytest.mark.parametrize(
    ("rates", "fits", "best"),
    [
        ({1: 10, 2: 20, 3: 25, 4: 30, 8: 60}, 8, 8),
        ({1: 10, 2: 20, 4: 30, 8: 30}, 256, 4),
        ({1: 10, 2: 9}, 256, 1),
        ({1: 10}, 0, None),
    ],
    ids=["latency breaks", "throughput ends", "one is best", "none"],
)
def test_the_search_finds_the_best_number_of_clients(rates: dict[int, float], fits: int, best: int | None) -> None:
    """The fewest clients with the best throughput among those whose latency holds, in a bounded number of runs."""
    tried: list[int] = []

    def holds(clients: int) -> bool:
        tried.append(clients)
        return clients <= fits

    def rate(clients: int) -> float:
        return max(value for count, value in rates.items() if count <= clients)

    found = modes.search(holds, rate, 256)

    assert found == best
    assert len(tried) == len(set(tried)) <= 13
