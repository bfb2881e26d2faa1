"""Choose how tensors reach Triton: through shared memory if available, else inline in the request."""

import asyncio
from time import monotonic
from typing import Literal

import structlog

from app.errors import GatewayError, TritonUnavailable
from app.resilience.single_flight import SingleFlight
from app.triton import shared_memory
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena, Slot

SLOTS = 32
"""Slots per arena. If one worker handles more requests at a time, the tensors of the others are sent inline."""
_RETRY_SECONDS = 30.0

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
        self._creating: SingleFlight[None] = SingleFlight()
        self._unavailable_until = 0.0

    @property
    def active_mode(self) -> Literal["shm", "inline"]:
        """How tensors reach Triton now."""
        return "shm" if self._registered else "inline"

    async def sweep(self) -> None:
        """Remove what killed workers have left, here and in this Triton."""
        swept = await asyncio.to_thread(shared_memory.sweep)
        if swept:
            LOG.info("removed arenas of killed workers", arenas=swept)
        await asyncio.gather(*map(self._client.unregister, swept))

    def is_prepared(self, slot_bytes: int) -> bool:
        """Return whether `prepare` has nothing to do for this size."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None:
            return arena.name in self._registered
        return self._mode == "inline" or monotonic() < self._unavailable_until

    async def prepare(self, slot_bytes: int) -> None:
        """Create slots for tensors of up to this size, if shared memory is available."""
        arena = self._arenas.get(slot_bytes)
        if arena is not None and arena.name not in self._registered:
            del self._arenas[slot_bytes]
            self._note_unavailable("Triton was restarted and rejected it then")
            await self._remove(arena)
        if not self.is_prepared(slot_bytes):
            await self._creating.run(slot_bytes, lambda: self._create(slot_bytes))

    def take(self, slot_bytes: int) -> Slot | None:
        """Take a slot of this size, from any thread. None: the tensor has to be sent inline.

        Raises:
            TritonUnavailable: The mode is `shm`, but no slot is available.
        """
        arena = self._arenas.get(slot_bytes)
        slot = arena.take() if arena is not None and arena.name in self._registered else None
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
            self._registered.discard(arena.name)
            return False
        return True

    async def close(self) -> None:
        """Remove the arenas, here and in Triton."""
        await self._creating.wait()
        await asyncio.gather(*map(self._remove, self._arenas.values()))
        self._arenas.clear()

    async def _create(self, slot_bytes: int) -> None:
        """Create and register an arena."""
        arena = None
        try:
            arena = await asyncio.to_thread(Arena, slot_bytes, SLOTS)
            await self._client.register(arena)
        except (OSError, GatewayError) as error:
            if arena is not None:
                await self._remove(arena)
            if not isinstance(error, TritonUnavailable):  # a Triton that does not answer has not rejected it
                self._note_unavailable(str(error.__cause__ or error))
        else:
            self._arenas[slot_bytes] = arena
            self._registered.add(arena.name)

    async def _remove(self, arena: Arena) -> None:
        self._registered.discard(arena.name)
        arena.close()
        await self._client.unregister(arena.name)

    def _note_unavailable(self, reason: str) -> None:
        """Do without shared memory for a while; warn only once, because a Triton on another host stays there."""
        log = LOG.debug if self._unavailable_until else LOG.warning
        log("shared memory is not available; sending tensors inline", reason=reason)
        self._unavailable_until = monotonic() + _RETRY_SECONDS
