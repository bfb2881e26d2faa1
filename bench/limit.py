"""What this machine could do at most, and how far Nereid is from it."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import load, processes, stages, versus
from bench.processes import ContestantError
from bench.versus import Lineup, Round, samples_of


def report(seconds: float, clients: int, workers: int, folder: Path | None) -> int:
    """Measure decode and letterbox without a server, HTTP without anything behind it, and Nereid with the null model."""
    cores = len(os.sched_getaffinity(0))
    with stages.written(folder) as files:
        bare = stages.together("nereid", files, seconds, cores, stages.PIXELS)
        reused = stages.together("nereid_shm", files, seconds, cores, stages.PIXELS)
    samples = samples_of(folder)
    served: dict[str, Round] = {}
    with TemporaryDirectory(prefix="nereid-bench-") as logs:
        http, http_cpu = _http_only(Path(logs), samples, seconds, clients, workers)
        with processes.triton(with_real=False) as triton:
            passed, passed_cpu = _http_only(Path(logs), samples, seconds, clients, workers, triton.settings.triton_url)
            lineup = Lineup(triton, workers, Path(logs))
            for name in ("nereid_inline", "nereid_shm", "nereid_file"):
                try:
                    served[name] = versus.alone(lineup, name, "null", samples, clients, seconds)
                except ContestantError as error:
                    print(f"{name} is left out: {error}", file=sys.stderr)
    pixels = sum(one.pictures / one.seconds for one in reused)
    cpu = sum(one.total for one in reused) / cores
    print(f"{cores} cores; the client and Triton have to share them with the server, the bare loops do not")
    print(f"decode and letterbox alone    {pixels:7.0f} pictures/s, {cpu:.2f} ms CPU each (into a frame used again)")
    fresh, fresh_cpu = sum(one.pictures / one.seconds for one in bare), sum(one.total for one in bare) / cores
    print(f"  into a new frame each time  {fresh:7.0f} pictures/s, {fresh_cpu:.2f} ms CPU each")
    print(f"HTTP alone, bodies read       {http:7.0f} requests/s, {http_cpu:.2f} ms CPU each, {clients} clients")
    print(f"  and passed on to Triton     {passed:7.0f} requests/s, {passed_cpu:.2f} ms CPU each")
    for name, one in served.items():
        is_file = name == "nereid_file"
        limit, least, of = (passed, passed_cpu, "HTTP and Triton") if is_file else (pixels, cpu, "decode and letterbox")
        print(
            f"{name:29} {one.rate:7.0f} requests/s = {one.rate / limit:.0%} of {of} alone;"
            f" {one.cpu_gateway:.2f} ms CPU = {one.cpu_gateway / least:.2f} x"
        )
    return 0


def _http_only(  # noqa: PLR0913, PLR0917
    logs: Path, samples: list[load.Sample], seconds: float, clients: int, workers: int, triton: str = ""
) -> tuple[float, float]:
    """Measure requests per second, and CPU milliseconds of each."""
    port = processes.free_ports(1)[0]
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), str(workers)]
    with processes.running(command, {"BENCH_TRITON": triton}, port, "/", logs / "http_only.log") as server:
        load.run(load.closed(f"{server.url}/detect", samples, clients=clients, seconds=1))
        before = server.cpu()
        outcome = load.run(load.closed(f"{server.url}/detect", samples, clients=clients, seconds=seconds))
        return outcome.rate, (server.cpu() - before) / max(outcome.requests, 1) * 1e3
