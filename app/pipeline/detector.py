"""Detect objects in an encoded image: the steps of a request, joined."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.detection.outputs import Candidates, decode_outputs
from app.detection.select import select, to_class_ids
from app.errors import DeadlinePassed, UnknownModel
from app.imaging import canvas
from app.imaging.letterbox import LetterboxTransform
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.buffer import InputBuffer
from app.pipeline.decode_pool import DecodePool
from app.pipeline.inference import InferenceRunner
from app.pipeline.preprocess import fill_input
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from app.triton.transport import Transport

T = TypeVar("T")


class DetectOptions(NamedTuple):
    """What the caller asks for."""

    model: str | None
    """Name of the model; None for the default model."""
    confidence: float
    """Minimum score."""
    classes: list[str] | None
    """Names or ids; None for all classes."""
    max_detections: int


class Detections(NamedTuple):
    """What was found in one image, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the upright image, clipped to it."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    width: int
    """Width of the upright image, pixels."""
    height: int
    """Height of the upright image, pixels."""
    spec: ModelSpec
    """Spec of the model that was asked."""
    version: str
    """Version of the model that answered."""


class Limits(NamedTuple):
    """What one worker allows itself and its callers."""

    decode_threads: int
    max_pixels: int
    """Maximum size of an image, checked in its header."""
    timeout_seconds: float
    """Time from the end of a request's body to its response."""


class Detector:
    """Joins the steps of a request. Each worker has one."""

    def __init__(
        self, triton: TritonClient, transport: Transport, default_model: str, pullable: frozenset[str], limits: Limits
    ) -> None:
        self.default_model = default_model
        self.pullable = pullable
        """Models that `pull` could get."""
        self._limits = limits
        self._transport = transport
        self._specs = SpecCache(triton)
        self._pool = DecodePool(limits.decode_threads)
        self._inferences = InferenceRunner(triton, transport, self._specs)

    @property
    def transport_mode(self) -> Literal["shm", "inline"]:
        """How tensors reach Triton now."""
        return self._transport.active_mode

    def deadline(self) -> Deadline:
        """Return the deadline of a request whose body has just been received."""
        return Deadline.after(self._limits.timeout_seconds)

    async def run_in_thread(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run something that would block the event loop, such as parsing a large body, where images are decoded.

        Raises:
            DeadlinePassed: It took too long.
        """
        return await self._pool.run(work, deadline)

    async def spec(self, model: str) -> ModelSpec:
        """Return what is known of a model.

        Raises:
            GatewayError: There is no such model, or it cannot be used.
        """
        return await self._specs.get(model)

    async def prepare(self, model: str, deadline: Deadline) -> ModelSpec:
        """Return a model's spec, and have slots for its images.

        Raises:
            GatewayError: There is no such model, or it cannot be used.
        """
        spec = self._specs.cached(model)
        if spec is not None and self._transport.is_prepared(spec.image_bytes):
            return spec
        try:
            async with asyncio.timeout(deadline.remaining):
                spec = await self._specs.get(model)
                await self._transport.prepare(spec.image_bytes)
        except TimeoutError as error:
            raise DeadlinePassed("Triton did not answer in time") from error
        except UnknownModel:
            if model in self.pullable:
                raise UnknownModel(f"{model} has not been pulled; run ./just pull {model}, then restart Triton") from None
            raise
        return spec

    async def detect(
        self, data: bytes, options: DetectOptions, *, deadline: Deadline, timing: Timing, request_id: str
    ) -> Detections:
        """Detect objects in one image.

        Args:
            data: The encoded image.
            options: What to look for.
            deadline: When to give up.
            timing: Gets the laps `model` (its spec), `queue` (for a thread), `decode` (and letterbox), `infer` and `post`.
            request_id: Request id, for Triton's log.

        Raises:
            GatewayError: As the steps say; DeadlinePassed if they take too long together.
        """
        spec = await self.prepare(options.model or self.default_model, deadline)
        class_ids = to_class_ids(options.classes, spec.labels)
        timing.lap("model")
        with InputBuffer(self._transport) as buffer:
            transform = await self._fill(buffer, data, spec, deadline, timing)
            timing.lap("decode")
            result = await self._inferences.run(spec, buffer, deadline, request_id)
            timing.lap("infer")
        decode = partial(_decode, spec, result.outputs, options, class_ids)
        found = await self._pool.run(decode, deadline) if spec.output_format.is_heavy else decode()
        boxes = transform.to_image(found.boxes)
        timing.lap("post")
        return Detections(boxes, found.scores, found.class_ids, transform.image_width, transform.image_height, spec, result.version)

    async def close(self) -> None:
        """Wait for images that are being decoded, and for abandoned inferences."""
        self._pool.close()
        await self._inferences.drain()

    async def _fill(
        self, buffer: InputBuffer, data: bytes, spec: ModelSpec, deadline: Deadline, timing: Timing
    ) -> LetterboxTransform:
        """Fill the input tensor, in a thread unless that takes next to no time."""

        def fill() -> LetterboxTransform:
            timing.lap("queue")
            return fill_input(data, spec, self._limits.max_pixels, buffer)

        if spec.input_format is InputFormat.FILE and canvas.is_quick_to_check(data):
            return fill()
        return await self._pool.run(fill, deadline, buffer.keep_for)


def _decode(
    spec: ModelSpec, outputs: dict[str, NDArray[Any]], options: DetectOptions, class_ids: frozenset[int] | None
) -> Candidates:
    (found,) = decode_outputs(spec, outputs, images=1)
    return select(found, confidence=options.confidence, class_ids=class_ids, max_detections=options.max_detections)
