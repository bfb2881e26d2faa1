"""Admission of requests: limits how many bodies are received and how many requests are in progress on the whole host.

Excess requests are rejected, so that the admitted ones finish within their deadline. A request waits only if its turn is about
to come. Each caller may use a part of every resource that depends on what the others use.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import DecodeBacklog
from app.resilience.fairness import ANYBODY, Caller, CallerCounts
from app.resilience.memory import MemoryBudget, Reservation
from app.resilience.model_queue import Permit
from app.resilience.streams import StreamQueue
from app.resilience.uploads import AnonymousUploads, Upload
from app.resilience.worker_table import WorkerTable

# With fewer, a fast model would run idle.
_MAX_REQUESTS = 128
# Fraction of the memory for images that encoded images of batches may use. The rest is for decoding and single requests.
_BATCH_PART = 0.5


class Capacity(NamedTuple):
    """Limits for the requests of a host."""

    max_uploads: int
    """Maximum number of requests whose body is being received."""
    upload_bytes: int
    """Maximum size of all bodies being received, in bytes."""
    memory_bytes: int
    """Maximum size of the images in progress, encoded and decoded, in bytes."""
    max_requests: int
    """Maximum number of requests in progress per model; 0 means 128, or two full batches per instance if that is more."""
    target_seconds: float
    """Target duration of a request while the gateway is full."""
    decode_threads: int
    """Number of threads, in all workers, that can decode at the same time."""
    anonymous_bytes: int
    """Maximum size of all anonymous bodies being received, in bytes."""


class Admission:
    """Admits the requests of one worker, taking all workers of the host into account."""

    def __init__(self, table: WorkerTable, capacity: Capacity, is_silent: Callable[[str], bool] = lambda _: False) -> None:
        """Admit requests up to the capacity of the host; `is_silent` tells whether a model has stopped to answer anything."""
        self._is_silent = is_silent
        self.memory = MemoryBudget(table, "memory", capacity.memory_bytes)
        self.decode_backlog = DecodeBacklog(table, capacity.decode_threads)
        self._table = table
        self._capacity = capacity
        self._uploads = CallerCounts(table, "uploads", capacity.max_uploads)
        self.upload_memory = MemoryBudget(table, "upload memory", capacity.upload_bytes)
        self.anonymous_uploads = AnonymousUploads(table, capacity.anonymous_bytes)
        self.queues: dict[str, StreamQueue] = {}
        """Queues by name of the model."""
        self.batch_memory = MemoryBudget(table, "batch memory", int(capacity.memory_bytes * _BATCH_PART))
        self._batch_queues: dict[tuple[str, str], BatchQueue] = {}
        """Batch queues by name of the model and caller."""

    def check(self, model: str, caller: Caller = ANYBODY, *, is_batch: bool = False, is_frame: bool = False) -> None:
        """Reject a request before its body is received, as `ModelQueue.check`; a frame of a stream waits for its model."""
        if not self._uploads.has_room(caller, 1):
            raise GatewayFull("too many request bodies are being received", "uploads")
        for budget in (self.upload_memory, self.memory, *((self.batch_memory,) if is_batch else ())):
            if not budget.has_room(caller, 1):
                raise GatewayFull("the memory for images is in use", "memory")
        queue = self.queues.get(model)
        if queue is not None and not is_frame:
            queue.check(caller, self._uploads.of_in_worker(caller))
        batches = self._batch_queues.get((model, caller.name)) if is_batch else None
        if batches is not None:
            batches.check(1, 2 * self._capacity.target_seconds)

    def start_upload(self, caller: Caller) -> Upload:
        """Count a request whose body is about to be received."""
        self._uploads.add(caller, 1)
        upload = Upload(self.upload_memory.reserve(caller))
        upload.on_release(partial(self._uploads.add, caller, -1))
        return upload

    async def admit(  # noqa: PLR0913 - the parts of a request
        self,
        model: str,
        parallel_images: int,
        memory: Reservation,
        deadline: Deadline,
        caller: Caller = ANYBODY,
        *,
        is_later_step: bool = False,
    ) -> Permit:
        """Admit a request for an existing model, whose body is complete, or a later step of one. The permit gets its memory."""
        queue = self.queue(model, parallel_images)
        permit = await (queue.admit_later_step if is_later_step else queue.admit)(caller, deadline)
        memory.move_to(permit)
        return permit

    def batch_queue(self, model: str, parallel_images: int, caller: Caller = ANYBODY) -> BatchQueue:
        """Return the queue in which a caller's images of batches wait for their turn; arguments as for `admit`."""
        batches = self._batch_queues.get((model, caller.name))
        if batches is None or batches.caller != caller:  # new, or the shares have changed
            queue = self.queue(model, parallel_images)
            batches = self._batch_queues[model, caller.name] = BatchQueue(queue, caller)
        return batches

    def reserve_for_batch(self, caller: Caller, purpose: str) -> Reservation:
        """Return an empty reservation for encoded images of a caller's batch; `purpose` appears in errors."""
        return Reservation(purpose, caller, self.batch_memory, self.memory)

    def waiting_batch_images(self) -> Counter[str]:
        """Count the waiting images of batches in this worker, by model."""
        waiting: Counter[str] = Counter()
        for (model, _), batches in self._batch_queues.items():
            waiting[model] += batches.waiting
        return waiting

    def is_half_free(self) -> bool:
        """Return whether requests use less than half of the memory for images, and of the places at each model."""
        is_quiet = all(2 * queue.in_progress < queue.limit for queue in self.queues.values())
        return is_quiet and 2 * self.memory.used_bytes <= self.memory.limit_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of bodies and images in use by this worker."""
        return self.memory.own_bytes + self.upload_memory.own_bytes + self.anonymous_uploads.memory.own_bytes

    def limit(self, model: str, parallel_images: int) -> int:
        """Return the current limit of requests in progress at a model; arguments as for `admit`."""
        return int(self.queue(model, parallel_images).limit)

    def limits(self) -> dict[str, int]:
        """Return the current limit of requests in progress, by model."""
        return {model: int(queue.limit) for model, queue in self.queues.items()}

    def refresh(self) -> None:
        """Update the limits; call this about once a second."""
        self._table.refresh()
        for queue in self.queues.values():
            queue.refresh()

    def queue(self, model: str, parallel_images: int) -> StreamQueue:
        """Return the queue of a model; arguments as for `admit`."""
        queue = self.queues.get(model)
        if queue is None:
            ceiling = self._capacity.max_requests or max(_MAX_REQUESTS, 2 * parallel_images)
            queue = self.queues[model] = StreamQueue(
                self._table, model, ceiling, self._capacity.target_seconds, partial(self._is_silent, model)
            )
        return queue
