"""Fairness between callers: how much of a resource each may use, and whose work is next."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from operator import itemgetter
from threading import Lock
from typing import Generic, NamedTuple, Protocol, TypeVar

from app.resilience.worker_table import CALLER, NO_COLUMN, SEPARATOR, WorkerTable

# A caller may use this many times what is free. With 9, one caller alone uses the whole limit, and a ninth more is for others.
_FACTOR = 9
# Client addresses are counted in so many groups, because they cannot be listed.
_ADDRESS_GROUPS = 256
Networks = tuple[IPv4Network | IPv6Network, ...]
HIGH, NORMAL, LOW, SHADOW = range(4)
"""Priorities of callers, the first one first."""
# An image of a batch counts as so many single images.
_BATCH_COST = 8.0


class Caller(NamedTuple):
    """Whoever sends requests: an API key or, without keys, a client address."""

    name: str = ""
    fraction: float = 1.0
    """The key's share of a model's requests and time; for a caller without a share, what all shares leave to such callers."""
    has_share: bool = False
    priority: int = NORMAL
    """What waits for a caller with a lower number comes first."""

    @property
    def pool(self) -> str:
        """The callers that use the same `fraction`: only this one if it is its share."""
        return self.name if self.has_share else ""


ANYBODY = Caller()
"""The caller of requests that belong to nobody, such as warm-ups, and of those whose address is unknown."""


def caller_at(address: str, inside: Networks = ()) -> Caller:
    """Return the caller with a client address; `ANYBODY` for an empty address. `inside` as in `network_digest`."""
    return Caller(f"address group {network_digest(address, inside) % _ADDRESS_GROUPS}") if address else ANYBODY


def network_digest(address: str, inside: Networks = ()) -> int:
    """Return a hash, 56 bits, of what identifies a client: an IPv4 address, or the 64-bit prefix of an IPv6 address.

    An address in the networks `inside`, in which the pods of a node share a /64 network, counts as a whole.
    """
    network: object = address
    with suppress(ValueError):  # a name, or empty
        network = ip_address(address)
    if isinstance(network, IPv6Address):
        is_inside = any(network in each for each in inside)
        network = network.ipv4_mapped or (network if is_inside else int(network) >> 64)
    return int.from_bytes(hashlib.blake2b(str(network).encode(), digest_size=7).digest())


class Turn(NamedTuple):
    """What decides when work is next."""

    caller: Caller
    cost: float = 0.0
    """Expected work, in any unit, the same for all that waits."""
    is_batch: bool = False
    """Whether it belongs to a batch, and comes behind single images."""
    is_frame: bool = False
    """Whether it belongs to a stream, and comes behind single images."""


class HasTurn(Protocol):
    """Work that waits in a `FairQueue`."""

    turn: Turn


Work = TypeVar("Work", bound=HasTurn)


class CallerCounts:
    """What the callers of a host use of a resource: requests or bytes, for example.

    Each may use a multiple of what is free (dynamic thresholds, Choudhury and Hahne 1998), so a caller that uses little finds room
    beside one that takes all it gets.
    """

    def __init__(self, table: WorkerTable, resource: str, limit: int = 0) -> None:
        """Count in a table; `limit` is for calls of `has_room` without one."""
        self._table = table
        self._limit = limit
        self._total = table.column(resource)
        self.columns = _Columns(table, resource)
        """By name of the caller, the column of the table with what it uses."""
        self._lock = Lock()
        self._active = 0
        """Number of callers that use any of it in this worker."""

    @property
    def total(self) -> int:
        """What all callers use on this host."""
        return self._table.total(self._total)

    @property
    def in_worker(self) -> int:
        """What all callers use in this worker."""
        return self._table.cells[self._total]

    def of(self, caller: Caller) -> int:
        """Return what a caller uses on this host."""
        return self._table.total(self.columns[caller.name])

    def of_in_worker(self, caller: Caller) -> int:
        """Return what a caller uses in this worker."""
        return self._table.cells[self.columns[caller.name]]

    def add(self, caller: Caller, amount: int) -> None:
        """Add to what a caller uses. Count first, then ask for room: two workers never take the same place. Thread-safe."""
        column, cells = self.columns[caller.name], self._table.cells
        with self._lock:
            cells[self._total] += amount
            if column != self._total:
                before = cells[column]
                self._active += (before + amount > 0) - (before > 0)
                cells[column] = before + amount

    def has_room(self, caller: Caller, more: int = 0, limit: int | None = None) -> bool:
        """Return whether a caller may use what it does, and `more`."""
        limit = self._limit if limit is None else limit
        total = self._table.total(self._total) + more  # a hot path: called several times per request
        if total <= limit:  # as usual; no caller uses more than all
            return True
        return self._table.total(self.columns[caller.name]) + more + _FACTOR * total <= (1 + _FACTOR) * limit

    def has_place(self, caller: Caller, limit: int, more: int = 0) -> bool:
        """Return the same for requests: up to half of an equal part, also while others exceed a limit that has just halved."""
        if self.has_room(caller, more, limit):
            return True
        is_small = self.of(caller) + more <= max(1, limit // (2 * max(1, self._active)))
        return is_small and self.total + more <= 2 * limit + 1

    def has_little(self, caller: Caller) -> bool:
        """Return whether a caller uses less than half of an equal part of what is in use in this worker."""
        cells = self._table.cells
        return 2 * cells[self.columns[caller.name]] * max(1, self._active) < cells[self._total]

    def until_served(self, caller: Caller, more: int = 0) -> int:
        """Estimate how much is served until all of a caller, and `more`, is, if callers are served in turn."""
        own, total = self.of(caller) + more, self.total + more
        return total if own == total else min(total, own * max(2, self._active))


class _Columns(dict[str, int]):
    """Columns by name of the caller; if there are too many callers, the column of the total for the others."""

    def __init__(self, table: WorkerTable, resource: str) -> None:
        super().__init__()
        self._table = table
        self._resource = resource

    def __missing__(self, caller: str) -> int:
        column = self._table.column(CALLER + SEPARATOR.join((self._resource, caller)))
        if column == NO_COLUMN:  # there are too many callers to tell them apart
            column = self._table.column(self._resource)
        self[caller] = column
        return column


class FairQueue(Generic[Work]):
    """Work that waits, in an order in which callers take turns: start-time fair queueing (Goyal, Vin and Cheng 1996).

    Each caller's work keeps its order, except that images of batches come behind single ones. Callers of one priority take turns;
    those of another one wait until nothing of a higher one does.
    """

    def __init__(self) -> None:
        self._flows: dict[_Flow, dict[Work, None]] = {}
        """What waits, in order of arrival."""
        self._now = [0.0] * (SHADOW + 1)
        """Start of the work of each priority that began last, on a virtual clock."""
        self._ends: dict[_Flow, float] = {}
        """End of the last work of each flow that began."""

    def __len__(self) -> int:
        return sum(map(len, self._flows.values()))

    def add(self, work: Work) -> None:
        """Add work behind that of its caller."""
        self._flows.setdefault(_flow(work), {})[work] = None

    def add_again(self, work: Sequence[Work]) -> None:
        """Add work of a call that failed before all other work of its callers."""
        for one in reversed(work):
            self._flows[_flow(one)] = {one: None, **self._flows.get(_flow(one), {})}

    def in_turn(self) -> list[Work]:
        """Return what waits with the priority of the next one, this one first."""
        if len(self._flows) == 1:
            return [*next(iter(self._flows.values()))]
        starts: list[tuple[float, Work]] = []
        priority = min(self._flows, default=(NORMAL,))[0]
        callers = self._callers(priority)
        for key, flow in self._flows.items():
            if key[0] != priority:
                continue
            start = self._place(key)[1]
            for work in flow:
                starts.append((start, work))
                start += _cost(work.turn, callers)
        return [work for _, work in sorted(starts, key=itemgetter(0))]

    def next(self) -> Work | None:
        """Return the work whose turn it is; None if nothing waits."""
        if not self._flows:
            return None
        return next(iter(self._flows[min(self._flows, key=self._place) if len(self._flows) > 1 else next(iter(self._flows))]))

    def begin(self, first: Work, *others: Work) -> None:
        """Remove work of one priority that begins together, the `next` one first, to whose start the clock is set; callers pay."""
        callers = 1 if len(self._flows) == 1 else self._callers(first.turn.caller.priority)
        for work in (first, *others):
            flow = _flow(work)
            priority, start = self._place(flow)
            if work is first:
                self._now[priority] = start
            self._ends[flow] = start + _cost(work.turn, callers)
            self._remove(flow, work)

    def discard(self, work: Work) -> None:
        """Remove work that nobody needs any more, if it still waits."""
        self._remove(_flow(work), work)

    def _remove(self, flow: "_Flow", work: Work) -> None:
        works = self._flows.get(flow, {})
        works.pop(work, None)
        if not works:
            self._flows.pop(flow, None)

    def _place(self, flow: "_Flow") -> tuple[int, float]:
        """Return the priority and the start of a flow on the virtual clock. This is a hot path, and slower with `max`."""
        now, end = self._now[flow[0]], self._ends.get(flow, 0.0)
        return flow[0], end if end > now else now  # noqa: FURB136

    def _callers(self, priority: int) -> int:
        return len({name for own, name, _ in self._flows if own == priority})


def _cost(turn: Turn, callers: int) -> float:
    cost = turn.cost * (_BATCH_COST if turn.is_batch else 1.0)
    share = turn.caller.fraction / (1 - turn.caller.fraction) if turn.caller.has_share else 0.0
    return cost / max(1.0, (callers - 1) * share)


_Flow = tuple[int, str, bool]
"""The work of a caller with a priority, single images or others."""


def _flow(work: HasTurn) -> _Flow:
    turn = work.turn
    return turn.caller.priority, turn.caller.name, turn.is_batch or turn.is_frame
