"""What Frigate's ZMQ detector sends is answered, by any worker: boxes as those of /detect, zeros for what cannot be answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import msgspec
import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from PIL import Image

from app.frigate import listener
from app.frigate.listener import Listener
from app.main import create_app
from app.pipeline.pipeline import Pipeline
from app.settings.schema import Settings
from tests.fakes import models
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.faults.fleet import running_fleet
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import METRICS, captured_log, eventually, free_port, started, until
from tests.world import World, open_world

SIDE = SPEC.input_size[0]
PIXELS = np.zeros((SIDE, SIDE, 3), np.uint8)
ROW = [8, 4, 24, 16, 0.75, 2]
"""x1 y1 x2 y2 score class, as the fake Triton answers."""
FOUND = [2, 0.75, 4 / SIDE, 8 / SIDE, 16 / SIDE, 24 / SIDE]
"""The same for Frigate."""


class Detector:
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.REQ)
        self.socket.linger = 0
        self.socket.connect(address)

    async def ask(self, *frames: bytes) -> bytes:
        await self.socket.send_multipart(frames)
        (answer,) = await self.socket.recv_multipart()
        return bytes(answer)

    async def detect(self, *frames: bytes) -> list[list[float]]:
        rows = np.frombuffer(await self.ask(*(frames or message(PIXELS))), np.float32).reshape(20, 6)
        return [row for row in rows.tolist() if any(row)]


Connect = Callable[[str], Detector]


def message(pixels: NDArray[np.uint8], **header: Any) -> tuple[bytes, bytes]:  # noqa: ANN401
    given = {"shape": [1, *pixels.shape], "dtype": "uint8", "model_type": "yologeneric", **header}
    return json.dumps(given).encode(), pixels.tobytes()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect to an address; the sockets are closed in the end."""
    made: list[Detector] = []
    with zmq.asyncio.Context() as context:

        def connect(address: str) -> Detector:
            made.append(Detector(context, address))
            return made[-1]

        yield connect
        for detector in made:
            detector.socket.close()


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(listener, "_RETRY_SECONDS", 0.02)
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.array([ROW, [0] * 6], np.float32))
    async with open_world(fake) as world:
        yield world


@contextmanager
def listening(world: World, address: str, seconds: float = 30) -> Iterator[asyncio.Task[None]]:
    task = asyncio.create_task(Listener(address, world.pipeline, METRICS, seconds).run())
    try:
        yield task
    finally:
        task.cancel()


async def test_boxes_are_those_of_detect(served: Settings, connect: Connect, address: str) -> None:
    """Frigate asks once, when it starts, and then sends images only if the model is there; the gateway takes no models."""
    Image.open(BytesIO(models.scene("PNG"))).resize((100, 64)).save(file := BytesIO(), "PNG")
    async with started(create_app(msgspec.structs.replace(served, model="six_columns", frigate_zmq=address))) as client:
        detected = (await client.post("/detect", content=file.getvalue())).json()["detections"]
        detector = connect(address)
        found = await detector.detect(*message(np.asarray(Image.open(file).convert("RGB"))))
        asked = await detector.ask(b'{"model_request": true, "model_name": "yolo.onnx"}')
        sent = await detector.ask(b'{"model_data": true, "model_name": "yolo.onnx"}', b"network")
        metrics = (await client.get("/metrics")).text  # which count images alone

    expected = [[one["class_id"], one["confidence"], *(one[side] for side in ("y1", "x1", "y2", "x2"))] for one in detected]
    assert len(found) == 2
    np.testing.assert_allclose(found, expected, atol=1e-3)
    assert json.loads(asked) == {"model_available": True, "model_loaded": True}
    assert json.loads(sent) == {"model_saved": False, "model_loaded": True}
    assert 'api_frigate_images_total{outcome="detected"} 1.0' in metrics


MALFORMED = [
    (b"{", PIXELS.tobytes()),
    (b"[" * 4000, b""),
    message(PIXELS)[:1],
    message(PIXELS, dtype="float32"),
    message(PIXELS, shape=[1, -SIDE, -SIDE, 3]),
    message(PIXELS, shape=[1, 10**30, SIDE, 3]),
]


async def test_malformed_message_or_defect_is_answered_with_zeros_and_logged_once(
    world: World, connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, listener)
    with listening(world, address):
        detector = connect(address)
        assert [await detector.detect(*frames) for frames in MALFORMED] == [[]] * len(MALFORMED)
        with monkeypatch.context() as patch:
            patch.setattr(Pipeline, "run", lambda *_: 1 / 0)
            assert await detector.detect() == []
        assert await detector.detect() == [FOUND]
    assert len(world.fake.requests) == 1
    assert [line.method_name for line in log] == ["info", "warning", "exception"]


