"""Where results are kept: in the memory of the host, or in Redis."""

from typing import Protocol


class Store(Protocol):
    """Values by key. It forgets what it likes, and a caller checks what it gets (`app.features.cache.entry`)."""

    async def get(self, key: bytes) -> bytes | None:
        """Return the value that was put under `key` (32 bytes), or None. It never raises, but may return garbage."""

    async def put(self, key: bytes, value: bytes) -> None:
        """Keep `value`, if it can be kept. It never raises, and no request waits for it."""

    async def close(self) -> None:
        """Release what the store holds."""
