"""Work for a client that has disconnected is stopped."""

import asyncio
import gc
from typing import Any

import pytest

from app.api import middleware
from app.api.application import Application
from app.api.context import RequestContext
from app.api.disconnect import CancelOnDisconnect
from app.errors import ClientGone, InvalidImage
from app.main import create_app
from app.pipeline import detector
from app.triton.shared_memory import Arena
from app.triton.transport import SLOTS
from tests.api.conftest import settings_for
from tests.fakes.triton import FakeTriton, serving
from tests.pipeline.gate import Gate
from tests.support import SCENE, Reply, call, captured_log, eventually, lifespan_of


class Client:
    """Sends a body, and disconnects when told."""

    def __init__(self, body: bytes = b"") -> None:
        self.leaves = asyncio.Event()
        self.was_watched = False
        self._body: bytes | None = body

    async def receive(self) -> Any:  # noqa: ANN401
        """Return the body first, then that the client has left."""
        if self._body:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        self.was_watched = True
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def post(self, app: Application) -> Reply:
        """POST its body to an application."""
        return await call(app, self.receive, "/detect", {"Content-Type": "image/bmp", "Content-Length": str(len(SCENE))})


async def test_a_block_ends_as_it_would_while_the_client_stays() -> None:
    """With its result or its exception, whether it is short or long; nothing goes on watching the client."""
    tasks = asyncio.all_tasks()

    async def fail(seconds: float) -> None:
        async with CancelOnDisconnect(Client().receive):
            await asyncio.sleep(seconds)
            raise InvalidImage("broken")

    for seconds in (0, 0.4):
        client = Client()
        async with CancelOnDisconnect(client.receive):
            await asyncio.sleep(seconds)
        assert client.was_watched is (seconds > 0)
        with pytest.raises(InvalidImage):
            await fail(seconds)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == tasks


async def test_a_block_is_cancelled_when_the_client_leaves() -> None:
    """Its task goes on with an exception, and is not cancelled itself."""
    client = Client()
    client.leaves.set()
    ended: list[str] = []

    async def work() -> None:
        async with CancelOnDisconnect(client.receive):
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


async def test_a_rest_of_the_body_is_not_a_disconnect() -> None:
    """Some servers send an empty message after the last one of a body."""
    client = Client(b"more")
    async with CancelOnDisconnect(client.receive):
        await asyncio.sleep(0.4)

    assert client.was_watched


async def test_a_cancellation_for_another_reason_goes_on() -> None:
    """The server stops, for example."""

    async def request() -> None:
        async with CancelOnDisconnect(Client().receive):
            await asyncio.sleep(60)

    running = asyncio.create_task(request())
    await asyncio.sleep(0.4)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_client_that_leaves_while_its_image_is_queued_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither decoding nor an inference starts for it, and the log says 499."""
    gate, fake = Gate(), FakeTriton()
    async with serving(fake):
        app = create_app(settings_for(fake.url, decode_threads=1))
        async with lifespan_of(app):
            fake.requests.clear()
            decoded = gate.block(monkeypatch, detector, "fill_input")
            log = captured_log(monkeypatch, middleware)
            first, second = Client(SCENE), Client(SCENE)
            blocking = asyncio.create_task(first.post(app))
            assert await eventually(gate.reached.is_set)
            waiting = asyncio.create_task(second.post(app))
            second.leaves.set()
            await waiting
            gate.opened.set()
            await blocking
            await asyncio.sleep(0.1)

    assert log[0].kwargs["status"] == 499
    assert log[0].kwargs["code"] == "client_gone"
    assert len(decoded) == len(fake.requests) == 1


async def test_a_client_that_leaves_during_its_inference_leaves_the_slot_to_triton(
    monkeypatch: pytest.MonkeyPatch, arenas: list[Arena]
) -> None:
    """Its slot and its place are given back when the RPC has ended, because Triton reads and works until then."""
    fake = FakeTriton()
    async with serving(fake):
        app = create_app(settings_for(fake.url, max_requests=1))
        async with lifespan_of(app):
            fake.requests.clear()
            fake.may_answer.clear()
            log = captured_log(monkeypatch, middleware)
            client = Client(SCENE)
            running = asyncio.create_task(client.post(app))
            assert await eventually(lambda: len(fake.requests) == 1)
            client.leaves.set()
            await running
            (arena,) = arenas
            assert len(arena.free_offsets) == SLOTS - 1
            assert (await Client(SCENE).post(app)).status == 429
            fake.may_answer.set()

            assert await eventually(lambda: len(arena.free_offsets) == SLOTS)
            assert (await Client(SCENE).post(app)).status == 502
    assert [line.kwargs["status"] for line in log] == [499, 429, 502]
    assert fake.cancelled == 0


async def test_a_client_that_leaves_is_forgotten_at_once() -> None:
    """No reference cycle keeps its request until the garbage collector runs."""
    fake = FakeTriton()
    async with serving(fake):
        app = create_app(settings_for(fake.url))
        async with lifespan_of(app):
            fake.may_answer.clear()
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                for _ in range(3):
                    client = Client(SCENE)
                    client.leaves.set()
                    await client.post(app)
                fake.may_answer.set()
                await asyncio.sleep(0.2)
                gc.collect()
                kept = [thing for thing in gc.garbage if isinstance(thing, RequestContext)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()

    assert not kept
