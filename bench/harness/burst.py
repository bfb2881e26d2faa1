"""One burst of load on a freshly started server, and the recovery of the server."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import psutil
import uvloop

from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant, Lineup
from bench.harness.memory_sampler import MemorySampler
from bench.harness.meters import Meters, family, find_workers
from bench.harness.triton import triton_processes
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.overload import drive_arrivals, drive_crowd
from bench.report.measurements import Measurement, Overload, Run

T = TypeVar("T")

PEAK = "peak"
PEAK_CLIENTS = (4, 8, 16, 32)
RECOVERY_SECONDS = 5.0
"""Time between the end of a burst and the measurement of a single client."""
WATCH_SECONDS = 10.0
"""Duration of memory measurement after the end of a burst."""

_WARM_UP_CLIENTS, _WARM_UP_SECONDS = 4, 1.0
PROBE_SECONDS = 2.0
"""Duration of the measurement of a single client."""
_PROBE_PATIENCE = 8.0


class Burst(NamedTuple):
    """A load above the capacity of a server."""

    phase: str
    rate: float | None = None
    """Requests per second, independent of the server's speed; None if clients wait for responses."""
    clients: int | None = None
    is_polite: bool = False
    """Whether clients respect Retry-After."""


def measure_peak(lineup: Lineup, contestant: Contestant, samples: Sequence[Sample], seconds: float) -> Run:
    """Measure the throughput of clients that wait for responses, with the best number of clients.

    Raises:
        ContestantError: The server does not start, or does not listen any more.
    """
    with lineup.start(contestant) as server:
        url = f"{server.url}/detect"
        _drive(drive_crowd(url, samples, clients=_WARM_UP_CLIENTS, seconds=_WARM_UP_SECONDS))
        runs = []
        for clients in PEAK_CLIENTS:
            meters = _meters(lineup, contestant, server.process)
            measured = meters.read(_drive(drive_crowd(url, samples, clients=clients, seconds=seconds)))
            runs.append(_to_run(contestant, Burst(PEAK, clients=clients), measured))
    best = max(runs, key=lambda one: one.outcome.goodput)
    goodput = best.outcome.goodput
    return msgspec.structs.replace(best, figures={}, overload=Overload(phase=PEAK, offered=goodput, peak=goodput))


def measure_burst(  # noqa: PLR0913, PLR0917 - the parts of a burst
    lineup: Lineup, contestant: Contestant, samples: Sequence[Sample], burst: Burst, seconds: float, peak: float
) -> Run:
    """Measure a server before, during and after a burst.

    Args:
        lineup: Starts the server.
        contestant: The server.
        samples: Images to send.
        burst: The load.
        seconds: Its duration.
        peak: Capacity of the server, in correct responses per second.

    Raises:
        ContestantError: The server does not start, or does not listen any more.
    """
    with lineup.start(contestant) as server:
        url = f"{server.url}/detect"
        _drive(drive_crowd(url, samples, clients=_WARM_UP_CLIENTS, seconds=_WARM_UP_SECONDS))
        before = _drive(drive_crowd(url, samples, clients=1, seconds=PROBE_SECONDS))
        meters = _meters(lineup, contestant, server.process)
        with MemorySampler(find_workers(server.process, contestant.workers)) as memory:
            measured, after = _drive(_load_and_watch(url, samples, burst, seconds, meters))
    outcome = measured.outcome
    overload = Overload(
        phase=burst.phase,
        offered=burst.rate or outcome.requests / outcome.seconds,
        peak=peak,
        before_ms=_median(before),
        after_ms=after,
        memory=memory.series,
    )
    return _to_run(contestant, burst, measured, overload)


async def _load_and_watch(
    url: str, samples: Sequence[Sample], burst: Burst, seconds: float, meters: Meters
) -> tuple[Measurement, float | None]:
    """Send a burst; measure a single client some time after the last request was due, even if requests are unanswered."""
    if burst.rate is None:
        load = drive_crowd(url, samples, clients=burst.clients or 1, seconds=seconds, is_polite=burst.is_polite)
    else:
        load = drive_arrivals(url, samples, rate=burst.rate, seconds=seconds)

    async def measure() -> Measurement:
        return await asyncio.to_thread(meters.read, await load)

    async def probe() -> float | None:
        await asyncio.sleep(seconds + RECOVERY_SECONDS)
        try:
            return _median(await drive_crowd(url, samples, clients=1, seconds=PROBE_SECONDS, patience=_PROBE_PATIENCE))
        except OSError:  # the server no longer listens: it has not recovered
            return None

    measured, after, _ = await asyncio.gather(measure(), probe(), asyncio.sleep(seconds + WATCH_SECONDS))
    return measured, after


def _drive(load: Coroutine[Any, Any, T]) -> T:
    try:
        return uvloop.run(load)
    except OSError as error:
        raise ContestantError(f"the server does not accept connections any more: {error}") from error


def _meters(lineup: Lineup, contestant: Contestant, process: psutil.Process) -> Meters:
    def find() -> dict[str, list[psutil.Process]]:
        return {"gateway": family(process), **triton_processes([lineup.triton])}

    return Meters(find, [lineup.triton.address], contestant.model)


def _to_run(contestant: Contestant, burst: Burst, measured: Measurement, overload: Overload | None = None) -> Run:
    return Run(
        contestant=contestant.name,
        mode="overload",
        model=contestant.model,
        clients=burst.clients,
        rate=burst.rate,
        outcome=measured.outcome,
        cpu_ms=measured.cpu_ms,
        triton=measured.triton,
        triton_note=measured.triton_note,
        overload=overload,
    )


def _median(outcome: Outcome) -> float | None:
    return outcome.percentile(50) if outcome.correct else None
