"""What each worker of a server holds while it answers request after request."""

from collections.abc import Sequence

from bench.harness.contest import Load
from bench.harness.entrants import Lineup
from bench.harness.errors import ContestantError
from bench.harness.meters import MIB, Memory, worker_memory
from bench.load.closed import drive_closed
from bench.load.driver import run

REQUESTS = 10_000
"""Per worker."""
STEP = 1000
"""Requests per worker between two looks at its memory."""

_STEP_SECONDS = 120.0


def show_memory(entrants: Sequence[tuple[str, str]], lineup: Lineup, load: Load) -> None:
    """Print the memory of each entrant's workers after every thousand requests per worker."""
    steps = f"after {STEP:,}, {2 * STEP:,} ... {REQUESTS:,} requests a worker (unshared in brackets)"
    print(f"\nMiB of each of {lineup.workers} workers {steps}")
    width = max(15, *(len(name) for name, _ in entrants))
    for name, model in entrants:
        try:
            held = _measure(name, model, lineup, load)
        except ContestantError as error:
            print(f"{name} is left out: {error}")
            continue
        cells = " ".join(f"{_most(now, 'resident'):.0f}({_most(now, 'unshared'):.0f})" for now in held)
        growth = (_most(held[-1], "unshared") - _most(held[1], "unshared")) / (len(held) - 2)
        print(f"{name:{width}} {cells}; {growth:+.2f} MiB unshared per {STEP:,} requests since the {2 * STEP:,}th", flush=True)


def _measure(name: str, model: str, lineup: Lineup, load: Load) -> list[list[Memory]]:
    entrant = lineup.entrant(name, model)
    held = []
    with lineup.start(entrant) as server:
        url = f"{server.url}/detect"
        for _ in range(REQUESTS // STEP):
            requests = STEP * entrant.workers
            run(drive_closed(url, load.samples, clients=load.clients, seconds=_STEP_SECONDS, requests=requests))
            held.append(worker_memory(server.process, entrant.workers))
    return held


def _most(workers: Sequence[Memory], what: str) -> float:
    """Return the memory of the largest worker, MiB."""
    return max((float(getattr(worker, what)) for worker in workers), default=0.0) / MIB
