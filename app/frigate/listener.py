"""Answers Frigate's ZMQ detector: pixels come in a message, and go to the default model without encoding.

One worker of the host has the address; when it ends, another one takes it. Frigate waits 200 ms for an answer; rows of zeros are no
objects. Source: frigate/detectors/plugins/zmq_ipc.py.
"""

import asyncio
import errno
import fcntl
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import msgspec
import numpy as np
import structlog
import zmq
import zmq.asyncio

from app.errors import GatewayError, GatewayFull, MalformedRequest
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_RETRY_SECONDS = 1.0
_PREPARE_SECONDS = 5.0
_POLL_MS = 1000
_MAX_HEADER_BYTES = 4096
# Images in progress, per connection and in all. Frigate sends one at a time for each of its detectors.
_MAX_PER_PEER, _MAX_IMAGES = 4, 64
_LOG_SECONDS = 60.0
_ZEROS = np.zeros((20, 6), np.float32)
"""Rows of class, score, y1, x1, y2, x2, in fractions of the image."""
_CALLER = Caller("frigate")
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
        self._images: Counter[bytes] = Counter()
        """Images in progress by connection."""
        self._logged: dict[str, float] = {}

    async def run(self) -> None:
        """Listen whenever no other process does; never returns."""
        with zmq.asyncio.Context() as context:
            while True:
                try:
                    await self._listen(context)
                except (OSError, zmq.ZMQError) as error:
                    if error.errno not in {errno.EADDRINUSE, errno.EAGAIN}:  # another worker listens
                        self._log("the address for Frigate cannot be used", str(error))
                except Exception as error:  # noqa: BLE001 - the next attempt may succeed
                    self._log("images of Frigate are not answered yet", str(error))
                await asyncio.sleep(_RETRY_SECONDS)

    async def _listen(self, context: zmq.asyncio.Context) -> None:
        """Answer until the model has an input of another size, which limits the size of messages."""
        pipeline = self._pipeline
        model = pipeline.refer_to(pipeline.default_model, None)
        size = (await pipeline.prepare(model, Deadline.after(_PREPARE_SECONDS))).input_size
        with _locked(self._address), context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.rcvhwm = _MAX_PER_PEER
            socket.maxmsgsize = max(3 * size[0] * size[1], _MAX_HEADER_BYTES)
            socket.ipv6 = True
            socket.bind(self._address)
            LOG.info("images of Frigate are answered", address=self._address)
            async with asyncio.TaskGroup() as tasks:
                while (spec := pipeline.tritons.cached(model)) is None or spec.input_size == size:
                    if await socket.poll(_POLL_MS):
                        peer, *frames = await socket.recv_multipart(copy=False)
                        tasks.create_task(self._answer(socket, peer.bytes, frames))

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) < 2 or len(frames[0]):  # noqa: PLR2004 - not from a REQ socket, so it cannot be answered
            return
        outcome, reply = "detected", _ZEROS.tobytes()
        self._images[peer] += 1
        try:
            reply = await self._reply(frames[1:], self._images[peer])
        except GatewayError as error:
            outcome = error.code
            self._log("an image of Frigate was answered without objects", error.detail, code=outcome)
        except Exception:
            outcome = "internal"
            LOG.exception("an image of Frigate was answered without objects")
        finally:
            self._images -= Counter([peer])  # without zeros
        self._outcomes.add(1, outcome)
        await socket.send_multipart([peer, b"", reply])

    async def _reply(self, frames: Sequence[zmq.Frame], own: int) -> bytes:
        """Answer one of the messages of a connection that are in progress."""
        if own > _MAX_PER_PEER or self._images.total() > _MAX_IMAGES:
            raise GatewayFull("too many images of Frigate are in progress")
        try:
            header = msgspec.json.decode(frames[0].buffer[:_MAX_HEADER_BYTES], type=_Header)
        except msgspec.MsgspecError as error:
            raise MalformedRequest(f"the header of an image cannot be read: {error}") from error
        if header.model_request:  # whichever one it names: Frigate asks only once, possibly before Triton is ready
            return msgspec.json.encode({"model_available": True, "model_loaded": True})
        if header.model_data:
            return msgspec.json.encode({"model_saved": False, "model_loaded": True})
        *batch, height, width, channels = [0, 0, 0, *header.shape][-4:]
        pixels = np.frombuffer(frames[-1].buffer, np.uint8)
        if [*batch, channels, header.dtype] != [1, 3, "uint8"] or height * width * 3 != len(pixels) or min(height, width) < 1:
            raise MalformedRequest("expected input_tensor nhwc, input_dtype int, and as many bytes as the shape says")
        call = CallContext(Deadline.after(self._seconds), Timing(), "frigate", _CALLER)
        model = self._pipeline.refer_to(self._pipeline.default_model, None)
        found = await self._pipeline.run_model(model, pixels.reshape(height, width, 3), _OPTIONS, call)
        rows, boxes = _ZEROS.copy(), found.boxes / np.array([width, height] * 2, np.float32)
        rows[: len(boxes)] = np.column_stack([found.class_ids, found.scores, boxes[:, [1, 0, 3, 2]]])
        return rows.tobytes()

    def _log(self, text: str, reason: str, **fields: str) -> None:
        """Log a warning, but the same one at most once a minute."""
        key = fields.get("code", text)
        if monotonic() - self._logged.get(key, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged[key] = monotonic()
            LOG.warning(text, reason=reason, **fields)


@contextmanager
def _locked(address: str) -> Iterator[None]:
    """Keep others from listening at the path of a socket, which ZMQ would replace; raise BlockingIOError if another one listens."""
    if not address.startswith("ipc://"):
        yield
        return
    with Path(f"{address.removeprefix('ipc://')}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
