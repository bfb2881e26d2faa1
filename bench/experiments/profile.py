"""A flame graph of one worker, recorded by py-spy: of a gateway under load, or of a service while its requests are slow."""

import argparse
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from app.telemetry.metrics import REQUEST_BOUNDS
from bench.experiments.options import Commands, count
from bench.experiments.service import read_key
from bench.harness.errors import ContestantError
from bench.harness.lineup import lineup_of
from bench.harness.meters import cpu_seconds, family, listeners
from bench.load.driver import Driver
from bench.load.driver import run as drive
from bench.load.images import unlabelled_samples

_NAME, _WORKERS, _CLIENTS = "nereid_shm", 2, 32
_WARM_UP_SECONDS = 2
_WINDOW_SECONDS = 5
_CHOICE_SECONDS = 1
_SAMPLES_PER_SECOND = 200
_WRITE_SECONDS = 60
_IDLE = "No stack counts found"
_TITLE = re.compile(r" worker-\d+ *$")
_BUCKET = "api_request_duration_seconds_bucket"


def run(options: argparse.Namespace) -> int:
    """Write a flame graph of the busiest worker of a running service, or else of a gateway under load."""
    if options.pid or options.url:
        try:
            print(_record_slow(options))
        except (OSError, ValueError, httpx.InvalidURL) as error:
            raise ContestantError(str(error)) from error
        return 0
    samples = unlabelled_samples()
    with lineup_of(["null"], _WORKERS) as lineup, lineup.start(lineup.contestant(_NAME, "null")) as server:
        url = f"{server.url}/detect"
        drive(Driver(url, samples, _WARM_UP_SECONDS).closed(_CLIENTS))
        busiest = max(filter(_is_worker, family(server.process)), key=cpu_seconds)
        with _recording(busiest.pid, options.seconds, options.out):
            outcome = drive(Driver(url, samples, options.seconds + 1).closed(_CLIENTS))
    print(f"{options.out}: one of {_WORKERS} workers of {_NAME}, {outcome.rate:.0f} requests/s during the recording")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("profile", help="a flame graph of a worker under load, or while its requests are slow, by py-spy")
    command.add_argument("seconds", type=count, nargs="?", default=60, help="seconds to record, or to wait for slow requests")
    command.add_argument("out", type=Path, nargs="?", default=Path("profile.svg"), help="SVG file to write")
    live = command.add_argument_group("a service that runs on this machine; no load is sent")
    live.add_argument("--url", help="URL at which it listens, or unix:PATH; with --pid, only that of its metrics")
    live.add_argument("--pid", type=count, help="its process, or one of its workers")
    live.add_argument("--key-file", type=Path, help="file with an API key that has the scope health")
    bounds = [round(bound * 1e3) for bound in REQUEST_BOUNDS]
    live.add_argument("--slow", type=int, choices=bounds, default=1000, help="milliseconds above which a request is slow")
    command.set_defaults(run=run)


