"""What the networks are that Triton runs: read regularly, so that no request waits for a disk."""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import structlog

from app.model.spec import ModelSpec

_INTERVAL_SECONDS = 1.0
# Older ones are not used: the disk, which may be that of a network, does not answer.
_MAX_AGE_SECONDS = 5.0

LOG = structlog.get_logger()


class Fingerprints:
    """Fingerprints of the versions of models that requests have asked for."""

    def __init__(self, read: Callable[[str, str], bytes]) -> None:
        """`read` gets the name and version of a model; it returns an empty one if it is not known what Triton runs, or changes."""
        self._read = read
        self._known: dict[tuple[str, str], bytes] = {}
        self._read_at = -math.inf
        self._has_new = asyncio.Event()
        self._reading = asyncio.Lock()  # a disk that does not answer blocks one thread only

    def get(self, spec: ModelSpec) -> bytes:
        """Return the fingerprint of a version as it was a moment ago; empty if it is not known."""
        if (found := self._known.get((spec.name, spec.version))) is None:
            found = self._known[spec.name, spec.version] = b""
            self._has_new.set()
        return found if monotonic() - self._read_at < _MAX_AGE_SECONDS else b""

    async def confirm(self, spec: ModelSpec, fingerprint: bytes) -> bool:
        """Return whether this is the fingerprint of a version now."""
        async with self._reading:
            return fingerprint != b"" and await asyncio.to_thread(self._read, spec.name, spec.version) == fingerprint

    async def refresh(self) -> None:
        """Read the fingerprints again."""
        async with self._reading:
            began_at, versions = monotonic(), [*self._known]
            found = await asyncio.to_thread(lambda: [self._read(*version) for version in versions])
        self._known.update(zip(versions, found, strict=True))
        self._read_at = began_at

    async def run(self) -> None:
        """Refresh them every second, and when there is a new one; never returns."""
        while True:
            self._has_new.clear()
            try:
                await self.refresh()
            except Exception:
                LOG.exception("the fingerprints of models could not be read")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_new.wait(), _INTERVAL_SECONDS)
