"""Withdraw canaries that fail more often, or take longer, than their routes allow."""

import asyncio
import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate
from time import monotonic

import structlog

from app.resilience.worker_table import COUNTER, NO_COLUMN, SEPARATOR
from app.routing.route import Canary, Route
from app.routing.routes import Routes, RoutesError
from app.telemetry.metrics import Metrics

_WINDOW_SECONDS = 60.0
_MIN_REQUESTS = 50
# Upper bounds of the counted durations, in seconds: nine percent apart, up to half a minute.
_BOUNDS = [0.001 * 2 ** (step / 8) for step in range(8 * 15)]
# One in a hundred may take longer than the 99th percentile.
_SLOW = 0.01
_CHECK_SECONDS = 1.0
_KIND = "canary"
_HELD = "it failed; the log says how"

LOG = structlog.get_logger()

_Identity = tuple[str, str, str]
"""Name of a route, and the references of its default and of its canary."""


class _Columns:
    """The columns of the worker table that belong to a canary, in an alias: they are used again for others."""

    def __init__(self, metrics: Metrics, identity: _Identity) -> None:
        table, alias = metrics.table, metrics.table.alias(SEPARATOR.join((_KIND, *identity)))
        places = range(len(_BOUNDS) + 2)
        keys = [[SEPARATOR.join((_KIND, alias, part, str(place))) for place in places] for part in ("default", "canary")]
        self.default, self.canary = [[table.column(COUNTER + key) for key in part] for part in keys]
        """Requests of the whole host by duration: one column for each bound, longer ones, and those that failed."""
        self.held = table.column(SEPARATOR.join((_KIND, alias)))
        """1 in workers that know that the canary is withdrawn although the routes file cannot be written."""


class _Window:
    """The counts of the last minute, from totals that are added regularly."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self._totals: deque[tuple[float, list[int]]] = deque()

    def add(self, totals: list[int]) -> list[int]:
        """Add totals; return by how much they have grown in the window. The first ones are the start of it."""
        now = monotonic()
        self._totals.append((now, totals))
        while len(self._totals) > 1 and self._totals[1][0] <= now - _WINDOW_SECONDS:
            self._totals.popleft()
        return [total - before for total, before in zip(totals, self._totals[0][1], strict=True)]


class CanaryWatch:
    """Compares the canaries of a host with the defaults of their routes. The first worker decides for all."""

    def __init__(self, routes: Routes, metrics: Metrics) -> None:
        """Watch the canaries of these routes."""
        self._routes, self._metrics, self._table = routes, metrics, metrics.table
        self._columns: dict[_Identity, _Columns] = {}
        self._windows: dict[str, _Window] = {}
        self._held: dict[_Identity, str] = {}
        """Why canaries are withdrawn that have no reason in the file, because it cannot be written."""

    def note(self, name: str, route: Route, *, is_canary: bool, seconds: float, failed: bool) -> None:
        """Record an answer or a failure of a route that has a canary."""
        columns = self._columns_of(_identify(name, route))
        place = -1 if failed else bisect_left(_BOUNDS, seconds)
        self._table.add((columns.canary if is_canary else columns.default)[place], 1)

    def withdrawn(self, name: str, route: Route) -> str:
        """Return why the canary of a route gets no requests any more; empty if it does, or there is none."""
        if route.canary is None:
            return ""
        return route.canary.withdrawn or (self._held.get(_identify(name, route), "") if self._held else "")

    async def run(self) -> None:
        """Watch until this is cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:
                LOG.exception("the canaries could not be watched")
            await asyncio.sleep(_CHECK_SECONDS)

    async def refresh(self) -> None:
        """Withdraw the canaries that must be. Call this about once a second."""
        known = {name: route for name, route in self._routes.known.items() if route.canary is not None}
        identities = {_identify(name, route) for name, route in known.items()}
        self._columns = {each: columns for each, columns in self._columns.items() if each in identities}
        self._held = {each: reason for each, reason in self._held.items() if each in identities}
        self._windows = {name: window for name, window in self._windows.items() if known.get(name) == window.route}
        self._table.keep_aliases({SEPARATOR.join((_KIND, *each)) for each in identities}, _KIND)
        for name, route in known.items():
            await self._watch(name, route)
            self._metrics.canary_withdrawn.set(int(bool(self.withdrawn(name, route))), name)
        self._metrics.canary_withdrawn.clear_except(known)

    async def _watch(self, name: str, route: Route) -> None:
        assert route.canary is not None  # noqa: S101 - of routes with a canary
        identity = _identify(name, route)
        columns = self._columns_of(identity)
        if route.canary.withdrawn:
            self._held.pop(identity, None)
        elif any(self._table.values(columns.held)):  # the worker that decided it may be gone
            self._held.setdefault(identity, _HELD)
        self._table.set(columns.held, int(identity in self._held))
        counts = self._windows.setdefault(name, _Window(route)).add(
            [self._table.total_ever(column) for column in (*columns.default, *columns.canary)]
        )
        if route.canary.withdrawn or NO_COLUMN in columns.canary or not self._table.is_first:
            return
        half = len(columns.default)
        reason = self._held.get(identity) or _verdict(counts[:half], counts[half:], route.canary)
        if reason:
            await self._withdraw(name, route.canary, identity, reason)

    async def _withdraw(self, name: str, canary: Canary, identity: _Identity, reason: str) -> None:
        """Write into the routes file that a canary is withdrawn; keep it in memory as long as that fails."""
        if identity not in self._held:
            LOG.error("the canary of a route is withdrawn", route=name, canary=canary.to, reason=reason)
        try:
            await asyncio.to_thread(self._routes.withdraw, name, canary, reason)
        except (OSError, RoutesError) as error:
            if identity not in self._held:
                LOG.error("the routes file cannot be written", detail=str(error))  # noqa: TRY400 - an error of the file
            self._held[identity] = reason
            self._table.set(self._columns_of(identity).held, 1)

    def _columns_of(self, identity: _Identity) -> _Columns:
        columns = self._columns.get(identity)
        if columns is None:
            columns = self._columns[identity] = _Columns(self._metrics, identity)
        return columns


def _identify(name: str, route: Route) -> _Identity:
    return name, route.to, "" if route.canary is None else route.canary.to


def _verdict(default: list[int], own: list[int], canary: Canary) -> str:
    """Return why a canary must be withdrawn, by the counts of the default and its own; empty if it need not."""
    requests, failed, others, others_failed = sum(own), own[-1], sum(default), default[-1]
    if requests < _MIN_REQUESTS:
        return ""
    if _exceeds(failed, requests, canary.max_error_rate + (others_failed / others if others else 0.0)):
        return f"{failed} of {requests} requests in a minute failed, and {others_failed} of {others} of the default"
    reached = list(accumulate(default[:-1]))
    percentile = bisect_left(reached, (1 - _SLOW) * reached[-1])
    if reached[-1] < _MIN_REQUESTS or percentile >= len(_BOUNDS):
        return ""
    limit = canary.max_p99_ratio * _BOUNDS[percentile]
    slow = sum(own[bisect_left(_BOUNDS, limit) + 1 : -1])
    if _exceeds(slow, requests - failed, _SLOW):
        return f"{slow} of {requests} requests in a minute took longer than {limit * 1e3:.0f} ms, too long by the default's p99"
    return ""


def _exceeds(count: int, requests: int, rate: float) -> bool:
    """Return whether more events happened than at this rate, and more than by chance: three standard deviations, and one."""
    expected = requests * rate
    return count > expected + 3 * math.sqrt(expected) + 1
