"""Admission of requests: how many bodies may be received, and how many requests may be in progress, on the whole host.

A request that cannot be admitted is rejected, so that those that are admitted finish within their deadline. It waits only
if its turn is about to come, or if very many are rejected.
"""

import asyncio
from collections import Counter
from typing import NamedTuple

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.memory import JointReservation, MemoryBudget, Reservation
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.pacer import Pacer
from app.resilience.uploads import AnonymousUploads, Upload
from app.resilience.worker_table import WorkerTable

# Fewer would let a fast model wait for requests.
_MAX_REQUESTS = 128
# Of the memory for images: what batches bring with them must leave room to decode images, and for single requests.
_BATCH_PART = 0.5
# Of one worker, before a body is received: less than a third of a core.
_REJECTIONS_PER_SECOND = 300


class Capacity(NamedTuple):
    """What the requests of a host may use."""

    max_uploads: int
    """Requests whose body is being received."""
    upload_bytes: int
    """Bytes of bodies that are being received."""
    memory_bytes: int
    """Bytes of images in progress, encoded and decoded."""
    max_requests: int
    """Requests in progress per model, at the most; 0: 128, or two full batches per instance if that is more."""
    target_seconds: float
    """How long a request may take when the gateway is full."""
    decode_threads: int
    """Threads of all workers that can decode at the same time."""
    anonymous_bytes: int
    """Bytes of bodies of which nobody knows yet who sends them."""


class Share(NamedTuple):
    """A part of a model's limit of requests in progress."""

    key: str
    """The API key that it is reserved for; empty for what all other requests use."""
    fraction: float


WHOLE = Share("", 1.0)
"""The whole limit, if nothing is reserved."""


class Admission:
    """Admits the requests of one worker, in view of those of all workers of the host."""

    def __init__(self, table: WorkerTable, capacity: Capacity) -> None:
        """Admit within a capacity, counting in a table."""
        self.memory = MemoryBudget(table, "memory", capacity.memory_bytes)
        self.decode_backlog = DecodeBacklog(table, capacity.decode_threads)
        self._table = table
        self._capacity = capacity
        self._uploads = table.column("uploads")
        self.upload_memory = MemoryBudget(table, "upload memory", capacity.upload_bytes)
        self.anonymous_uploads = AnonymousUploads(table, capacity.anonymous_bytes)
        self.queues: dict[str, ModelQueue] = {}
        """By model."""
        self.batch_memory = MemoryBudget(table, "batch memory", int(capacity.memory_bytes * _BATCH_PART))
        """The part of the memory that the encoded images of batches may take."""
        self._batch_queues: dict[tuple[str, str], BatchQueue] = {}
        """By model and API key."""
        self._rejections = Pacer(_REJECTIONS_PER_SECOND)

    async def check(self, model: str, share: Share = WHOLE, *, is_batch: bool = False) -> None:
        """Reject a request for a model early, before its body is received.

        Clients that come back at once, and are rejected again, would take the CPU from the requests that were admitted:
        if there are many of them, each waits for its rejection, or until there is room.

        Raises:
            GatewayFull: It would not be admitted now.
        """
        try:
            self._check(model, share, is_batch=is_batch)
        except GatewayFull:
            seconds = self._rejections.wait()
            if not seconds:
                raise
            await asyncio.sleep(seconds)
            self._check(model, share, is_batch=is_batch)

    def start_upload(self) -> Upload:
        """Count a request whose body is about to be received."""
        return Upload(self.upload_memory, self._table, self._uploads)

    async def admit(
        self, model: str, parallel_images: int, memory: Reservation, deadline: Deadline, share: Share = WHOLE
    ) -> Permit:
        """Admit a request whose body is complete.

        Args:
            model: The model, which exists.
            parallel_images: How many images the model processes at a time.
            memory: What the request has reserved; if it is admitted, it is given back with the permit.
            deadline: When the request must have its answer.
            share: The part of the limit that it may use.

        Raises:
            GatewayFull: It would not have its answer in time, or something is used up.
        """
        permit = await self._queue(model, parallel_images).admit(*share, deadline)
        permit.on_release(memory.release)
        return permit

    def batch_queue(self, model: str, parallel_images: int, share: Share = WHOLE) -> BatchQueue:
        """Return where the images of batches wait for their turn; arguments as `admit`."""
        batches = self._batch_queues.get((model, share.key))
        if batches is None:
            queue = self._queue(model, parallel_images)
            batches = self._batch_queues[model, share.key] = BatchQueue(self._table, queue, model, share.key)
        batches.fraction = share.fraction
        return batches

    def reserve_for_batch(self, purpose: str) -> JointReservation:
        """Return a reservation of no bytes for encoded images of a batch, whose purpose errors name."""
        return JointReservation((self.batch_memory, self.memory), purpose)

    def waiting_batch_images(self) -> Counter[str]:
        """Count the images of batches that wait for their turn in this worker, by model."""
        waiting: Counter[str] = Counter()
        for (model, _), batches in self._batch_queues.items():
            waiting[model] += batches.waiting
        return waiting

    @property
    def own_bytes(self) -> int:
        """Bytes of bodies and images in use by this worker."""
        return self.memory.own_bytes + self.upload_memory.own_bytes + self.anonymous_uploads.memory.own_bytes

    def limits(self) -> dict[str, int]:
        """Return how many requests may be in progress now, by model."""
        return {model: int(queue.limit) for model, queue in self.queues.items()}

    def refresh(self) -> None:
        """Keep the limits up to date; to be called about once a second."""
        self._table.refresh()
        for queue in self.queues.values():
            queue.refresh()

    def _queue(self, model: str, parallel_images: int) -> ModelQueue:
        queue = self.queues.get(model)
        if queue is None:
            ceiling = self._capacity.max_requests or max(_MAX_REQUESTS, 2 * parallel_images)
            queue = self.queues[model] = ModelQueue(self._table, model, ceiling, self._capacity.target_seconds)
        return queue

    def _check(self, model: str, share: Share, *, is_batch: bool) -> None:
        if self._table.total(self._uploads) >= self._capacity.max_uploads:
            raise GatewayFull("too many request bodies are being received", "uploads")
        if self.upload_memory.is_full or self.memory.is_full or (is_batch and self.batch_memory.is_full):
            raise GatewayFull("the memory for images is in use", "memory")
        queue = self.queues.get(model)
        if queue is not None:
            queue.check(*share, self._table.own(self._uploads))
        batches = self._batch_queues.get((model, share.key)) if is_batch else None
        if batches is not None:
            batches.check(1, 2 * self._capacity.target_seconds)
