"""The whole job: an encoded image to detections."""

import asyncio
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.detection.outputs import Candidates, decode_outputs
from app.detection.select import Criteria, select
from app.errors import DeadlinePassed, UnknownModel
from app.imaging.header import is_quick
from app.imaging.letterbox import LetterboxTransform
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.buffer import InputBuffer
from app.pipeline.decode_pool import DecodePool
from app.pipeline.inference import Inferences
from app.pipeline.preprocess import fill_input
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.triton.client import TritonClient
from app.triton.specs import ModelSpecs
from app.triton.transport import Transport


class Detections(NamedTuple):
    """What was found in one image, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the upright image, clipped to it."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    width: int
    """Of the upright image, pixels."""
    height: int
    """Of the upright image, pixels."""
    spec: ModelSpec
    """Of the model that was asked."""
    version: str
    """Of the model that answered."""


class Limits(NamedTuple):
    """What one worker allows itself and its callers."""

    threads: int
    """That decode images."""
    max_pixels: int
    """Of an image, according to its header."""
    timeout_seconds: float
    """From the end of a request's body to its response."""


class Detector:
    """Joins the steps of a request. One per worker."""

    def __init__(
        self, triton: TritonClient, transport: Transport, default_model: str, pullable: frozenset[str], limits: Limits
    ) -> None:
        self.transport = transport
        self.specs = ModelSpecs(triton)
        self.default_model = default_model
        self.pullable = pullable
        """Models that `pull` could get."""
        self.limits = limits
        self.pool = DecodePool(limits.threads)
        self._inferences = Inferences(triton, transport, self.specs)

    async def close(self) -> None:
        """Wait for images that are being decoded, and for inferences that nobody waits for."""
        self.pool.close()
        await self._inferences.drain()

    async def detect(  # noqa: PLR0913 - what a request consists of
        self, data: bytes, *, model: str | None, criteria: Criteria, deadline: Deadline, timing: Timing, request_id: str
    ) -> Detections:
        """Detect objects in one image.

        Args:
            data: A JPEG, PNG, WebP, BMP or GIF file.
            model: Its name; None for the default model.
            criteria: Which of the model's detections to return.
            deadline: When to give up.
            timing: Gets the laps `model` (its spec), `queue` (for a thread), `decode` (and letterbox), `infer` and `post`.
            request_id: For Triton's own log.

        Raises:
            GatewayError: As the steps say; DeadlinePassed if they take too long together.
        """
        spec = await self.ready(model or self.default_model, deadline)
        class_ids = criteria.class_ids(spec.labels)
        timing.lap("model")
        with InputBuffer(self.transport) as buffer:
            transform = await self._fill(buffer, data, spec, deadline, timing)
            timing.lap("decode")
            answer = await self._inferences.run(spec, buffer, deadline, request_id)
            timing.lap("infer")
        decode = partial(_decode, spec, answer.outputs, criteria, class_ids)
        found = await self.pool.run(decode, deadline) if spec.output_format.is_heavy else decode()
        boxes = transform.to_image(found.boxes)
        timing.lap("post")
        return Detections(boxes, found.scores, found.class_ids, transform.image_width, transform.image_height, spec, answer.version)

    async def ready(self, model: str, deadline: Deadline) -> ModelSpec:
        """Return a model's spec, and have slots for its images.

        Raises:
            GatewayError: There is no such model, or it cannot be asked.
        """
        spec = self.specs.known(model)
        if spec is not None and self.transport.is_prepared(spec.image_bytes):
            return spec
        try:
            async with asyncio.timeout(deadline.remaining):
                spec = await self.specs.get(model)
                await self.transport.prepare(spec.image_bytes)
        except TimeoutError as error:
            raise DeadlinePassed("Triton did not answer in time") from error
        except UnknownModel:
            if model in self.pullable:
                raise UnknownModel(f"{model} has not been pulled; run ./just pull {model}, then restart Triton") from None
            raise
        return spec

    async def _fill(
        self, buffer: InputBuffer, data: bytes, spec: ModelSpec, deadline: Deadline, timing: Timing
    ) -> LetterboxTransform:
        """Fill the input tensor, in a thread unless that takes next to no time."""

        def fill() -> LetterboxTransform:
            timing.lap("queue")
            return fill_input(data, spec, self.limits.max_pixels, buffer)

        if spec.input_format is InputFormat.FILE and is_quick(data):
            return fill()
        return await self.pool.run(fill, deadline, buffer.keep_for)


def _decode(spec: ModelSpec, outputs: dict[str, NDArray[Any]], criteria: Criteria, class_ids: frozenset[int] | None) -> Candidates:
    (found,) = decode_outputs(spec, outputs, images=1)
    return select(found, criteria, class_ids)