@contextmanager
def _recording(pid: int, seconds: int, out: Path) -> Iterator[None]:
    """Record a process from the start of the block on; at its end, wait for the flame graph.

    There is no flame graph if the process was idle all the time.

    Raises:
        ContestantError: py-spy is not installed, or fails; the message has its reason.
    """
    program = shutil.which("py-spy")
    if program is None:
        raise ContestantError("py-spy is not installed; run: ./just")
    command = [program, "record", "--nonblocking", "--duration", str(seconds), "--rate", str(_SAMPLES_PER_SECOND)]
    command += ["--output", str(out.resolve()), "--pid", str(pid)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as recorder:
        try:
            yield
            _, said = recorder.communicate(timeout=seconds + _WRITE_SECONDS)
        finally:
            recorder.kill()
    if recorder.returncode and _IDLE in said:
        out.unlink()
    elif recorder.returncode:
        reason = said.partition("\n")[0].removeprefix("Error: ")
        raise ContestantError(f"py-spy: {reason}\nWithout root it needs a process of this user, and kernel.yama.ptrace_scope = 0")


def _record_slow(options: argparse.Namespace) -> str:
    """Record windows of some seconds of the busiest worker, and keep the first during which requests were slow."""
    window = min(options.seconds, _WINDOW_SECONDS)
    workers, url, slow_ms = _find_workers(options), options.url, options.slow
    where = url if url and not url.startswith("unix:") else _address(workers[0])
    with _connect(where, options.key_file) as client, TemporaryDirectory(dir=options.out.resolve().parent) as folder:
        for _ in range(options.seconds // window):
            worker = _busiest(_find_workers(options))
            graph, before = Path(folder, "graph.svg"), _count_slow(client, slow_ms)
            with _recording(worker, window, graph):
                pass
            slow = _count_slow(client, slow_ms) - before
            if slow > 0 and graph.is_file():
                graph.replace(options.out)
                found = f"{slow:.0f} requests to all workers took over {slow_ms} ms"
                return f"{options.out}: {window} s of worker {worker}; meanwhile {found}"
    raise ContestantError(f"no request took over {slow_ms} ms within {options.seconds // window * window} s")


def _find_workers(options: argparse.Namespace) -> list[psutil.Process]:
    if options.pid:
        try:
            found = family(psutil.Process(options.pid))
        except psutil.NoSuchProcess as error:
            raise ContestantError(f"there is no process {options.pid}") from error
        message = f"process {options.pid} is not a Nereid: it is no worker, and has none"
    else:
        found = _listeners(options.url)
        message = f"no worker that this user may watch listens at {options.url}; behind NGINX: unix:PATH, or --pid"
    workers = [*filter(_is_worker, found)]
    if not workers:
        raise ContestantError(message)
    return workers


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended
        return _TITLE.search(" ".join(process.cmdline())) is not None
    return False


def _listeners(url: str) -> list[psutil.Process]:
    """Find who listens at a URL of this machine, at whose addresses alone a socket can be bound."""
    if not url.startswith("unix:"):
        try:
            version, *_, (ip, *_) = socket.getaddrinfo(urlsplit(url).hostname or "", None, type=socket.SOCK_STREAM)[0]
            with socket.socket(version) as probe:
                probe.bind((ip, 0))
        except OSError as error:
            raise ContestantError(f"{url} is not on this machine, whose processes alone can be recorded") from error
    return listeners(url)


def _address(worker: psutil.Process) -> str:
    """Return the URL of a worker's socket, as this process can reach it."""
    try:
        connections = worker.net_connections("all")
    except psutil.Error as error:
        raise ContestantError(f"the sockets of process {worker.pid} cannot be seen; run this as root") from error
    for connection in connections:
        if connection.family == socket.AF_UNIX and connection.laddr:
            return f"unix:/proc/{worker.pid}/root{connection.laddr}"
        if connection.status == psutil.CONN_LISTEN:
            ip, port = connection.laddr
            return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"
    raise ContestantError(f"process {worker.pid} does not listen anywhere")


def _connect(url: str, key_file: Path | None) -> httpx.Client:
    path = url.removeprefix("unix:") if url.startswith("unix:") else None
    headers = {"X-API-Key": read_key(key_file)} if key_file else {}
    transport = httpx.HTTPTransport(uds=path)
    return httpx.Client(transport=transport, base_url="http://localhost" if path else url, headers=headers, timeout=30)


def _busiest(workers: list[psutil.Process]) -> int:
    """Return the id of the worker that uses most CPU time now; the sum since its start would prefer old ones."""
    before = {worker: cpu_seconds(worker) for worker in workers}
    time.sleep(_CHOICE_SECONDS)
    return int(max(workers, key=lambda worker: cpu_seconds(worker) - before[worker]).pid)


def _count_slow(client: httpx.Client, slow_ms: int) -> float:
    """Ask the service how many requests of all its workers have been slow, apart from these questions."""
    try:
        response = client.get("/metrics")
    except httpx.HTTPError as error:
        raise ContestantError(f"the metrics of the service cannot be read: {error}") from error
    if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        raise ContestantError(f"{response.url} needs an API key with the scope health: --key-file")
    if response.status_code != httpx.codes.OK:
        raise ContestantError(f"{response.url} answers with status {response.status_code}")
    samples = [one for metric in text_string_to_metric_families(response.text) for one in metric.samples if one.name == _BUCKET]
    signs = {math.inf: 1, slow_ms / 1e3: -1}
    return math.fsum(signs.get(float(one.labels["le"]), 0) * one.value for one in samples if one.labels["endpoint"] != "/metrics")
