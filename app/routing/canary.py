"""Withdraw canaries that fail more often, or take longer, than their routes allow."""

import asyncio
import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate

import structlog

from app.resilience.worker_table import COUNTER, NO_COLUMN, SEPARATOR
from app.routing.route import Canary, Route
from app.routing.routes import Routes, RoutesError
from app.telemetry.metrics import Metrics

_WINDOW_SECONDS = 60
_MIN_REQUESTS = 50
# Upper bounds of the counted durations, in seconds: nine percent apart, up to half a minute.
_BOUNDS = [0.001 * 2 ** (step / 8) for step in range(8 * 15)]
# Counts of a model: by duration, one for longer ones, and the last one for failures.
_COUNTS = len(_BOUNDS) + 2
# One in a hundred may take longer than the 99th percentile.
_SLOW = 0.01
_KIND = "canary"
_HELD = "it failed; the log says how"
_UNWATCHED = "there are too many canaries and metrics to count its requests"

LOG = structlog.get_logger()


class CanaryWatch:
    """Compares the canaries of a host with the defaults of their routes. The first worker decides for all."""

    def __init__(self, routes: Routes, metrics: Metrics) -> None:
        self._routes, self._metrics, self._table = routes, metrics, metrics.table
        self._columns: dict[str, list[int]] = {}
        """By route and models: columns of the counts of the default, of those of the canary, and of whether that is withdrawn in
        memory; empty if there are not enough columns."""
        self._windows: dict[str, tuple[Route, deque[list[int]]]] = {}
        """The counts of the host in each of the last seconds, by route. A changed route begins anew."""

    def note(self, name: str, route: Route, seconds: float | None, *, is_canary: bool) -> None:
        """Record how long a model of a route that has a canary took for an answer; None if it failed."""
        if columns := self._columns_of(_identify(name, route)):
            self._table.add(columns[is_canary * _COUNTS + (_COUNTS - 1 if seconds is None else bisect_left(_BOUNDS, seconds))], 1)

    def withdrawn(self, name: str, route: Route) -> str:
        """Return why the canary of a route gets no requests any more; empty if it does, or there is none."""
        if route.canary is None or route.canary.withdrawn:
            return "" if route.canary is None else route.canary.withdrawn
        if not (columns := self._columns_of(_identify(name, route))):
            return _UNWATCHED
        return _HELD if self._table.cells[columns[-1]] else ""

    async def refresh(self) -> None:
        """Withdraw the canaries that must be. Call this about once a second."""
        known = {name: route for name, route in self._routes.known.items() if route.canary is not None}
        identities = {_identify(*item) for item in known.items()}
        self._columns = {each: columns for each, columns in self._columns.items() if each in identities}
        self._windows = {name: window for name, window in self._windows.items() if known.get(name) == window[0]}
        self._table.keep_aliases(identities, _KIND)
        for name, route in known.items():
            if route.canary is not None and (columns := self._columns_of(_identify(name, route))):
                await self._watch(name, route, route.canary, columns)
            self._metrics.canary_withdrawn.set(int(bool(self.withdrawn(name, route))), name)
        self._metrics.canary_withdrawn.clear_except(known)

    async def _watch(self, name: str, route: Route, canary: Canary, columns: list[int]) -> None:
        *counted, held = columns
        totals = [self._table.total_ever(column) for column in counted]
        _, window = self._windows.setdefault(name, (route, deque(maxlen=_WINDOW_SECONDS + 1)))
        window.append(totals)
        is_held = not canary.withdrawn and any(self._table.values(held))  # also by a worker that has ended since
        if self._table.is_first and not canary.withdrawn:
            counts = [total - before for total, before in zip(totals, window[0], strict=True)]
            if reason := _HELD if is_held else _verdict(counts[:_COUNTS], counts[_COUNTS:], canary):
                is_held = not await self._withdraw(name, canary, reason, is_new=not is_held)
                del self._windows[name]  # the same canary may be put again at once
        self._table.set(held, int(is_held))

    async def _withdraw(self, name: str, canary: Canary, reason: str, *, is_new: bool) -> bool:
        """Write into the routes file that a canary is withdrawn; return whether that was possible."""
        if is_new:
            LOG.error("the canary of a route is withdrawn", route=name, canary=canary.to, reason=reason)
        try:
            await asyncio.to_thread(self._routes.withdraw, name, canary, reason)
        except (OSError, RoutesError) as error:
            if is_new:
                LOG.error("the routes file cannot be written", detail=str(error))  # noqa: TRY400 - an error of the file
            return False
        return True

    def _columns_of(self, identity: str) -> list[int]:
        columns = self._columns.get(identity)
        if columns is None:
            own = SEPARATOR.join((_KIND, self._table.alias(identity)))
            columns = [self._table.column(COUNTER + SEPARATOR.join((own, str(place)))) for place in range(2 * _COUNTS)]
            columns.append(self._table.column(own))
            columns = self._columns[identity] = [] if NO_COLUMN in columns else columns
        return columns


def _identify(name: str, route: Route) -> str:
    """Join what counts belong to: the name of a route, and the references of its default and of its canary."""
    return SEPARATOR.join((_KIND, name, route.to, route.canary.to if route.canary else ""))


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
