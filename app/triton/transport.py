"""Choose how tensors reach Triton: through shared memory if available, else inline in the request."""

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Literal

import structlog

from app.errors import GatewayError, TritonUnavailable
from app.resilience.single_flight import SingleFlight
from app.triton import shared_memory
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena, Slot

SLOTS = 32
"""Images that an arena has room for, at most. If a worker handles more at a time, the tensors of the others are sent inline."""
MAX_ARENA_BYTES = 128 << 20
MAX_WORKER_BYTES = 256 << 20
"""All arenas of a worker together."""
_RETRY_SECONDS = 30.0
_IDLE_SECONDS = 60.0
# An arena makes room for another one sooner, but not so soon that sizes in turn would create one for each request.
_MIN_IDLE_SECONDS = 5.0

LOG = structlog.get_logger()

Mode = Literal["auto", "shm", "inline"]


class Transport:
    """The arenas of one worker, one per size of input tensor in use, and which of them its Triton has mapped."""

    def __init__(self, client: TritonClient, mode: Mode) -> None:
        self._client = client
        self._mode = mode
        self._arenas: dict[int, Arena] = {}
        """Arenas by the size of their slots, bytes."""
        self._registered: set[str] = set()
        """Names of the arenas that this Triton has mapped."""
        self._nbytes = 0
        """Of all arenas, including those being created or removed."""
        self._creating: SingleFlight[None] = SingleFlight()
        self._removing: set[asyncio.Task[None]] = set()
        self._unavailable_until = 0.0
        self._no_room_until: dict[int, float] = {}
        """By size of slots: until when there is known to be no room for an arena of this size."""
        self._is_swept = False
        """Whether Triton has been told to unmap what killed workers have left."""

    @property
    def active_mode(self) -> Literal["shm", "inline"]:
        """How tensors reach Triton now."""
        return "shm" if self._registered else "inline"

    def count_slots(self) -> tuple[int, int]:
        """Return how many slots of full size there are, and how many of them are in use; several small files use one."""
        arenas = self._arenas.items()
        in_use = sum(-(-arena.lent_bytes // slot_bytes) for slot_bytes, arena in arenas)
        return sum(arena.nbytes // slot_bytes for slot_bytes, arena in arenas), in_use

    async def sweep(self) -> None:
        """Remove what killed workers have left on this host; Triton is told once it has mapped an arena of this worker."""
        swept = await asyncio.to_thread(shared_memory.sweep)
        if swept:
            LOG.info("removed arenas of killed workers", arenas=swept)

    def is_prepared(self, slot_bytes: int) -> bool:
        """Return whether `prepare` has nothing to do for this size."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None:
            return arena.region in self._registered
        if self._mode == "inline" or not _count_slots(slot_bytes):
            return True
        return monotonic() < max(self._unavailable_until, self._no_room_until.get(slot_bytes, 0.0))

    async def prepare(self, slot_bytes: int) -> None:
        """Create slots for tensors of up to this size, if shared memory is available and within its budget."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None and arena.region not in self._registered:
            del self._arenas[slot_bytes]
            self._note_unavailable("Triton was restarted and rejected it then")
            await self._remove(arena)
        if not self.is_prepared(slot_bytes):
            await self._creating.run(slot_bytes, lambda: self._create(slot_bytes))

    def take(self, slot_bytes: int, nbytes: int) -> Slot | None:
        """Take a slot, from any thread. None: the tensor has to be sent inline.

        Args:
            slot_bytes: The size that was prepared.
            nbytes: Size of the tensor, which is no larger.

        Raises:
            TritonUnavailable: The mode is `shm`, but no slot is available.
        """
        arena = self._arenas.get(slot_bytes)
        slot = arena.take(nbytes) if arena is not None and arena.region in self._registered else None
        if slot is None and self._mode == "shm":
            raise TritonUnavailable("shared memory is required by the settings, but no slot is available")
        return slot

    async def register_again(self, arena: Arena) -> bool:
        """Let Triton map an arena that it has forgotten.

        Returns:
            Whether it did. If not, the arena is not used any more.

        Raises:
            TritonUnavailable: Triton does not answer.
        """
        try:
            await self._client.register(arena)
        except TritonUnavailable:
            raise
        except GatewayError:
            self._registered.discard(arena.region)
            return False
        return True

    def abandon(self, arena: Arena) -> None:
        """Lend no more slots of an arena: a connection broke, and Triton may still read those that were in use."""
        for slot_bytes, known in self._arenas.items():
            if known is arena:
                del self._arenas[slot_bytes]
                task = asyncio.create_task(self._remove(arena))
                self._removing.add(task)
                task.add_done_callback(self._removing.discard)
                return

    async def retire_idle(self) -> None:
        """Remove the arenas that have not been used for a minute, except the one used last; to be called regularly."""
        for slot_bytes in self._by_last_use()[:-1]:
            await self._retire(slot_bytes, _IDLE_SECONDS)

    async def close(self) -> None:
        """Remove the arenas, here and in Triton."""
        await self._creating.wait()
        await asyncio.gather(*self._removing, *map(self._remove, self._arenas.values()))
        self._arenas.clear()

    async def _create(self, slot_bytes: int) -> None:
        """Create and register an arena; it may take the place of others that are idle."""
        nbytes = arena_bytes(slot_bytes)
        for other in self._by_last_use():
            if self._nbytes + nbytes > MAX_WORKER_BYTES:
                await self._retire(other, _MIN_IDLE_SECONDS)
        if self._nbytes + nbytes > MAX_WORKER_BYTES:
            self._no_room_until[slot_bytes] = monotonic() + _MIN_IDLE_SECONDS
            return
        self._nbytes += nbytes
        try:
            arena = await asyncio.to_thread(Arena, nbytes)
        except OSError as error:
            self._nbytes -= nbytes
            LOG.warning("no shared memory for tensors of this size; sending them inline", nbytes=slot_bytes, reason=str(error))
            self._no_room_until[slot_bytes] = monotonic() + _RETRY_SECONDS
            return
        try:
            await self._client.register(arena)
        except GatewayError as error:
            await self._remove(arena)
            if not isinstance(error, TritonUnavailable):  # a Triton that does not answer has not rejected it
                self._note_unavailable(str(error.__cause__ or error))
        else:
            self._arenas[slot_bytes] = arena
            self._registered.add(arena.region)
            if not self._is_swept:
                self._is_swept = True
                await self._unregister_leftovers()

    async def _unregister_leftovers(self) -> None:
        """Let Triton unmap arenas whose files are gone: their workers were killed, or could not reach Triton when they ended.

        Only after it has mapped one of ours: it has this host's /dev/shm then, and not that of another gateway's host.
        """
        with suppress(GatewayError):
            regions = await self._client.list_regions()
            left = [region for region, file in regions.items() if shared_memory.is_removed(file)]
            if left:
                LOG.info("let Triton unmap arenas of killed workers", arenas=len(left))
            await asyncio.gather(*map(self._client.unregister, left))

    def _by_last_use(self) -> list[int]:
        """Return the sizes of the arenas, that of the least recently used one first."""
        return sorted(self._arenas, key=lambda slot_bytes: self._arenas[slot_bytes].used_at)

    async def _retire(self, slot_bytes: int, idle_seconds: float) -> None:
        """Remove an arena if it has not been used for so long and no slot of it is lent."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None and monotonic() - arena.used_at >= idle_seconds and arena.retire():
            del self._arenas[slot_bytes]
            await self._remove(arena)

    async def _remove(self, arena: Arena) -> None:
        self._registered.discard(arena.region)
        try:
            await self._client.unregister(arena.region)
        finally:  # last, so that after a crash in between a sweep still finds it
            arena.close()
            self._nbytes -= arena.nbytes

    def _note_unavailable(self, reason: str) -> None:
        """Do without shared memory for a while; warn only once, because a Triton on another host stays there."""
        log = LOG.debug if self._unavailable_until else LOG.warning
        log("shared memory is not available; sending tensors inline", reason=reason)
        self._unavailable_until = monotonic() + _RETRY_SECONDS


def arena_bytes(slot_bytes: int) -> int:
    """Return the size of an arena for tensors of this size; 0 if they are too large for one."""
    return _count_slots(slot_bytes) * slot_bytes


def _count_slots(slot_bytes: int) -> int:
    """Return how many slots of this size an arena has; none if one alone is too large."""
    return min(SLOTS, MAX_ARENA_BYTES // slot_bytes)
