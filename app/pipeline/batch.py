"""Images that wait for inference, and the selection of images for the next call to Triton."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import monotonic
from typing import NamedTuple

from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.resilience.fairness import HIGH, NORMAL
from app.resilience.model_queue import Permit
from app.telemetry.trace_context import TraceContext
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall
from app.triton.shared_memory import Arena, Slot
from app.triton.transport import InputBuffer

LATE = "the model did not answer in time"
# Sending tensors in a message copies them, which blocks the event loop.
_MAX_INLINE_BYTES = 8 << 20


class PendingImage:
    """An image in its input tensor, from the end of decoding until its request has the result or has left."""

    def __init__(self, spec: ModelSpec, buffer: InputBuffer, call: CallContext, permit: Permit) -> None:
        self.spec = spec
        self.buffer = buffer
        self.call = call
        self.permit = permit
        """Released when nothing reads the tensor any more."""
        self.result: asyncio.Future[InferResult] = asyncio.get_running_loop().create_future()
        """Done without a result if the request has left."""
        self.ready_at = monotonic()
        """Start of the wait, `time.monotonic`."""
        self.turn = call.turn(1.0)
        self.flow = call.caller.priority, None if call.is_batch else call.caller.name
        """Priority and caller, of whose images under way there is a number; all batches are one caller."""
        self.goes_alone = False
        """Whether the image must not share a call, because a batch with it has failed."""


class Batch(NamedTuple):
    """Images for one call to Triton."""

    images: Sequence[PendingImage]
    slot: Slot | None
    """Slot of the first image, directly followed by the tensors of the others; None if the tensors must be sent inline."""
    spec: ModelSpec
    """Spec of the model."""
    is_urgent: bool
    """Whether its caller has waited for others."""

    @property
    def priority(self) -> int:
        """Priority in Triton's queue: 1 is the highest, 0 the model's default, also for a model without priority levels."""
        own, levels = self.images[0].turn.caller.priority, self.spec.priority_levels
        if own > NORMAL:
            return levels
        has_levels = levels > 0 or self.spec.backend == "ensemble"  # its steps may have some, which its config does not say
        return int(has_levels and (self.is_urgent or own == HIGH))

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the latest deadline."""
        return max([image.call.deadline.at for image in self.images]) - monotonic()

    @property
    def request_id(self) -> str:
        """Request ids, separated by commas."""
        return ",".join([image.call.request_id for image in self.images])

    @property
    def trace(self) -> TraceContext | None:
        """Span of the first request that has one; a call can only belong to one span."""
        return next((image.call.trace for image in self.images if image.call.trace is not None), None)

    @property
    def is_pinned(self) -> bool:
        """Whether any request requires the version of the spec."""
        return any(image.call.is_pinned for image in self.images)

    @property
    def is_abandoned(self) -> bool:
        """Whether all requests have left."""
        return all(image.result.done() for image in self.images)


class Call(NamedTuple):
    """A call under way."""

    batch: Batch
    task: asyncio.Task[list[InferResult]]
    in_flight: InFlightCall


def next_images(
    waiting: Sequence[PendingImage], max_images: int, is_mapped: Callable[[Arena], bool]
) -> tuple[list[PendingImage], Slot | None]:
    """Select the first image, and others for the same call, and the slot of a `Batch`.

    `is_mapped` returns whether the called Triton has mapped an arena.
    """
    first = waiting[0]
    slot = first.buffer.slot
    if max_images == 1 or len(waiting) == 1 or first.goes_alone:
        return [first], slot
    others = [image for image in waiting if image.spec is first.spec and not image.goes_alone]
    if first.spec.is_sized_by_image:
        others = [image for image in others if image.buffer.tensor.shape == first.buffer.tensor.shape]
    if slot is not None and is_mapped(slot.arena):
        run = _run_around(first, slot, others, max_images)
        return run, run[0].buffer.slot
    inline = [image for image in others if (own := image.buffer.slot) is None or not is_mapped(own.arena)]
    inline = _fit(inline[:max_images])
    return inline, slot if len(inline) == 1 else None


def _run_around(first: PendingImage, slot: Slot, others: Sequence[PendingImage], max_images: int) -> list[PendingImage]:
    """Return a contiguous run of slots around that of the first image; slots behind it are preferred."""
    slots = [(image.buffer.slot, image) for image in others]
    in_arena = [(other, image) for other, image in slots if other is not None and other.arena is slot.arena]
    behind = {other.offset: (other.end, image) for other, image in in_arena}
    before = {other.end: (other.offset, image) for other, image in in_arena}
    run = [first]
    begin, end = slot.offset, slot.end
    while len(run) < max_images and end in behind:
        end, image = behind[end]
        run.append(image)
    while len(run) < max_images and begin in before:
        begin, image = before[begin]
        run.insert(0, image)
    return run


def _fit(images: list[PendingImage]) -> list[PendingImage]:
    sizes = accumulate(image.buffer.tensor.nbytes for image in images)
    return images[: max(1, sum(size <= _MAX_INLINE_BYTES for size in sizes))]
