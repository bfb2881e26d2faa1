"""Bodies are received within their limits, and work for a client that has disconnected is stopped."""

import asyncio
import tracemalloc
from typing import Any

import pytest

from app.api.admission import middleware
from app.api.application import Application
from app.api.context import BodyLimits, RequestContext
from app.api.receiving.client_watch import ClientWatch, drain
from app.errors import BodyTimeout, BodyTooLarge, ClientGone, GatewayFull, InvalidImage, MalformedRequest
from app.main import create_app
from app.pipeline import preprocess
from app.resilience.fairness import ANYBODY
from app.triton.shared_memory import Arena
from tests.api.conftest import settings_for
from tests.api.virtual_time import in_virtual_time, now
from tests.fakes.triton import FakeTriton, serving
from tests.pipeline.gate import Gate
from tests.support import (
    SCENE,
    Receive,
    Reply,
    call,
    captured_log,
    chunk,
    eventually,
    in_cycles,
    lifespan_of,
    open_admission,
    receiving,
)

LIMITS = BodyLimits(100, total_seconds=30)


async def read(*messages: dict[str, Any], limits: BodyLimits = LIMITS, upload_bytes: int = 1000) -> bytes:
    return await read_from(receiving(*messages), limits, upload_bytes)


async def read_from(receive: Receive, limits: BodyLimits, upload_bytes: int = 1000) -> bytes:
    admitted = open_admission(upload_bytes=upload_bytes)
    with admitted as admission, admission.start_upload(ANYBODY) as upload, ClientWatch(receive, limits) as client:
        return await client.read_body(upload)


async def test_a_body_is_read_to_its_end() -> None:
    assert await read(chunk(b"abc")) == b"abc"
    assert await read(chunk(b"abc", more=True), chunk(b"", more=True), chunk(b"def", more=True), chunk(b"")) == b"abcdef"


async def test_an_empty_body_is_malformed() -> None:
    with pytest.raises(MalformedRequest, match=r"^the body is empty; curl "):
        await read(chunk(b""))


async def test_a_client_that_disconnects_early_is_gone() -> None:
    for messages in ((), (chunk(b"abc", more=True),)):
        with pytest.raises(ClientGone):
            await read(*messages)


async def test_a_body_above_the_limit_is_rejected_while_it_arrives() -> None:
    assert len(await read(chunk(b"x" * 60, more=True), chunk(b"x" * 40))) == 100
    with pytest.raises(BodyTooLarge, match=r"^the limit is 0 MiB$"):
        await read(chunk(b"x" * 60, more=True), chunk(b"x" * 41, more=True), chunk(b"x" * 1000))


async def test_bytes_of_all_bodies_have_a_limit() -> None:
    part = bytes(2**16)
    body = chunk(part, more=True), chunk(part, more=True), chunk(b"x")
    limits = LIMITS._replace(max_bytes=2**20)
    assert len(await read(*body, limits=limits, upload_bytes=2**17)) == 2**17 + 1
    with (
        open_admission(upload_bytes=2**17) as admission,
        admission.start_upload(ANYBODY) as other,
        admission.start_upload(ANYBODY) as upload,
    ):
        other.add(1)
        with ClientWatch(receiving(chunk(part[1:], more=True), chunk(part)), limits) as client:
            assert len(await client.read_body(upload)) == 2**17 - 1
        with pytest.raises(GatewayFull), ClientWatch(receiving(*body), limits) as client:
            await client.read_body(upload)


async def test_a_body_in_small_chunks_takes_little_more_memory_than_its_size() -> None:
    chunks = 50_000
    left = chunks

    async def receive() -> Any:  # noqa: ANN401
        nonlocal left
        left -= 1
        if left % 100 == 0:  # the event loop forgets timers that were cancelled
            await asyncio.sleep(0)
        return chunk(bytes((left % 256, 1)), more=left > 0)

    tracemalloc.start()
    try:
        body = await read_from(receive, LIMITS._replace(max_bytes=2 * chunks), 2 * chunks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert len(body) == 2 * chunks
    assert peak < 2**20


def sending(pause_seconds: float, pieces: int = 1 << 30, *, is_whole: bool = False) -> Receive:
    """Make the `receive` of a client that makes a pause before each piece of one byte; the last ends the body, or nothing does."""
    sent = 0

    async def receive() -> Any:  # noqa: ANN401
        nonlocal sent
        await asyncio.sleep(pause_seconds if sent < pieces else 3600)
        sent += 1
        return chunk(b"x", more=not is_whole or sent < pieces)

    return receive


@pytest.mark.parametrize(
    ("pause", "pieces", "total", "seconds"), [(1, 0, 30, 10), (1, 3, 30, 13), (9, 1 << 30, 30, 30), (1, 0, 5, 5)]
)
@in_virtual_time
async def test_a_body_that_takes_too_long_is_a_timeout(pause: float, pieces: int, total: float, seconds: float) -> None:
    with pytest.raises(BodyTimeout, match=f"within {total} s, without pauses of more than {min(10, total)} s$"):
        await read_from(sending(pause, pieces), LIMITS._replace(total_seconds=total))

    assert now() == seconds


@in_virtual_time
async def test_a_slow_body_is_received() -> None:
    assert await read_from(sending(9, 3, is_whole=True), LIMITS) == b"x" * 3
    assert now() == 27


class Client:
    def __init__(self, body: bytes = b"") -> None:
        self.leaves = asyncio.Event()
        self.was_watched = False
        self._body: bytes | None = body

    async def receive(self) -> Any:  # noqa: ANN401
        if self._body:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        self.was_watched = True
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def post(self, app: Application, path: str = "/detect") -> Reply:
        return await call(app, self.receive, path, {"Content-Type": "image/bmp", "Content-Length": str(len(SCENE))})


def after_body(client: Client) -> ClientWatch:
    watch = ClientWatch(client.receive, LIMITS)
    watch.is_body_complete = True
    return watch


@in_virtual_time
async def test_a_block_ends_as_it_would_while_the_client_stays() -> None:
    tasks = asyncio.all_tasks()

    async def fail(seconds: float) -> None:
        with after_body(Client()):
            await asyncio.sleep(seconds)
            raise InvalidImage("broken")

    for seconds in (0, 60):
        client = Client()
        with after_body(client):
            await asyncio.sleep(seconds)
        assert client.was_watched is (seconds > 0)
        with pytest.raises(InvalidImage):
            await fail(seconds)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == tasks


@in_virtual_time
async def test_a_block_is_cancelled_when_the_client_leaves() -> None:
    client = Client()
    client.leaves.set()
    ended: list[str] = []

    async def work() -> None:
        with after_body(client):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("cancelled")

    with pytest.raises(ClientGone, match="disconnected before the response"):
        await work()
    task = asyncio.current_task()
    assert task is not None

    assert ended == ["cancelled"]
    assert task.cancelling() == 0
    await asyncio.sleep(0)


@in_virtual_time
async def test_a_rest_of_the_body_is_not_a_disconnect() -> None:
    """Some servers send an empty message after the last one of a body."""
    client = Client(b"more")
    with after_body(client):
        await asyncio.sleep(60)

    assert client.was_watched


async def test_a_client_that_leaves_while_its_image_is_queued_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, fake = Gate(), FakeTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, decode_threads=1))):
        fake.requests.clear()
        decoded = gate.block(monkeypatch, preprocess, "fill_input")
        log = captured_log(monkeypatch, middleware)
        first, second = Client(SCENE), Client(SCENE)
        blocking = asyncio.create_task(first.post(app))
        await eventually(gate.reached.is_set)
        waiting = asyncio.create_task(second.post(app))
        second.leaves.set()
        await waiting
        gate.opened.set()
        await blocking
        assert (await Client(SCENE).post(app)).status == 502  # in the thread that was the second's turn before

    assert log[0].kwargs["status"] == 499
    assert log[0].kwargs["code"] == "client_gone"
    assert len(decoded) == len(fake.requests) == 2


