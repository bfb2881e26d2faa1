"""Circuit breaker: rejects requests at once while a model fails, and probes until it works again."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Literal

import structlog

from app.errors import GatewayError

_CONSECUTIVE_FAILURES = 5
_WINDOW_SECONDS = 10
_MIN_CALLS = 20
_FAILURE_RATE = 0.5
_FIRST_PROBE_SECONDS = 0.1
_MAX_PROBE_SECONDS = 1.0

LOG = structlog.get_logger()

State = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """Opens after five consecutive failures, or if half of the calls in the last ten seconds failed; closes after a probe succeeds.

    Requests are never used as probes: while the circuit is open, a background task repeats the probe until it succeeds.
    """

    def __init__(self, name: str, probe: Callable[[], Awaitable[object]], **context: str) -> None:
        """Start closed.

        Args:
            name: Name of the model, for the log.
            probe: Tests whether requests would succeed; raises a `GatewayError` if not. It may take long.
            context: More fields for the log.
        """
        self.state: State = "closed"
        self._context = {"model": name, **context}
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._restart()

    def note_success(self) -> None:
        """Count a successful call."""
        self._consecutive = 0
        self._bucket()[0] += 1

    def note_failure(self) -> None:
        """Count a failed call; open the circuit if too many calls have failed."""
        self._consecutive += 1
        self._bucket()[1] += 1
        if self._consecutive >= _CONSECUTIVE_FAILURES or self._fails_often():
            self.open()

    def open(self) -> None:
        """Open the circuit, and start probing to close it again."""
        if self.state == "closed":
            LOG.warning("circuit opened", **self._context)
            self.state = "open"
            self._probing = asyncio.create_task(self._recover())

    async def close(self) -> None:
        """Stop probing."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _recover(self) -> None:
        opened_at = monotonic()
        wait = _FIRST_PROBE_SECONDS
        while self.state != "closed":
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MAX_PROBE_SECONDS)
            self.state = "half_open"
            try:
                await self._probe()
                self.state = "closed"
            except GatewayError:
                self.state = "open"
            except Exception:
                self.state = "open"
                LOG.exception("probe failed unexpectedly", **self._context)
        self._restart()
        LOG.warning("circuit closed", **self._context, open_seconds=round(monotonic() - opened_at, 2))

    def _fails_often(self) -> bool:
        now = int(monotonic())
        recent = [bucket for bucket, second in zip(self._buckets, self._seconds, strict=True) if now - second < _WINDOW_SECONDS]
        failures = sum(failed for _, failed in recent)
        calls = failures + sum(succeeded for succeeded, _ in recent)
        return calls >= _MIN_CALLS and failures >= _FAILURE_RATE * calls

    def _bucket(self) -> list[int]:
        """Return the mutable pair of successes and failures in this second."""
        second = int(monotonic())
        index = second % _WINDOW_SECONDS
        if self._seconds[index] != second:
            self._seconds[index] = second
            self._buckets[index] = [0, 0]
        return self._buckets[index]

    def _restart(self) -> None:
        self._consecutive = 0
        self._seconds = [-_WINDOW_SECONDS] * _WINDOW_SECONDS
        self._buckets = [[0, 0] for _ in range(_WINDOW_SECONDS)]
