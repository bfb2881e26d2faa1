"""Bodies are received within their limits, and work for a client that has disconnected is stopped."""

import asyncio
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
from tests.api.conftest import peak_below, settings_for
from tests.api.virtual_time import in_virtual_time, now
from tests.fakes.triton import FakeTriton, serving
from tests.pipeline.gate import Gate
from tests.support import SCENE, Receive, call, captured_log, chunk, eventually, in_cycles, lifespan_of, open_admission, receiving

LIMITS = BodyLimits(100, total_seconds=30)


async def read(receive: Receive, limits: BodyLimits = LIMITS, upload_bytes: int = 1000, others: int = 0) -> bytes:
    with (
        open_admission(upload_bytes=upload_bytes) as admission,
        admission.start_upload(ANYBODY) as other,
        admission.start_upload(ANYBODY) as upload,
        ClientWatch(receive, limits) as client,
    ):
        other.add(others)
        return await client.read_body(upload)


async def test_body_is_read_to_its_end_and_to_its_limit() -> None:
    parts = chunk(b"abc", more=True), chunk(b"", more=True), chunk(b"d" * 97, more=True), chunk(b"")
    assert await read(receiving(*parts)) == b"abc" + b"d" * 97
    with pytest.raises(BodyTooLarge):
        await read(receiving(*parts[:3], chunk(b"x", more=True)))
    for messages, error in (([chunk(b"")], MalformedRequest), ([chunk(b"abc", more=True)], ClientGone)):
        with pytest.raises(error):
            await read(receiving(*messages))


async def test_bytes_of_all_bodies_have_a_limit() -> None:
    limits, part = LIMITS._replace(max_bytes=2**20), bytes(2**16)
    body = chunk(part, more=True), chunk(part, more=True), chunk(b"x")
    assert len(await read(receiving(*body), limits, 2**17)) == 2**17 + 1
    assert len(await read(receiving(chunk(part[1:], more=True), chunk(part)), limits, 2**17, others=1)) == 2**17 - 1
    with pytest.raises(GatewayFull):
        await read(receiving(*body), limits, 2**17, others=1)


async def test_body_in_small_chunks_takes_little_more_memory_than_its_size() -> None:
    chunks = 50_000
    left = chunks

    async def receive() -> Any:  # noqa: ANN401
        nonlocal left
        left -= 1
        if left % 100 == 0:  # the event loop forgets timers that were cancelled
            await asyncio.sleep(0)
        return chunk(bytes((left % 256, 1)), more=left > 0)

    with peak_below(2**20):
        assert len(await read(receive, LIMITS._replace(max_bytes=2 * chunks), 2 * chunks)) == 2 * chunks


def sending(pause_seconds: float, pieces: int = 1 << 30, *, is_whole: bool = False) -> Receive:
    """Make the `receive` of a client that makes a pause before each piece of one byte; the last ends the body, or nothing does."""
    sent = 0

    async def receive() -> Any:  # noqa: ANN401
        nonlocal sent
        await asyncio.sleep(pause_seconds if sent < pieces else 3600)
        sent += 1
        return chunk(b"x", more=not is_whole or sent < pieces)

    return receive


@in_virtual_time
async def test_body_that_takes_too_long_is_a_timeout() -> None:
    for pause, pieces, total, seconds in ((1, 0, 30, 10), (1, 3, 30, 13), (9, 1 << 30, 30, 30), (1, 0, 5, 5)):
        before = now()
        with pytest.raises(BodyTimeout, match=f"within {total} s, without pauses of more than {min(10, total)} s$"):
            await read(sending(pause, pieces), LIMITS._replace(total_seconds=total))
        assert now() == pytest.approx(before + seconds)
    assert await read(sending(9, 3, is_whole=True)) == b"x" * 3


@in_virtual_time
async def test_rest_of_a_body_is_received_for_two_seconds_and_of_an_anonymous_one_to_a_limit() -> None:
    for pause_seconds in (0.01, 3600):
        before = now()
        await drain(sending(pause_seconds))
        assert now() == pytest.approx(before + 2)

    receive = receiving(*(chunk(body, more=True) for body in (bytes(2**20), b"x", b"next")))
    before = now()
    await drain(receive, is_anonymous=True)
    assert now() == pytest.approx(before + 2)
    assert (await receive())["body"] == b"next"


class Client:
    def __init__(self, body: bytes = b"") -> None:
        self.leaves = asyncio.Event()
        self._body = body

    async def receive(self) -> Any:  # noqa: ANN401
        if self._body:
            body, self._body = self._body, b""
            return chunk(body)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def post(self, app: Application, path: str = "/detect") -> int:
        """Return the status."""
        return (await call(app, self.receive, path, {"Content-Type": "image/bmp", "Content-Length": str(len(SCENE))})).status

    async def stay(self, seconds: float, error: Exception | None = None) -> None:
        """Let a block take so long after the body has arrived, and then end or fail."""
        with ClientWatch(self.receive, LIMITS) as watch:
            watch.is_body_complete = True
            await asyncio.sleep(seconds)
            if error is not None:
                raise error


@in_virtual_time
async def test_block_ends_as_it_would_unless_the_client_leaves() -> None:
    """Some servers send an empty message after the last one of a body, which is not a disconnect."""
    tasks = asyncio.all_tasks()
    for client in (Client(), Client(b"more")):
        await client.stay(60)
    with pytest.raises(InvalidImage):
        await Client().stay(60, InvalidImage("broken"))
    before, client = now(), Client()
    client.leaves.set()
    with pytest.raises(ClientGone, match="disconnected before the response"):
        await client.stay(60)
    await asyncio.sleep(0)

    assert now() < before + 1
    assert asyncio.all_tasks() == tasks


async def test_client_that_leaves_while_its_image_is_queued_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert await Client(SCENE).post(app) == 502  # in the thread that was the second's turn before

    assert (log[0].kwargs["status"], log[0].kwargs["code"]) == (499, "client_gone")
    assert len(decoded) == len(fake.requests) == 2


async def test_client_that_leaves_during_its_inference_leaves_the_slot_to_triton(
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
        assert await Client(SCENE).post(app) == 429
        fake.may_answer.set()

        await eventually(lambda: not arena.lent_bytes)
        assert await Client(SCENE).post(app) == 502
    assert [line.kwargs["status"] for line in log] == [499, 429, 502]
    assert fake.cancelled == 0


async def test_client_that_leaves_while_the_config_is_read_is_noticed_and_others_are_forgotten_at_once() -> None:
    """No reference cycle keeps the request until the garbage collector runs."""
    fake = FakeTriton()
    async with serving(fake):
        app = create_app(settings_for(fake.url))
        with in_cycles(RequestContext) as kept:
            async with lifespan_of(app):  # until all calls have ended
                fake.may_answer.clear()
                fake.may_tell.clear()
                clients = [Client(SCENE) for _ in range(4)]
                for client in clients:
                    client.leaves.set()
                paths = ["/predict/other?timeout_ms=20000", *["/detect"] * 3]
                posted = [client.post(app, path) for client, path in zip(clients, paths, strict=True)]
                assert await asyncio.gather(*posted) == [400] * 4
                fake.may_answer.set()
                fake.may_tell.set()

    assert not kept
