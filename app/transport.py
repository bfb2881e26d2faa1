"""How pixels reach Triton: through shared memory where that works, inside the request where it does not."""

import asyncio
from time import monotonic
from typing import Literal

import structlog

from app import arena
from app.arena import Arena, Slot
from app.errors import GatewayError, TritonUnavailable
from app.once import Once
from app.triton import Triton

# More requests than this at a time in one worker carry their pixels themselves.
_SLOTS = 32
_ASK_AGAIN_SECONDS = 30.0

LOG = structlog.get_logger()

Mode = Literal["auto", "shm", "inline"]


class Transport:
    """The arenas of one worker, one for each size of input tensor in use."""

    def __init__(self, triton: Triton, mode: Mode) -> None:
        self._triton = triton
        self._mode = mode
        self._arenas: dict[int, Arena] = {}
        self._making: Once[None] = Once()
        self._refused_until = 0.0

    @property
    def in_force(self) -> Literal["shm", "inline"]:
        """What requests use now."""
        return "shm" if any(not made.is_refused for made in self._arenas.values()) else "inline"

    async def sweep(self) -> None:
        """Remove what killed workers have left, here and in this Triton."""
        swept = await asyncio.to_thread(arena.sweep)
        if swept:
            LOG.info("swept", arenas=swept)
        await asyncio.gather(*map(self._triton.unregister, swept))

    async def prepare(self, nbytes: int) -> None:
        """Have slots for tensors of up to this size, if they can be had."""
        made = self._arenas.get(nbytes)
        if made is not None and made.is_refused:
            del self._arenas[nbytes]
            self._refuse("Triton was started again, and refused it then")
            await self._remove(made)
            made = None
        if made is None and self._mode != "inline" and monotonic() >= self._refused_until:
            await self._making.ask(nbytes, lambda: self._make(nbytes))

    def take(self, nbytes: int) -> Slot | None:
        """Take one of the slots prepared for this size; from any thread. None: the tensor travels inside the request.

        So do files that are larger, and what is under way when Triton, started again, refuses shared memory.

        Raises:
            TritonUnavailable: Shared memory is insisted on, and cannot be had.
        """
        made = self._arenas.get(nbytes)
        slot = made.take() if made else None
        if slot is None and self._mode == "shm":
            raise TritonUnavailable("no shared memory is to be had, and nothing else is allowed")
        return slot

    async def close(self) -> None:
        """Take the arenas out of Triton and remove them."""
        await self._making.settle()
        await asyncio.gather(*map(self._remove, self._arenas.values()))
        self._arenas.clear()

    async def _remove(self, made: Arena) -> None:
        made.close()
        await self._triton.unregister(made.name)

    async def _make(self, nbytes: int) -> None:
        """Make and register an arena."""
        made = None
        try:
            made = await asyncio.to_thread(Arena, nbytes, _SLOTS)
            await self._triton.register(made.name, made.nbytes)
        except (OSError, GatewayError) as error:
            if made is not None:
                await self._remove(made)
            if not isinstance(error, TritonUnavailable):  # else nobody was there to refuse
                self._refuse(str(error.__cause__ or error))
        else:
            self._arenas[nbytes] = made

    def _refuse(self, reason: str) -> None:
        """Do without for a while, and say so once: a Triton elsewhere stays elsewhere."""
        tell = LOG.debug if self._refused_until else LOG.warning
        tell("shared memory refused, pixels travel inside requests", reason=reason)
        self._refused_until = monotonic() + _ASK_AGAIN_SECONDS
