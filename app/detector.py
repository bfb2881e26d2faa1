"""The whole job in one function: the bytes of a picture -> its detections."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app import detections, image, letterbox, rows, tensors
from app.arena import Slot
from app.contract import Contract, Form, Layout
from app.errors import DeadlinePassed, UnknownModel
from app.image import Unread
from app.letterbox import Placement
from app.parameters import Parameters
from app.schema import Detection
from app.stages import Stages
from app.transport import Transport
from app.triton import Triton

T = TypeVar("T")

# Their post-processing is milliseconds of numpy: too long for the event loop.
_RAW_HEADS = {Layout.YOLO_HEAD, Layout.YOLOX_HEAD}


class Found(NamedTuple):
    """What was found, and by whom."""

    detections: list[Detection]
    width: int
    """Of the upright picture, pixels."""
    height: int
    """Of the upright picture, pixels."""
    model: Contract
    version: str


class Prepared(NamedTuple):
    """A picture as its model wants it."""

    placement: Placement
    tensor: NDArray[Any]
    slot: Slot | None
    """What the tensor lies in; whoever gets it last has to free it."""

    def discard(self) -> None:
        """Let it go unused."""
        if self.slot is not None:
            self.slot.free()


class Limits(NamedTuple):
    """What one worker allows itself and its callers."""

    threads: int
    """That decode pictures."""
    max_pixels: int
    """Of a picture, by its header."""
    timeout_seconds: float
    """From the body being read to the answer."""


class Detector:
    """Joins the steps of a request; one per worker."""

    def __init__(self, triton: Triton, transport: Transport, default_model: str, pullable: frozenset[str], limits: Limits) -> None:
        self.triton = triton
        self.transport = transport
        self.default_model = default_model
        self.pullable = pullable
        self._limits = limits
        self._executor = ThreadPoolExecutor(limits.threads, thread_name_prefix="decode")

    def close(self) -> None:
        """Wait for pictures that are being decoded; start no more."""
        self._executor.shutdown(cancel_futures=True)

    async def detect(self, data: bytes, wanted: Parameters, stages: Stages, request_id: str) -> Found:
        """Detect objects in one picture.

        Args:
            data: A JPEG, PNG, WebP, BMP or GIF file.
            wanted: Which model, and which of its detections in which unit.
            stages: Gets the laps `model` (its contract), `queue` (for a thread), `decode` (and letterbox), `infer`, `post`.
            request_id: Handed to Triton.

        Raises:
            GatewayError: As the steps say; DeadlinePassed when they took too long together.
        """
        deadline = monotonic() + self._limits.timeout_seconds
        model = await self.ready(wanted.model or self.default_model)
        named = wanted.wanted_classes
        classes = None if named is None else detections.class_ids(named, model.labels)
        stages.lap("model")

        def prepare() -> Prepared:
            stages.lap("queue")
            return _prepare(data, model, self.transport, self._limits.max_pixels)

        is_quick = model.form is Form.FILE and image.has_quick_header(data)  # and not worth a thread
        prepared = prepare() if is_quick else await self._in_thread(prepare, deadline, Prepared.discard)
        placement, tensor, slot = prepared
        stages.lap("decode")
        answer = await self.triton.infer(model, tensor, deadline - monotonic(), request_id, slot)
        stages.lap("infer")

        def finish() -> list[Detection]:
            found = rows.read(model, answer.outputs)
            best = detections.select(found, confidence=wanted.confidence, classes=classes, limit=wanted.max_detections)
            return detections.name(best, placement, model.labels, wanted.boxes)

        result = await self._in_thread(finish, deadline) if model.layout in _RAW_HEADS else finish()
        stages.lap("post")
        return Found(result, placement.picture_width, placement.picture_height, model, answer.version)

    async def ready(self, name: str) -> Contract:
        """Read a model's contract, and have room for its pictures.

        Raises:
            GatewayError: There is no such model, or it cannot be asked.
        """
        try:
            async with asyncio.timeout(self._limits.timeout_seconds):
                model = await self._contract(name)
                await self.transport.prepare(model.input_bytes)
        except TimeoutError as error:
            raise DeadlinePassed("Triton did not answer in time") from error
        return model

    async def _contract(self, name: str) -> Contract:
        try:
            return await self.triton.contract(name)
        except UnknownModel:
            if name in self.pullable:
                raise UnknownModel(f"{name} has not been pulled; run ./just pull {name}, then start Triton again") from None
            raise

    async def _in_thread(self, work: Callable[[], T], deadline: float, discard: Callable[[T], None] | None = None) -> T:
        """Run `work` in the pool; past the deadline it is dropped if it waits, and left alone if it runs.

        `discard` then gets what it returns, once it does.
        """
        job = self._executor.submit(work)
        try:
            async with asyncio.timeout(deadline - monotonic()):
                return await asyncio.wrap_future(job)
        except BaseException as error:
            if discard is not None:
                job.add_done_callback(lambda done: done.cancelled() or done.exception() or discard(done.result()))
            if isinstance(error, TimeoutError):
                raise DeadlinePassed("the request took too long here") from error
            raise
        finally:
            # It holds the error, whose traceback holds this frame and, above it, the picture: a ring that only the
            # garbage collector would open.
            del job


def _prepare(data: bytes, model: Contract, transport: Transport, max_pixels: int) -> Prepared:
    """Make the model's input of a file: the file itself after a look at its header, or its pixels."""
    unread = image.read_header(data, max_pixels)
    placement = letterbox.place((unread.width, unread.height), model.frame, centred=model.centred, enlarge=model.enlarge)
    tensor: NDArray[Any]
    if model.dtype is None:
        slot = transport.take(model.input_bytes) if len(data) + 4 <= model.input_bytes else None
        tensor = tensors.of_file(data, None if slot is None else slot.array((model.input_bytes,), np.uint8))
        return Prepared(placement, tensor, slot)
    slot = transport.take(model.input_bytes)
    try:
        tensor = np.empty(model.shape, model.dtype) if slot is None else slot.array(model.shape, model.dtype)
        _draw(unread, placement, model, tensor)
    except BaseException:
        if slot is not None:
            slot.free()
        raise
    return Prepared(placement, tensor, slot)


def _draw(unread: Unread, placement: Placement, model: Contract, tensor: NDArray[Any]) -> None:
    """Fill the input tensor with the picture in its frame."""
    width, height = model.frame
    frame: NDArray[np.uint8]
    frame = tensor.reshape(height, width, 3) if model.is_frame else np.empty((height, width, 3), np.uint8)
    picture = image.decode(unread, placement.decode_size, letterbox.area(placement, frame))
    letterbox.draw(picture, placement, model.pad, frame)
    if not model.is_frame:
        model.fill(tensor, frame)
