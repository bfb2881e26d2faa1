"""Keeps values in a Redis or Valkey. Whatever happens to it is a miss, which costs a request at most 20 ms."""

import asyncio
from time import monotonic
from typing import Any

import structlog
from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.exceptions import RedisError

from app.telemetry.metrics import Metrics

PREFIX = b"nereid:cache:1:"
"""Start of all keys. The number is that of the format of keys and values."""
MAX_BYTES = 1 << 20
"""Size of the largest value."""

_SECONDS = 0.02
_CLEAR_SECONDS = 5.0
_CLEAR_BATCH = 1000
# Of a worker.
_MAX_CONNECTIONS, _MAX_PUTS = 32, 16
_MAX_FAILURES = 5
_PAUSE_SECONDS = 3.0

LOG = structlog.get_logger()


class RedisStore:
    """A store in Redis, with a circuit of its own: after five failures in a row, only one operation in three seconds tries it."""

    def __init__(self, url: str, seconds: int, metrics: Metrics) -> None:
        """Connect at the first operation.

        Args:
            url: `redis://`, `rediss://` or `unix://`, with the options of redis-py.
            seconds: Time to live of a value.
            metrics: Counts the failures.

        Raises:
            ValueError: The URL is not valid. The message does not contain it, because there may be a password in it.
        """
        try:
            # RESP 2 needs no handshake. The deadlines of redis-py are for each step of an operation; `_try` has one for all.
            pool = _Pool.from_url(url, protocol=2, driver_info=None, socket_timeout=None, socket_connect_timeout=None)
            pool.load()
        except Exception:  # noqa: BLE001 - of many kinds; options of the URL are also passed on as arguments
            raise ValueError("not a URL of a Redis, or with an unknown option or a file that cannot be loaded") from None
        self._client: Redis = Redis.from_pool(pool)
        self._seconds = seconds
        self._metrics = metrics
        # Waits for a connection; the pool would fail.
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)
        self._puts = 0
        self._failures = 0
        """In a row."""
        self._next_try = 0.0
        """While the circuit is open."""

    async def get(self, key: bytes) -> bytes | None:
        """Return the value that was put under `key`, or None. It may return garbage, of at most 1 MiB, but never raises."""
        # Unlike GET, it limits the size of a stranger's value.
        value = await self._try("GETRANGE", PREFIX + key, 0, MAX_BYTES - 1)
        return value if isinstance(value, bytes) and value else None

    async def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless it is too large or many others are on their way. It never raises."""
        if self._puts < _MAX_PUTS and len(value) <= MAX_BYTES:
            self._puts += 1
            try:
                await self._try("SET", PREFIX + key, value, "EX", self._seconds)
            finally:
                self._puts -= 1

    async def clear(self) -> None:
        """Remove the values of all hosts that use this Redis.

        Raises:
            ConnectionError: It failed; the message has the reason.
        """
        cursor: int | None = None
        try:
            while cursor != 0:
                async with asyncio.timeout(_CLEAR_SECONDS):
                    cursor, keys = await self._client.scan(cursor or 0, match=PREFIX + b"*", count=_CLEAR_BATCH)
                    if keys:
                        await self._client.unlink(*keys)
        except (RedisError, OSError) as error:
            raise ConnectionError(f"Redis failed: {str(error) or 'it does not answer'}") from error

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _try(self, *command: bytes | str | int) -> Any:  # noqa: ANN401 - whatever the server answers
        """Run a command; return None if it fails, or if the circuit is open."""
        is_open = self._failures >= _MAX_FAILURES
        if is_open:
            if monotonic() < self._next_try:
                return None
            self._next_try = monotonic() + _PAUSE_SECONDS  # this command is the probe; others do not wait for it
        try:
            # redis-py closes the connection of a command that is cancelled or fails, so no later command reads its answer.
            async with asyncio.timeout(_SECONDS), self._connections:
                answer: Any = await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - a server that is not a Redis makes the parser raise anything
            self._metrics.cache_store_failures.add(1)
            self._failures += 1
            if self._failures == _MAX_FAILURES:
                self._next_try = monotonic() + _PAUSE_SECONDS
                self._metrics.cache_circuit_open.set(1)
                LOG.warning("the cache does without Redis", error=str(error) or "it does not answer in time")
            return None
        if self._failures >= _MAX_FAILURES:
            self._metrics.cache_circuit_open.set(0)
            LOG.warning("the cache uses Redis again")
        self._failures = 0
        return answer


class _Pool(ConnectionPool):
    """Its connections share one TLS context: loading the authorities takes longer than an operation may."""

    _context: Any = None

    def make_connection(self) -> Any:  # noqa: ANN401 - redis-py has no types here
        connection = super().make_connection()  # type: ignore[no-untyped-call]
        if isinstance(connection, SSLConnection):
            self._context = connection.ssl_context = self._context or connection.ssl_context
        return connection

    def load(self) -> None:
        """Check the options and load the certificates."""
        self.make_connection()
        if self._context is not None:
            self._context.get()
