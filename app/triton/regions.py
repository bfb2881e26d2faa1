"""Registration of a worker's arenas with one Triton, which maps them only if it runs on the same host."""

import asyncio
from contextlib import suppress
from time import monotonic

import structlog

from app.errors import GatewayError, TritonUnavailable
from app.resilience.single_flight import SingleFlight
from app.triton import shared_memory
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena
from app.triton.status import Refused

_RETRY_SECONDS = 30.0
_SILENT_RETRY_SECONDS = 2.0

LOG = structlog.get_logger()


class Regions:
    """The arenas that are registered with one Triton."""

    def __init__(self, client: TritonClient) -> None:
        self._client = client
        self.mapped: set[Arena] = set()
        """The arenas that Triton has mapped, as far as is known."""
        self._asked: set[str] = set()
        """Regions that Triton was asked to map and has not rejected."""
        self._registering: SingleFlight[None] = SingleFlight()
        self.unavailable_until = 0.0
        """After Triton has rejected an arena: when to register one again, on the `time.monotonic` clock."""
        self.silent_until = 0.0
        """If Triton did not answer the last time: when to ask it again, on the same clock; otherwise 0."""
        self._is_swept = False
        """Whether the regions of killed workers have been unregistered."""

    async def add(self, arena: Arena) -> None:
        """Let Triton map an arena, if possible. Concurrent calls for the same arena share one RPC."""
        await self._registering.run(arena.region, lambda: self._add(arena))

    async def add_again(self, arena: Arena) -> bool:
        """Let Triton map an arena again after a restart; return whether it is mapped, or raise TritonUnavailable."""
        try:
            await self._client.register(arena)
        except TritonUnavailable:
            raise
        except GatewayError:
            self.mapped.discard(arena)
            return False
        return True

    async def remove(self, arena: Arena) -> None:
        """Let Triton unmap an arena, if it may have mapped it."""
        await self._registering.wait()
        self.mapped.discard(arena)
        if arena.region in self._asked:
            self._asked.discard(arena.region)
            await self._client.unregister(arena.region)

    async def remove_all(self) -> None:
        """Let Triton unmap all arenas that it may have mapped."""
        await self._registering.wait()
        self.mapped.clear()
        asked, self._asked = self._asked, set()
        await asyncio.gather(*map(self._client.unregister, asked))

    def note_unavailable(self, reason: str) -> None:
        """Use no shared memory for a while; warn only the first time, because a Triton on another host will stay there."""
        log = LOG.debug if self.unavailable_until else LOG.warning
        log("shared memory is not available; sending tensors inline", triton=self._client.address, reason=reason)
        self.unavailable_until = monotonic() + _RETRY_SECONDS

    async def _add(self, arena: Arena) -> None:
        self._asked.add(arena.region)
        try:
            await self._client.register(arena)
        except GatewayError as error:
            if isinstance(error, TritonUnavailable) and not isinstance(error, Refused):  # it may have mapped the arena
                self.silent_until = monotonic() + _SILENT_RETRY_SECONDS
                return
            self.silent_until = 0.0
            self._asked.discard(arena.region)
            self.note_unavailable(str(error.__cause__ or error))
            return
        self.silent_until = 0.0
        self.mapped.add(arena)
        if not self._is_swept:
            self._is_swept = True
            await self._unregister_leftovers()

    async def _unregister_leftovers(self) -> None:
        """Let Triton unmap arenas whose files are gone: their workers were killed, or could not reach Triton when they ended.

        Triton must have mapped an arena of this worker before. Otherwise it may run on another host, whose files are not visible.
        """
        with suppress(GatewayError):
            regions = await self._client.list_regions()
            left = [region for region, file in regions.items() if shared_memory.is_removed(file)]
            if left:
                LOG.info("let Triton unmap arenas of killed workers", arenas=len(left))
            await asyncio.gather(*map(self._client.unregister, left))
