"""How many processes, and how many threads that decode in each, are best for this machine?"""

import os
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from bench import processes, versus
from bench.versus import Lineup, Round, samples_of


def report(seconds: float, rounds: int, clients: int, folder: Path | None) -> int:
    """Sweep both against the null model, in interleaved rounds, pixels in shared memory."""
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, cores, cores + 1, 2 * cores + 1})
    cases = [(workers, threads) for workers in counts for threads in (1, 2, 4)]
    results: dict[tuple[int, int], list[Round]] = {case: [] for case in cases}
    samples = samples_of(folder)
    with TemporaryDirectory(prefix="nereid-bench-") as logs, processes.triton(with_real=False) as triton:
        for _ in range(rounds):
            for workers, threads in cases:
                lineup = Lineup(triton, workers, Path(logs), {"NEREID_DECODE_THREADS": str(threads)})
                results[workers, threads].append(versus.alone(lineup, "nereid_shm", "null", samples, clients, seconds))
    print(f"{cores} cores, {clients} clients, null model, medians of {rounds} interleaved rounds of {seconds:g} s")
    print("workers  threads each    req/s   p99 ms   gateway's CPU, ms per request")
    for (workers, threads), held in results.items():
        rate, p99 = median(one.rate for one in held), median(one.p99 for one in held)
        print(f"{workers:7} {threads:13} {rate:8.0f} {p99:8.0f} {median(one.cpu_gateway for one in held):8.2f}")
    return 0