DELIMITER, LONG_MORE = b"\1\0", b"\3"
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(32, b"\0") + bytes(20)
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3REQ"
HEADER = LONG_MORE + (2).to_bytes(8) + b"{}"

HOSTILE = {
    "another protocol": b"GET / HTTP/1.1\r\n".ljust(100),
    "another mechanism": GREETING.replace(b"NULL", b"PLAI"),
    "a large READY": GREETING + b"\6" + (1 << 40).to_bytes(8),
    "another kind of socket": GREETING + READY + b"\0\1x",
    "a large header": GREETING + READY + DELIMITER + LONG_MORE + (4097).to_bytes(8),
    "a large image": GREETING + READY + DELIMITER + HEADER + b"\2" + (PIXELS.nbytes + 4097).to_bytes(8),
    "many frames": GREETING + READY + DELIMITER + HEADER * 2,
    "nothing more": GREETING + READY + DELIMITER + HEADER,
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE.keys())
async def test_hostile_peer_is_disconnected_before_more_is_read(
    world: World, connect: Connect, address: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_TRANSFER_SECONDS", 0.1)
    with listening(world, address):
        detector = connect(address)
        assert await detector.detect() == [FOUND]
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(address).port)
        writer.write(sent)
        with suppress(ConnectionResetError):
            await reader.read()  # until it is closed
        writer.close()
        assert await detector.detect() == [FOUND]


async def test_connections_above_the_limit_are_closed(
    world: World, connect: Connect, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_MAX_CONNECTIONS", 2)
    with listening(world, address):
        detector = connect(address)
        assert await detector.detect() == [FOUND]
        idle, refused = [await asyncio.open_connection("127.0.0.1", urlsplit(address).port) for _ in range(2)]
        refused[1].write(GREETING + READY)
        with suppress(ConnectionResetError):
            await refused[0].read()
        assert await detector.detect() == [FOUND]
        for _, writer in (idle, refused):
            writer.close()
        assert await connect(address).detect() == [FOUND]


async def test_hanging_image_holds_up_nobody_else_until_it_is_late(world: World, connect: Connect, address: str) -> None:
    world.fake.may_answer.clear()
    with listening(world, address, seconds=0.2):
        waiting = asyncio.create_task(connect(address).detect())
        await eventually(lambda: world.fake.running == 1)
        assert json.loads(await connect(address).ask(b'{"model_request": true}'))["model_loaded"]
        assert await waiting == []


async def test_listener_waits_for_its_address_and_not_for_triton(
    world: World, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frigate asks only once whether the model is there, possibly before Triton is."""
    log = captured_log(monkeypatch, listener)
    folder = tmp_path / "later"
    world.fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    with listening(world, f"ipc://{folder}/zmq"):
        await eventually(lambda: len(log) == 1)
        folder.mkdir()
        detector = connect(f"ipc://{folder}/zmq")
        assert json.loads(await detector.ask(b'{"model_request": true}'))["model_loaded"]
        assert await detector.detect() == []
        world.fake.query_refusal = None
        assert await detector.detect() == [FOUND]
    assert [line.method_name for line in log] == ["warning", "info", "warning"]


@pytest.mark.system
async def test_another_worker_of_serve_answers_when_one_is_killed(tmp_path: Path, address: str, connect: Connect) -> None:
    port, picture = urlsplit(address).port, np.full((models.SIDE, models.SIDE, 3), 255, np.uint8)
    picture[30:90, 20:80] = (255, 0, 0)

    async def finds_red() -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                return len(await connect(address).detect(*message(picture))) == 1
        return False

    models.write(tmp_path / "all")
    (tmp_path / "models").mkdir()
    (tmp_path / "all" / "six_columns").rename(tmp_path / "models" / "six_columns")
    with running_fleet(tmp_path / "models", tmp_path, settings={"model": "six_columns", "frigate_zmq": address}) as fleet:
        for _ in range(2):
            await until(finds_red)
            listening = [(worker, one) for worker in fleet.workers() for one in worker.net_connections("tcp")]
            (found,) = [worker for worker, one in listening if one.laddr.port == port and one.status == psutil.CONN_LISTEN]
            found.kill()
        await until(finds_red)
