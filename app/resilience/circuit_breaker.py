"""Circuit breaker: rejects requests at once while a model fails, and probes until it works again."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic

import structlog

from app.errors import GatewayError
from app.resilience.worker_table import WorkerTable

_CONSECUTIVE_FAILURES = 5
_WINDOW_SECONDS = 10
_MIN_CALLS = 20
_FIRST_PROBE_SECONDS = 0.1
_MAX_PROBE_SECONDS = 1.0
_MICRO = 1_000_000
# Right answers in a row after wrong ones.
_RIGHT = 2
# The last two bits of the time when a circuit was opened say why.
_WRONG, _DIED = 1, 3

LOG = structlog.get_logger()


class CircuitBreaker:
    """Opens after five consecutive failures, or if half of the calls in the last ten seconds failed; closes after a probe succeeds.

    Requests are never used as probes: while the circuit is open, a background task repeats the probe until it succeeds.

    A circuit that opens in one worker opens in all workers of the host, except where a call has succeeded since. Each worker closes
    its own, because a single connection may be broken. Wrong answers, which look like success, open it in all workers whatever has
    succeeded, until two probes in a row succeed.
    """

    def __init__(self, table: WorkerTable, model: str, triton: str, probe: Callable[[], Awaitable[object]]) -> None:
        """Start closed. `probe` tests whether requests would succeed; it raises a `GatewayError` if not, and may take long."""
        self.is_open = False
        """As of this worker; `is_closed` takes the others into account."""
        self.is_wrong = False
        """Whether it is open because of wrong answers."""
        self.consecutive = 0
        self._context = {"model": model, "triton": triton}
        self._table = table
        self._opened = table.column(f"circuit:{table.alias(triton)}:{model}")
        """When the circuit was opened, in microseconds, an odd number if answers are wrong; 0 while it is closed."""
        self._succeeded_at = self._right_at = 0
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._buckets: dict[int, list[int]] = {}
        """Successes and failures by second."""

    def note_success(self) -> None:
        """Count a successful call."""
        self.consecutive = 0
        self._succeeded_at = _now()
        self._bucket()[0] += 1

    def note_failure(self) -> None:
        """Count a failed call; open the circuit if too many calls have failed."""
        self.consecutive += 1
        self._bucket()[1] += 1
        if self.consecutive >= _CONSECUTIVE_FAILURES or self._fails_often():
            self.open()

    @property
    def is_closed(self) -> bool:
        """Whether calls may be made. Opens the circuit if another worker has opened it since a call succeeded here."""
        if not self.is_wrong and self._table.total(self._opened):  # rarely
            for opened in self._table.values(self._opened):
                if opened > (self._right_at if opened % 2 else self._succeeded_at):
                    self.open(opened)
        return not self.is_open

    @property
    def is_wrong_for_first(self) -> bool:
        """Whether it is open because of wrong answers in the first worker."""
        return self._table.values(self._opened)[0] % 2 > 0

    @property
    def died_at(self) -> float:
        """When a process of the model died for which a worker leaves it out, on the `time.monotonic` clock; 0 if there is none."""
        return max((opened for opened in self._table.values(self._opened) if opened % 4 == _DIED), default=0) / _MICRO

    def open(self, opened_at: int | None = None, **context: str) -> None:
        """Open the circuit, and start probing; `opened_at` is when another worker has opened it, if one has, in microseconds."""
        opened_at = opened_at or _now()
        if opened_at % 4 == _DIED:
            self._table.set(self._opened, opened_at)
        if opened_at % 2 > self.is_wrong:
            self.is_wrong = True
            self._table.set(self._opened, opened_at)
            LOG.warning("wrong answers", **self._context, **context)
        if not self.is_open:
            LOG.warning("circuit opened", **self._context)
            self.is_open = True
            self._table.set(self._opened, opened_at)
            self._probing = asyncio.create_task(self._recover())

    def open_for_wrong_answers(self, reason: str) -> None:
        """Open the circuit although calls succeed."""
        self.open(_now() | _WRONG, reason=reason)

    def open_for_death(self) -> None:
        """Open the circuit because a process of the model has died: its late results may be the answers to other calls."""
        self.open(_now() | _DIED, reason="a process of the model has died")

    async def close(self) -> None:
        """Stop probing."""
        self._table.set(self._opened, 0)
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)

    async def _recover(self) -> None:
        opened_at = monotonic()
        wait, right = _FIRST_PROBE_SECONDS, 0
        while self.is_open:
            await asyncio.sleep(wait)
            wait = min(2 * wait, _MAX_PROBE_SECONDS)
            try:
                await self._probe()
                right += 1
                wait = _FIRST_PROBE_SECONDS
                self.is_open = self.is_wrong and right < _RIGHT
            except GatewayError:
                right = 0
            except Exception:
                LOG.exception("probe failed unexpectedly", **self._context)
        self._table.set(self._opened, 0)
        self._succeeded_at = _now()
        if self.is_wrong:
            self.is_wrong, self._right_at = False, self._succeeded_at
        self.consecutive, self._buckets = 0, {}
        LOG.warning("circuit closed", **self._context, open_seconds=round(monotonic() - opened_at, 2))

    def _fails_often(self) -> bool:
        successes, failures = map(sum, zip(*self._buckets.values(), strict=True))
        return successes + failures >= _MIN_CALLS and failures >= successes

    def _bucket(self) -> list[int]:
        second = int(monotonic())
        if second not in self._buckets:
            self._buckets = {past: counts for past, counts in self._buckets.items() if second - past < _WINDOW_SECONDS}
            self._buckets[second] = [0, 0]
        return self._buckets[second]


def _now() -> int:
    """Return the time in microseconds, which is the same in all processes of the host."""
    return int(monotonic() * _MICRO) & ~3
