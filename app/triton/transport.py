"""Choose how tensors reach Triton: through shared memory if available, else inline in the request."""

import asyncio
import math
from collections.abc import Coroutine
from time import monotonic
from typing import Any, Literal, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import TritonUnavailable
from app.resilience.lease import Lease
from app.resilience.single_flight import SingleFlight
from app.triton import shared_memory
from app.triton.regions import Regions
from app.triton.shared_memory import MAX_WORKER_BYTES, Arena, Slot, arena_bytes

_RETRY_SECONDS = 30.0
_IDLE_SECONDS = 60.0
# An arena makes room for another one sooner, but not so soon that sizes in turn would create one for each request.
_MIN_IDLE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 0.2  # of a request that a Triton could answer without an arena
_IMPATIENT_SECONDS = 2.0  # during which those after it do not wait at all

LOG = structlog.get_logger()

Mode = Literal["auto", "shm", "inline"]


class InputBuffer(NamedTuple):
    """The memory of one image's input tensor."""

    tensor: NDArray[Any]
    slot: Slot | None
    """Where it lies in shared memory; None if it has memory of its own."""


class Transport:
    """The arenas of one worker, one per size of input tensor in use.

    Each Triton on this host maps all of them. Tensors for the others lie there, too, and are sent inline.
    """

    def __init__(self, mode: Mode, *regions: Regions) -> None:
        """Start without arenas, for the Tritons that there are now; others may be attached."""
        self._mode = mode
        self.regions = list(regions)
        """Of the Tritons that may map the arenas."""
        self._arenas: dict[int, Arena] = {}
        """Arenas by the size of their slots, bytes."""
        self._nbytes = 0
        """Of all arenas, including those being created or removed."""
        self._creating: SingleFlight[None] = SingleFlight()
        self._tasks: set[asyncio.Task[None]] = set()
        """Arenas that are being removed or registered."""
        self._is_closing = False
        self._inline_until: dict[int, float] = {}
        """By size of slots: until when requests do not wait for an arena of this size, for want of room or of an answer."""

    @property
    def active_mode(self) -> Literal["shm", "inline"]:
        """How tensors reach Triton now; `shm` if any Triton gets them so."""
        return "shm" if any(map(self.maps_memory, self.regions)) else "inline"

    def maps_memory(self, regions: Regions) -> bool:
        """Return whether a Triton reads tensors in shared memory."""
        return any(arena in regions for arena in self._arenas.values())

    def reaches(self, regions: Regions) -> bool:
        """Return whether tensors may be sent to a Triton: in the mode `shm`, only if it reads shared memory."""
        return self._mode != "shm" or self.maps_memory(regions)

    def count_slots(self) -> tuple[int, int]:
        """Return how many slots of full size there are, and how many of them are in use; several small files use one."""
        arenas = self._arenas.items()
        in_use = sum(-(-arena.lent_bytes // slot_bytes) for slot_bytes, arena in arenas)
        return sum(arena.nbytes // slot_bytes for slot_bytes, arena in arenas), in_use

    async def sweep(self) -> None:
        """Remove what killed workers have left on this host; a Triton is told once it has mapped an arena of this worker."""
        swept = await asyncio.to_thread(shared_memory.sweep)
        if swept:
            LOG.info("removed arenas of killed workers", arenas=swept)

    def attach(self, regions: Regions) -> None:
        """Let one more Triton map the arenas, now and later."""
        self.regions.append(regions)
        self._map_everywhere()

    async def detach(self, regions: Regions) -> None:
        """Let a Triton unmap the arenas: it is not used any more."""
        self.regions.remove(regions)
        await asyncio.gather(*map(regions.remove, self._arenas.values()))

    def is_prepared(self, slot_bytes: int) -> bool:
        """Return whether `prepare` has nothing to do for this size."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None:
            return self._is_mapped(arena)
        goes_inline = self._mode == "inline" or not arena_bytes(slot_bytes) or monotonic() < self._inline_until.get(slot_bytes, 0.0)
        return goes_inline or not any(map(self._may_map, self.regions))

    async def prepare(self, slot_bytes: int) -> None:
        """Create slots for tensors of up to this size, if shared memory is available and within its budget.

        A Triton that hangs delays no request that another one could answer: the slots may exist only later then.
        """
        arena = self._arenas.get(slot_bytes)
        if arena is not None and not self._is_mapped(arena):
            del self._arenas[slot_bytes]
            for regions in self.regions:
                regions.note_unavailable("Triton was restarted and rejected it then")
            _ = self._start(self._remove(arena))
        if self.is_prepared(slot_bytes):
            return
        try:
            async with asyncio.timeout(self._patience()):
                await self._creating.run(slot_bytes, lambda: self._create(slot_bytes))
        except TimeoutError:
            self._inline_until[slot_bytes] = monotonic() + _IMPATIENT_SECONDS

    def take(self, slot_bytes: int, nbytes: int) -> Slot | None:
        """Take a slot, from any thread. None: the tensor has to be sent inline, because all slots are lent or Triton maps none.

        Args:
            slot_bytes: The size that was prepared.
            nbytes: Size of the tensor, which is no larger.

        Raises:
            TritonUnavailable: The mode is `shm`, but there is no such memory.
        """
        if (arena := self._arenas.get(slot_bytes)) is not None and self._is_mapped(arena):
            return arena.take(nbytes)
        self._require_inline()
        return None

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic], slot_bytes: int, lease: Lease) -> InputBuffer:
        """Allocate an input tensor, uninitialised; in a slot, if it fits into one and there is room. From any thread.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            slot_bytes: The size that was prepared.
            lease: The slot is given back with it.

        Raises:
            TritonUnavailable: As `take` says.
        """
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        slot = self.take(slot_bytes, nbytes) if nbytes <= slot_bytes else None
        if slot is None:
            return InputBuffer(np.empty(shape, dtype), None)
        lease.on_release(slot.free)
        return InputBuffer(slot.array(shape, dtype), slot)

    def find(self, regions: Regions, slot: Slot | None) -> Slot | None:
        """Return a slot if a Triton can read it. None: the tensor has to be sent inline to that one.

        Raises:
            TritonUnavailable: The mode is `shm`, and it cannot.
        """
        if slot is None or slot.arena in regions:
            return slot
        self._require_inline()
        return None

    def abandon(self, arena: Arena) -> None:
        """Lend no more slots of an arena: a connection broke, and Triton may still read those that were in use.

        Those that are lent stay where they are until they are given back: other Tritons may read them.
        """
        if arena in self._arenas.values():
            self._arenas = {slot_bytes: known for slot_bytes, known in self._arenas.items() if known is not arena}
            arena.retire()  # a thread may be about to take a slot of it
            _ = self._start(self._remove_unused(arena))

    async def refresh(self) -> None:
        """Remove the arenas that have not been used for a minute, except the one used last; to be called regularly.

        The others are registered with the Tritons that have not mapped them yet.
        """
        for slot_bytes in self._by_last_use()[:-1]:
            await self._retire(slot_bytes, _IDLE_SECONDS)
        self._map_everywhere()

    async def close(self) -> None:
        """Remove the arenas, here and in Triton."""
        self._is_closing = True
        await self._creating.wait()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*map(self._remove, self._arenas.values()))
        self._arenas.clear()

    def _is_mapped(self, arena: Arena) -> bool:
        """Return whether any Triton reads it."""
        return any(arena in regions for regions in self.regions)

    def _may_map(self, regions: Regions) -> bool:
        """Return whether to let a Triton map an arena; one alone is asked again at once, because no other can answer a request."""
        return regions.is_available and (len(self.regions) == 1 or monotonic() >= regions.silent_until)

    def _patience(self) -> float | None:
        """Return how long a request waits for an arena, seconds; None: as long as it takes, because nothing answers it without."""
        if self._mode == "shm" or len(self.regions) == 1:
            return None
        return 0.0 if any(regions.silent_until for regions in self.regions) else _PATIENCE_SECONDS

    def _require_inline(self) -> None:
        """Raise an error where the settings allow no tensors inline for want of shared memory."""
        if self._mode == "shm":
            raise TritonUnavailable("shared memory is required by the settings, but is not available")

    def _map_everywhere(self) -> None:
        """Register the arenas with the Tritons that have not mapped them, if they may."""
        for regions in self.regions:
            for arena in self._arenas.values():
                if arena not in regions and self._may_map(regions) and not self._is_closing:
                    _ = self._start(self._map(regions, arena))

    async def _map(self, regions: Regions, arena: Arena) -> None:
        if arena in self._arenas.values():  # still
            await regions.add(arena)

    async def _create(self, slot_bytes: int) -> None:
        """Create and register an arena; it may take the place of others that are idle."""
        nbytes = arena_bytes(slot_bytes)
        for other in self._by_last_use():
            if self._nbytes + nbytes > MAX_WORKER_BYTES:
                await self._retire(other, _MIN_IDLE_SECONDS)
        if self._nbytes + nbytes > MAX_WORKER_BYTES:
            self._inline_until[slot_bytes] = monotonic() + _MIN_IDLE_SECONDS
            return
        self._nbytes += nbytes
        try:
            arena = await asyncio.to_thread(Arena, nbytes)
        except OSError as error:
            self._nbytes -= nbytes
            LOG.warning("no shared memory for tensors of this size; sending them inline", nbytes=slot_bytes, reason=str(error))
            self._inline_until[slot_bytes] = monotonic() + _RETRY_SECONDS
            return
        adding = {self._start(regions.add(arena)) for regions in self.regions if self._may_map(regions)}
        while adding and not self._is_mapped(arena):  # one is enough to begin with
            _, adding = await asyncio.wait(adding, return_when=asyncio.FIRST_COMPLETED)
        if self._is_mapped(arena):
            self._arenas[slot_bytes] = arena
        else:
            _ = self._start(self._remove(arena))

    def _by_last_use(self) -> list[int]:
        """Return the sizes of the arenas, that of the least recently used one first."""
        return sorted(self._arenas, key=lambda slot_bytes: self._arenas[slot_bytes].used_at)

    async def _retire(self, slot_bytes: int, idle_seconds: float) -> None:
        """Remove an arena if it has not been used for so long and no slot of it is lent."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None and monotonic() - arena.used_at >= idle_seconds and arena.retire_unused():
            del self._arenas[slot_bytes]
            await self._remove(arena)

    async def _remove_unused(self, arena: Arena) -> None:
        """Remove an arena once no slot of it is lent."""
        while arena.lent_bytes and not self._is_closing:  # noqa: ASYNC110 - they are given back in threads, too
            await asyncio.sleep(_POLL_SECONDS)
        await self._remove(arena)

    async def _remove(self, arena: Arena) -> None:
        try:
            await asyncio.gather(*(regions.remove(arena) for regions in self.regions))
        finally:  # last, so that after a crash in between a sweep still finds it
            arena.close()
            self._nbytes -= arena.nbytes

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