async def test_a_client_that_leaves_while_the_config_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = FakeTriton(), Client(SCENE)
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url))):
        fake.may_tell.clear()
        log, before = captured_log(monkeypatch, middleware), fake.config_reads
        running = asyncio.create_task(client.post(app, "/predict/other?timeout_ms=20000"))
        await eventually(lambda: fake.config_reads > before)
        client.leaves.set()
        await running
        fake.may_tell.set()

    assert [(line.kwargs["status"], line.kwargs["code"]) for line in log] == [(499, "client_gone")]


async def test_a_client_that_leaves_during_its_inference_leaves_the_slot_to_triton(
    monkeypatch: pytest.MonkeyPatch, arenas: list[Arena]
) -> None:
    """Its slot and its place are given back when the RPC has ended, because Triton reads and works until then."""
    fake = FakeTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, max_requests=1))):
        fake.requests.clear()
        fake.may_answer.clear()
        log = captured_log(monkeypatch, middleware)
        client = Client(SCENE)
        running = asyncio.create_task(client.post(app))
        await eventually(lambda: len(fake.requests) == 1)
        client.leaves.set()
        await running
        (arena,) = arenas
        assert arena.lent_bytes > 0
        assert (await Client(SCENE).post(app)).status == 429
        fake.may_answer.set()

        await eventually(lambda: not arena.lent_bytes)
        assert (await Client(SCENE).post(app)).status == 502
    assert [line.kwargs["status"] for line in log] == [499, 429, 502]
    assert fake.cancelled == 0


async def test_a_client_that_leaves_is_forgotten_at_once() -> None:
    """No reference cycle keeps the request until the garbage collector runs."""
    fake = FakeTriton()
    async with serving(fake):
        app = create_app(settings_for(fake.url))
        with in_cycles(RequestContext) as kept:
            async with lifespan_of(app):  # until all calls have ended
                fake.may_answer.clear()
                clients = [Client(SCENE) for _ in range(3)]
                for client in clients:
                    client.leaves.set()
                await asyncio.gather(*(client.post(app) for client in clients))
                fake.may_answer.set()

    assert not kept


@in_virtual_time
async def test_the_rest_of_a_body_is_not_received_above_a_limit() -> None:
    messages = [{"type": "http.request", "body": body, "more_body": True} for body in (bytes(2**20), b"x", b"next")]
    receive = receiving(*messages)
    await drain(receive, is_anonymous=True)

    assert now() == pytest.approx(2)
    assert (await receive())["body"] == b"next"


@pytest.mark.parametrize("pause_seconds", [0.01, 3600])
@in_virtual_time
async def test_a_body_without_an_end_is_given_up(pause_seconds: float) -> None:
    async def receive() -> Any:  # noqa: ANN401
        await asyncio.sleep(pause_seconds)
        return {"type": "http.request", "body": b"x", "more_body": True}

    await drain(receive)

    assert now() == pytest.approx(2)


async def test_a_watch_that_waited_for_a_disconnect_is_released_at_once() -> None:
    """The error of the cancelled wait refers to it, and it refers to the request."""
    is_waiting = asyncio.Event()

    async def receive() -> Any:  # noqa: ANN401 - an ASGI message
        is_waiting.set()
        await asyncio.Event().wait()

    async def watch() -> None:
        with ClientWatch(receive, LIMITS) as client:
            client.is_body_complete = True
            await is_waiting.wait()

    with in_cycles(ClientWatch) as kept:
        await watch()
        await asyncio.sleep(0)  # the wait ends

    assert not kept
