"""Images that wait for a call of their model, and the choice of those that go together."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple

from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.resilience.model_queue import Permit
from app.telemetry.trace_context import TraceContext
from app.triton.messages import InferResult
from app.triton.shared_memory import Arena, Slot
from app.triton.transport import InputBuffer

# A message is copied, while the event loop waits.
_MAX_INLINE_BYTES = 8 << 20


class PendingImage:
    """One image, in its input tensor, from when it is ready until its request has the result or has left."""

    def __init__(self, spec: ModelSpec, buffer: InputBuffer, call: CallContext, permit: Permit) -> None:
        self.spec = spec
        self.buffer = buffer
        self.call = call
        self.permit = permit
        """Kept until nothing reads the tensor any more."""
        self.result: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
        """Also done, without a result, when the request has left."""
        self.ready_at = monotonic()
        """When it began to wait, as `time.monotonic` counts."""
        self.goes_alone = False
        """Whether a batch with this image has failed."""


class Batch(NamedTuple):
    """Images that go to Triton in one call."""

    images: Sequence[PendingImage]
    slot: Slot | None
    """Slot of the first image, if the tensors of the others lie right behind it; None if all have to travel inline."""

    @property
    def spec(self) -> ModelSpec:
        """Spec of their model."""
        return self.images[0].spec

    @property
    def tensors(self) -> list[NDArray[Any]]:
        """Their input tensors."""
        return [image.buffer.tensor for image in self.images]

    @property
    def remaining_seconds(self) -> float:
        """Time until the last deadline."""
        return max(image.call.deadline.remaining for image in self.images)

    @property
    def request_id(self) -> str:
        """Ids of the requests, separated by commas."""
        return ",".join([image.call.request_id for image in self.images])

    @property
    def trace(self) -> TraceContext | None:
        """Span of the first request that has one: a call can belong to one span."""
        return next((image.call.trace for image in self.images if image.call.trace is not None), None)

    @property
    def is_pinned(self) -> bool:
        """Whether a request needs the version of the spec."""
        return any(image.call.is_pinned for image in self.images)

    @property
    def is_abandoned(self) -> bool:
        """Whether no request waits for its result any more."""
        return all(image.result.done() for image in self.images)


def next_batch(waiting: Sequence[PendingImage], max_images: int, is_mapped: Callable[[Arena], bool]) -> Batch:
    """Choose what leaves next: the image that has waited longest, and others whose tensors can go with it.

    Args:
        waiting: In order of arrival; at least one.
        max_images: How many images a batch may have.
        is_mapped: Tells whether the Triton that gets the batch has mapped an arena.
    """
    oldest = waiting[0]
    slot = oldest.buffer.slot
    if max_images == 1 or oldest.goes_alone:
        return Batch([oldest], slot)
    others = [image for image in waiting if image.spec is oldest.spec and not image.goes_alone]
    if slot is not None and is_mapped(slot.arena):
        run = _run_around(oldest, slot, others, max_images)
        return Batch(run, run[0].buffer.slot)
    inline = [image for image in others if (own := image.buffer.slot) is None or not is_mapped(own.arena)]
    inline = _fit(inline[:max_images])
    return Batch(inline, slot if len(inline) == 1 else None)


def _run_around(oldest: PendingImage, slot: Slot, others: Sequence[PendingImage], max_images: int) -> list[PendingImage]:
    """Return the images whose slots follow the oldest one's, then those whose slots lie before it."""
    slots = [(image.buffer.slot, image) for image in others]
    in_arena = [(other, image) for other, image in slots if other is not None and other.arena is slot.arena]
    behind = {other.offset: (other.end, image) for other, image in in_arena}
    before = {other.end: (other.offset, image) for other, image in in_arena}
    run = [oldest]
    begin, end = slot.offset, slot.end
    while len(run) < max_images and end in behind:
        end, image = behind[end]
        run.append(image)
    while len(run) < max_images and begin in before:
        begin, image = before[begin]
        run.insert(0, image)
    return run


def _fit(images: list[PendingImage]) -> list[PendingImage]:
    """Return the first of these images, as many as one message should have."""
    sizes = accumulate(image.buffer.tensor.nbytes for image in images)
    return images[: max(1, sum(size <= _MAX_INLINE_BYTES for size in sizes))]
