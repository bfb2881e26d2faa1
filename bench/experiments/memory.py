"""The memory of each worker of a server over many requests."""

from collections.abc import Sequence

from bench.harness.contest import Load
from bench.harness.errors import ContestantError
from bench.harness.lineup import Lineup
from bench.harness.meters import MIB, Memory, worker_memory
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run

REQUESTS = 10_000
"""Requests per worker."""
STEP = 1000
"""Requests per worker between two readings of its memory."""

_STEP_SECONDS = 120.0


def show_memory(contestants: Sequence[tuple[str, str]], lineup: Lineup, load: Load) -> None:
    """Print the memory of each contestant's workers after every thousand requests per worker."""
    steps = f"after {STEP:,}, {2 * STEP:,} ... {REQUESTS:,} requests a worker (unshared in brackets)"
    print(f"\nMiB of each of {lineup.workers} workers {steps}")
    width = max(15, *(len(name) for name, _ in contestants))
    for name, model in contestants:
        try:
            held = _measure(name, model, lineup, load)
        except ContestantError as error:
            print(f"{name} is left out: {error}")
            continue
        cells = " ".join(f"{_largest(now, 'resident'):.0f}({_largest(now, 'unshared'):.0f})" for now in held)
        growth = (_largest(held[-1], "unshared") - _largest(held[1], "unshared")) / (len(held) - 2)
        print(f"{name:{width}} {cells}; {growth:+.2f} MiB unshared per {STEP:,} requests since the {2 * STEP:,}th", flush=True)


def _measure(name: str, model: str, lineup: Lineup, load: Load) -> list[list[Memory]]:
    contestant = lineup.contestant(name, model)
    held = []
    with lineup.start(contestant) as server:
        url = f"{server.url}/detect"
        for _ in range(REQUESTS // STEP):
            requests = STEP * contestant.workers
            run(drive_closed_loop(url, load.samples, clients=load.clients, seconds=_STEP_SECONDS, requests=requests))
            held.append(worker_memory(server.process, contestant.workers))
    return held


def _largest(workers: Sequence[Memory], what: str) -> float:
    """Return the memory of the largest worker in MiB."""
    return max((float(getattr(worker, what)) for worker in workers), default=0.0) / MIB
