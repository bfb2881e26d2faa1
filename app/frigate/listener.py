"""Answers Frigate's ZMQ detector: pixels come in a message, and go to the default model as an uncompressed image.

One worker of the host has the address; when it ends, another one takes it. Frigate waits 200 ms for an answer; rows of zeros are no
objects. Source: frigate/detectors/plugins/zmq_ipc.py.
"""

import asyncio
import errno
import fcntl
import os
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from io import BytesIO
from time import monotonic
from urllib.parse import urlsplit

import msgspec
import numpy as np
import structlog
from PIL import Image

from app.errors import GatewayError, MalformedRequest
from app.frigate import zmtp
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_RETRY_SECONDS = 1.0
# Frigate has one connection for each of its detectors, and sends one image at a time.
_MAX_CONNECTIONS = 64
# Time for a message from its first bytes, and for its answer to be taken.
_TRANSFER_SECONDS = 5.0
_MAX_HEADER_BYTES = 4096
_USUAL_SIZE = 640, 640
"""Maximum size of images before that of the model's input is known."""
_LOG_SECONDS = 60.0
_ZEROS = np.zeros((20, 6), np.float32)
"""Rows of class, score, y1, x1, y2, x2, in fractions of the image."""
_CALLER = Caller("Frigate over ZMQ")  # no API key has such a name
_OPTIONS = DetectOptions(None, 0.25, None, len(_ZEROS))

LOG = structlog.get_logger()


class _Header(msgspec.Struct):
    """The first frame: of an image, of a question for a model, or of a model that Frigate wants to send."""

    shape: list[int] = []
    dtype: str = ""
    model_request: bool = False
    model_data: bool = False


class Listener:
    """Answers Frigate at one address."""

    def __init__(self, address: str, pipeline: Pipeline, metrics: Metrics, seconds: float) -> None:
        """Prepare to listen at an address in ZMQ's form; each image is answered in these seconds."""
        self._address = address
        self._pipeline = pipeline
        self._outcomes = metrics.frigate_images
        self._seconds = seconds
        self._connections = 0
        self._logged: dict[str, float] = {}

    async def run(self) -> None:
        """Listen whenever no other process does; never returns."""
        async with asyncio.TaskGroup() as tasks:

            def accept(reader: StreamReader, writer: StreamWriter) -> None:
                tasks.create_task(self._converse(reader, writer))

            while True:
                try:
                    async with _listening(self._address, accept):
                        LOG.info("images of Frigate are answered", address=self._address)
                        await asyncio.Future()
                except OSError as error:
                    if error.errno not in {errno.EADDRINUSE, errno.EAGAIN}:  # another worker listens
                        self._log("the address for Frigate cannot be used", str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _converse(self, reader: StreamReader, writer: StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections > _MAX_CONNECTIONS:
                return
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host may vanish
            async with asyncio.timeout(_TRANSFER_SECONDS):
                await zmtp.greet(reader, writer)
            while True:
                await zmtp.wait_for_message(reader)
                async with asyncio.timeout(_TRANSFER_SECONDS):
                    frames = await zmtp.read_message(reader, _MAX_HEADER_BYTES, self._max_image_bytes())
                zmtp.write_message(writer, await self._answer(frames))
                async with asyncio.timeout(_TRANSFER_SECONDS):
                    await writer.drain()
        except MalformedRequest as error:
            self._log("a connection to the address for Frigate was closed", error.detail)
        except (OSError, EOFError, RuntimeError):  # the peer has left, for which uvloop has another error, or is too slow
            pass
        finally:
            self._connections -= 1
            writer.transport.abort()

    def _max_image_bytes(self) -> int:
        spec = self._pipeline.tritons.cached(self._pipeline.default_reference)
        width, height = spec.input_size if spec else _USUAL_SIZE
        return max(3 * width * height, _MAX_HEADER_BYTES)

    async def _answer(self, frames: Sequence[bytes]) -> bytes:
        outcome, reply = "detected", _ZEROS.tobytes()
        try:
            header = _read_header(frames[0])
            if header.model_request:  # whichever one it names: Frigate asks only once, possibly before Triton is ready
                return msgspec.json.encode({"model_available": True, "model_loaded": True})
            if header.model_data:
                return msgspec.json.encode({"model_saved": False, "model_loaded": True})
            reply = await self._detect(header, frames[-1])
        except GatewayError as error:
            outcome = error.code
            self._log("an image of Frigate was answered without objects", error.detail, code=outcome)
        except Exception:
            outcome = "internal"
            LOG.exception("an image of Frigate was answered without objects")
        self._outcomes.add(1, outcome)
        return reply

    async def _detect(self, header: _Header, content: bytes) -> bytes:
        *batch, height, width, channels = [0, 0, 0, *header.shape][-4:]
        pixels = np.frombuffer(content, np.uint8)
        if [*batch, channels, header.dtype] != [1, 3, "uint8"] or height * width * 3 != len(pixels) or min(height, width) < 1:
            raise MalformedRequest("expected input_tensor nhwc, input_dtype int, and as many bytes as the shape says")
        Image.fromarray(pixels.reshape(height, width, 3)).save(file := BytesIO(), "BMP")  # copies the pixels and compresses nothing
        call = CallContext(Deadline.after(self._seconds), Timing(), "frigate", _CALLER, uses_cache=False)
        found = await self._pipeline.run(file.getvalue(), _OPTIONS, call)
        rows, boxes = _ZEROS.copy(), found.boxes / np.array([width, height] * 2, np.float32)
        rows[: len(boxes)] = np.column_stack([found.class_ids, found.scores, boxes[:, [1, 0, 3, 2]]])
        return rows.tobytes()

    def _log(self, text: str, reason: str, **fields: str) -> None:
        key = fields.get("code", text)
        if monotonic() - self._logged.get(key, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged[key] = monotonic()
            LOG.warning(text, reason=reason, **fields)


def _read_header(frame: bytes) -> _Header:
    try:
        return msgspec.json.decode(frame, type=_Header)
    except msgspec.MsgspecError as error:
        raise MalformedRequest(f"the header of an image cannot be read: {error}") from error


@asynccontextmanager
async def _listening(address: str, accept: Callable[[StreamReader, StreamWriter], None]) -> AsyncIterator[None]:
    """Listen at an address; raise OSError if another process does."""
    parts = urlsplit(address)
    with ExitStack() as stack:
        if parts.scheme == "ipc":  # asyncio replaces the socket of another process
            lock = os.open(f"{parts.path}.lock", os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            server = await asyncio.start_unix_server(accept, parts.path)
        else:
            host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname  # whether or not there is IPv6
            server = await asyncio.start_server(accept, host, parts.port)
        stack.callback(server.close)
        yield
