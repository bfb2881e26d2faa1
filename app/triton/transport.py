"""Choose how tensors reach Triton: through shared memory if available, else inline in the request."""

import asyncio
import math
from collections.abc import Coroutine
from functools import partial
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
# Another arena may replace an idle one sooner, but alternating sizes must not create an arena for each request.
_MIN_IDLE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 0.2  # wait for an arena if another Triton can answer the request without it
_IMPATIENT_SECONDS = 2.0  # after such a time-out, requests do not wait at all

LOG = structlog.get_logger()

Mode = Literal["auto", "shm", "inline"]


class InputBuffer(NamedTuple):
    """The input tensor of one image."""

    tensor: NDArray[Any]
    slot: Slot | None


class Transport:
    """The arenas of one worker, one per size of input tensor in use; each Triton on this host maps all of them."""

    def __init__(self, mode: Mode, *regions: Regions) -> None:
        self._mode = mode
        self.regions = list(regions)
        """One per Triton in use."""
        self._arenas: dict[int, Arena] = {}
        """Arenas by the size of their slots, bytes."""
        self._nbytes = 0
        """Total size of all arenas, including those being created or removed."""
        self._creating: SingleFlight[None] = SingleFlight()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._inline_until: dict[int, float] = {}
        """By size of slots: until when no arena is created, because there was no room or Triton did not answer."""

    def maps_memory(self, regions: Regions) -> bool:
        """Return whether a Triton has mapped any arena."""
        return any(arena in regions.mapped for arena in self._arenas.values())

    def reaches(self, regions: Regions) -> bool:
        """Return whether tensors may be sent to a Triton: in the mode `shm`, only if it has mapped an arena."""
        return self._mode != "shm" or self.maps_memory(regions)

    def count_slots(self) -> tuple[int, int]:
        """Return the number of full-size slots, and how many of them are in use; several small files count as one slot."""
        arenas = self._arenas.items()
        in_use = sum(-(-arena.lent_bytes // slot_bytes) for slot_bytes, arena in arenas)
        return sum(arena.nbytes // slot_bytes for slot_bytes, arena in arenas), in_use

    async def sweep(self) -> None:
        """Remove the arenas of killed workers on this host. `Regions` lets Triton unmap them later."""
        swept = await asyncio.to_thread(shared_memory.sweep)
        if swept:
            LOG.info("removed arenas of killed workers", arenas=swept)

    def attach(self, regions: Regions) -> None:
        """Let another Triton map all present and future arenas."""
        self.regions.append(regions)
        self._map_everywhere()

    async def detach(self, regions: Regions) -> None:
        """Let a Triton that is not used any more unmap the arenas, including abandoned ones."""
        self.regions.remove(regions)
        await regions.remove_all()

    def is_prepared(self, slot_bytes: int) -> bool:
        """Return whether `prepare` has nothing to do for this size."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None:
            return self._is_mapped(arena)
        goes_inline = self._mode == "inline" or not arena_bytes(slot_bytes) or monotonic() < self._inline_until.get(slot_bytes, 0.0)
        return goes_inline or not any(map(self._may_map, self.regions))

    async def prepare(self, slot_bytes: int) -> None:
        """Create slots for tensors of up to this size, if shared memory is available and within its budget.

        Requests that another Triton can answer do not wait for one that hangs. The slots may then be created later.
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
        """Take a slot for a tensor; None to send it inline, which the mode `shm` forbids. May be called from any thread."""
        if (arena := self._arenas.get(slot_bytes)) is not None and self._is_mapped(arena):
            return arena.take(nbytes)
        self._require_inline()
        return None

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic], slot_bytes: int, lease: Lease) -> InputBuffer:
        """Allocate an uninitialised input tensor, as `take` if possible in a slot, which the lease then gives back."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        slot = self.take(slot_bytes, nbytes) if nbytes <= slot_bytes else None
        if slot is None:
            return InputBuffer(np.empty(shape, dtype), None)
        lease.on_release(partial(slot.arena.give_back, slot))
        return InputBuffer(slot.array(shape, dtype), slot)

    def find(self, regions: Regions, slot: Slot | None) -> Slot | None:
        """Return the slot if a Triton can read it; None if the tensor must be sent inline, which the mode `shm` forbids."""
        if slot is None or slot.arena in regions.mapped:
            return slot
        self._require_inline()
        return None

    def abandon(self, arena: Arena) -> None:
        """Lend no more slots of an arena, because a Triton did not end a call and may still read the slots in use.

        The arena is removed when all slots have been given back, because other Tritons may read them until then.
        """
        if arena in self._arenas.values():
            self._arenas = {slot_bytes: known for slot_bytes, known in self._arenas.items() if known is not arena}
            arena.retire()  # a thread may be about to take a slot
            _ = self._start(self._remove_unused(arena))

    async def refresh(self) -> None:
        """Remove arenas that were not used for a minute, except the last used one; register the others. To be called regularly."""
        for slot_bytes in self._by_last_use()[:-1]:
            await self._retire(slot_bytes, _IDLE_SECONDS)
        self._map_everywhere()

    async def close(self) -> None:
        """Unregister and remove all arenas."""
        self._is_closing = True
        await self._creating.wait()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*map(self._remove, self._arenas.values()))
        self._arenas.clear()

    def _is_mapped(self, arena: Arena) -> bool:
        for regions in self.regions:  # noqa: SIM110 - `any` takes three times as long, and each request asks twice
            if arena in regions.mapped:
                return True
        return False

    def _may_map(self, regions: Regions) -> bool:
        """Return whether to ask a Triton to map an arena. A single Triton that did not answer is asked again without a delay."""
        now = monotonic()
        return now >= regions.unavailable_until and (len(self.regions) == 1 or now >= regions.silent_until)

    def _patience(self) -> float | None:
        """Return how many seconds a request waits for an arena; None for no limit, if nothing else can answer it."""
        if self._mode == "shm" or len(self.regions) == 1:
            return None
        return 0.0 if any(regions.silent_until for regions in self.regions) else _PATIENCE_SECONDS

    def _require_inline(self) -> None:
        if self._mode == "shm":
            raise TritonUnavailable("shared memory is required by the settings, but is not available")

    def _map_everywhere(self) -> None:
        for regions in self.regions:
            for arena in self._arenas.values():
                if arena not in regions.mapped and self._may_map(regions) and not self._is_closing:
                    _ = self._start(self._map(regions, arena))

    async def _map(self, regions: Regions, arena: Arena) -> None:
        if arena in self._arenas.values():  # it was not removed meanwhile
            await regions.add(arena)

    async def _create(self, slot_bytes: int) -> None:
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
        while adding and not self._is_mapped(arena):  # one Triton is enough
            _, adding = await asyncio.wait(adding, return_when=asyncio.FIRST_COMPLETED)
        if self._is_mapped(arena):
            self._arenas[slot_bytes] = arena
        else:
            _ = self._start(self._remove(arena))

    def _by_last_use(self) -> list[int]:
        return sorted(self._arenas, key=lambda slot_bytes: self._arenas[slot_bytes].used_at)

    async def _retire(self, slot_bytes: int, idle_seconds: float) -> None:
        arena = self._arenas.get(slot_bytes)
        if arena is not None and monotonic() - arena.used_at >= idle_seconds and arena.retire(only_unused=True):
            del self._arenas[slot_bytes]
            await self._remove(arena)

    async def _remove_unused(self, arena: Arena) -> None:
        while arena.lent_bytes and not self._is_closing:  # noqa: ASYNC110 - threads also give slots back
            await asyncio.sleep(_POLL_SECONDS)
        await self._remove(arena)

    async def _remove(self, arena: Arena) -> None:
        try:
            await asyncio.gather(*(regions.remove(arena) for regions in self.regions))
        finally:  # last, so that `sweep` finds the file after a crash
            arena.close()
            self._nbytes -= arena.nbytes

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
