"""Keeps values in a Redis or Valkey. Whatever happens to it is a miss, which costs a request at most 20 ms."""

import asyncio
from time import monotonic
from typing import Any

import structlog
from redis.asyncio import ConnectionPool, Redis, SSLConnection
from redis.exceptions import RedisError

from app.features.cache.instruments import Instruments

PREFIX = b"nereid:cache:2:"
"""Start of all keys. The number is that of the format of keys and values."""
MAX_BYTES = 1 << 20

_SECONDS = 0.02
_CLEAR_SECONDS, _CLEAR_BATCH = 5.0, 1000
# Of a worker.
_MAX_CONNECTIONS, _MAX_PUTS = 32, 16
_MAX_FAILURES = 5
# Short at first: on a busy machine, a Redis that is well may answer too late.
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.5, 4.0

LOG = structlog.get_logger()


class RedisStore:
    """A store in Redis, with a circuit of its own: after five failures in a row, few operations try it."""

    def __init__(self, url: str, seconds: int, metrics: Instruments) -> None:
        """Connect at the first operation; values live for `seconds`. Raises as `open_pool`."""
        self._client: Redis = Redis.from_pool(open_pool(url))
        self._seconds = seconds
        self._metrics = metrics
        self._connections = asyncio.Semaphore(_MAX_CONNECTIONS)  # the pool does not wait
        self._puts = 0
        self._failures = 0
        """In a row."""
        self._failed_at = 0.0
        self._pause = _FIRST_PAUSE_SECONDS
        self._next_try = 0.0
        """End of the pause, while the circuit is open."""

    async def get(self, key: bytes) -> bytes | None:
        """Return the value under `key`, cut off after 1 MiB: a stranger may have put it there. It never raises."""
        value = await self._try("GETRANGE", PREFIX + key, 0, MAX_BYTES - 1)
        return value if isinstance(value, bytes) and value else None

    async def put(self, key: bytes, value: bytes) -> None:
        """Keep a value, unless it is too large or many are on their way. It never raises."""
        if self._puts < _MAX_PUTS and len(value) <= MAX_BYTES:
            self._puts += 1
            try:
                await self._try("SET", PREFIX + key, value, "EX", self._seconds)
            finally:
                self._puts -= 1

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _try(self, *command: bytes | str | int) -> Any:  # noqa: ANN401 - whatever the server answers
        started_at = monotonic()
        if self._failures >= _MAX_FAILURES:
            if started_at < self._next_try:
                return None
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
            self._next_try = started_at + self._pause  # this command is the probe; others do not wait for it
        try:
            # redis-py closes the connection of a command that is cancelled or fails, so no later command reads its answer.
            async with asyncio.timeout(_SECONDS), self._connections:
                answer: Any = await self._client.execute_command(*command)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - a server that is not a Redis makes the parser raise anything
            self._metrics.store_failures.add(1)
            if started_at >= self._failed_at:
                self._note_failure(error)
            return None
        if self._failures >= _MAX_FAILURES:
            self._metrics.circuit_open.set(0)
            LOG.warning("the cache uses Redis again")
        self._failures, self._pause = 0, _FIRST_PAUSE_SECONDS
        return answer

    def _note_failure(self, error: Exception) -> None:
        """Count the failure of a command that did not run beside the last one that failed: a short stall fails all of them."""
        self._failed_at = monotonic()
        self._failures += 1
        if self._failures == _MAX_FAILURES:
            self._next_try = self._failed_at + self._pause
            self._metrics.circuit_open.set(1)
            LOG.warning("the cache does without Redis", error=str(error) or "it does not answer in time")


async def clear(url: str) -> None:
    """Remove the values of all hosts that use this Redis; raises ConnectionError with the reason, or as `open_pool`."""
    client, cursor = Redis.from_pool(open_pool(url)), -1
    try:
        while cursor != 0:
            async with asyncio.timeout(_CLEAR_SECONDS):
                cursor, keys = await client.scan(max(cursor, 0), match=PREFIX + b"*", count=_CLEAR_BATCH)
                if keys:
                    await client.unlink(*keys)
    except (RedisError, OSError) as error:
        raise ConnectionError(f"Redis failed: {str(error) or 'it does not answer'}") from error
    finally:
        await client.aclose()


def open_pool(url: str) -> ConnectionPool:
    """Return a pool without connections; raises ValueError without the URL, in which there may be a password."""
    try:
        # RESP 2 needs no handshake. The deadlines of redis-py are for each step of an operation; a store has one for all.
        pool = _Pool.from_url(url, protocol=2, driver_info=None, socket_timeout=None, socket_connect_timeout=None)
        pool.make_connection()
    except Exception:  # noqa: BLE001 - of many kinds; options of the URL are also passed on as arguments
        raise ValueError("not a URL of a Redis, or with an unknown option or a file that cannot be loaded") from None
    return pool


class _Pool(ConnectionPool):
    """Its connections share one TLS context: loading the authorities takes longer than an operation may."""

    _context: Any = None

    def make_connection(self) -> Any:  # noqa: ANN401 - redis-py has no types here
        connection = super().make_connection()  # type: ignore[no-untyped-call]
        if isinstance(connection, SSLConnection):
            self._context = connection.ssl_context = self._context or connection.ssl_context
            self._context.get()
        return connection
