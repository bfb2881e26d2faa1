"""The whole job in one function: the bytes of a picture -> its detections."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app import detections, image, letterbox, rows
from app.contract import Contract, Form, Layout
from app.errors import DeadlinePassed, UnknownModel
from app.letterbox import Placement
from app.parameters import Parameters
from app.schema import Detection
from app.stages import Stages
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

    def __init__(self, triton: Triton, default_model: str, pullable: frozenset[str], limits: Limits) -> None:
        self.triton = triton
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
            stages: Gets the laps `queue` (for a thread), `decode` (and letterbox), `infer` and `post`.
            request_id: Handed to Triton.

        Raises:
            GatewayError: As the steps say; DeadlinePassed when they took too long together.
        """
        deadline = monotonic() + self._limits.timeout_seconds
        model = await self._contract(wanted.model or self.default_model)
        named = wanted.wanted_classes
        classes = None if named is None else detections.class_ids(named, model.labels)
        stages.lap("model")

        def prepare() -> tuple[Placement, NDArray[Any]]:
            stages.lap("queue")
            return _prepare(data, model, self._limits.max_pixels)

        placement, tensor = await self._in_thread(prepare, deadline)
        stages.lap("decode")
        answer = await self.triton.infer(model, tensor, deadline - monotonic(), request_id)
        stages.lap("infer")

        def finish() -> list[Detection]:
            found = rows.read(model, answer.outputs)
            best = detections.select(found, confidence=wanted.confidence, classes=classes, limit=wanted.max_detections)
            return detections.name(best, placement, model.labels, wanted.boxes)

        result = await self._in_thread(finish, deadline) if model.layout in _RAW_HEADS else finish()
        stages.lap("post")
        return Found(result, placement.picture_width, placement.picture_height, model, answer.version)

    async def _contract(self, name: str) -> Contract:
        try:
            return await self.triton.contract(name)
        except UnknownModel:
            if name in self.pullable:
                raise UnknownModel(f"{name} has not been pulled; run ./just pull {name}, then start Triton again") from None
            raise

    async def _in_thread(self, work: Callable[[], T], deadline: float) -> T:
        """Run `work` in the pool; past the deadline it is dropped if it waits and left alone if it runs."""
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._executor, work), deadline - monotonic())
        except TimeoutError as error:
            raise DeadlinePassed("the request took too long here") from error


def _prepare(data: bytes, model: Contract, max_pixels: int) -> tuple[Placement, NDArray[Any]]:
    """Make the model's input of a file: the file itself after a look at its header, or its pixels."""
    unread = image.read_header(data, max_pixels)
    placement = letterbox.place((unread.width, unread.height), model.frame, centred=model.centred, enlarge=model.enlarge)
    if model.form is Form.FILE:
        tensor = np.empty((1, 1) if model.batched else (1,), np.object_)
        tensor.flat[0] = data
        return placement, tensor
    # A JPEG decodes faster at a fraction of its size, but averaged; from four times the size needed on, that no
    # longer shows in the boxes (README, Decisions).
    frame = np.empty((model.frame[1], model.frame[0], 3), np.uint8)
    needed = 4 * placement.width, 4 * placement.height
    picture = image.decode(unread, needed, letterbox.area(placement, frame))
    letterbox.draw(picture, placement, model.pad, frame)
    return placement, model.to_input(frame)
