"""A flame graph of a worker of a running service, recorded while requests were slow."""

import math
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.experiments.service import read_key
from bench.harness.errors import ContestantError
from bench.harness.meters import cpu_seconds, family, listeners
from bench.harness.py_spy import recording

_WINDOW_SECONDS = 5
_CHOICE_SECONDS = 1
_TITLE = re.compile(r" worker-\d+ *$")
_BUCKET = "api_request_duration_seconds_bucket"


def record(pid: int | None, url: str | None, key_file: Path | None, slow_ms: int, seconds: int, out: Path) -> str:  # noqa: PLR0913, PLR0917 - the command's options
    """Record windows of some seconds of the busiest worker, and keep the first during which requests were slow.

    Args:
        pid: The service's process, or one of its workers; None for what listens at the URL.
        url: URL of the service, or `unix:/path` of its socket; None for the socket of the workers. One of the two must be given.
        key_file: File with an API key for its metrics; None for none.
        slow_ms: Milliseconds above which a request is slow; a bound of the service's histogram.
        seconds: Seconds to record at most.
        out: SVG file to write.

    Returns:
        What was recorded.

    Raises:
        ContestantError: No request was slow, or the service cannot be found, asked or recorded.
    """
    window = min(seconds, _WINDOW_SECONDS)
    workers = _find_workers(pid, url)
    where = url if url and not url.startswith("unix:") else _address(workers[0])
    with _connect(where, key_file) as client, TemporaryDirectory(dir=out.resolve().parent) as folder:
        for _ in range(seconds // window):
            worker = _busiest(_find_workers(pid, url))
            graph, before = Path(folder, "graph.svg"), _count_slow(client, slow_ms)
            with recording(worker, window, graph):
                pass
            slow = _count_slow(client, slow_ms) - before
            if slow > 0 and graph.is_file():
                graph.replace(out)
                return f"{out}: {window} s of worker {worker}; meanwhile {slow:.0f} requests to all workers took over {slow_ms} ms"
    raise ContestantError(f"no request took over {slow_ms} ms within {seconds // window * window} s")


def _find_workers(pid: int | None, url: str | None) -> list[psutil.Process]:
    if pid:
        found, where = family(_process(pid)), f"process {pid} is not a Nereid: it is no worker, and has none"
    else:
        found, where = (
            _listeners(url or ""),
            f"no worker that this user may watch listens at {url}; behind NGINX: unix:PATH, or --pid",
        )
    workers = [*filter(_is_worker, found)]
    if not workers:
        raise ContestantError(where)
    return workers


def _is_worker(process: psutil.Process) -> bool:
    with suppress(psutil.Error):  # it has ended
        return _TITLE.search(" ".join(process.cmdline())) is not None
    return False


def _process(pid: int) -> psutil.Process:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess as error:
        raise ContestantError(f"there is no process {pid}") from error


def _listeners(url: str) -> list[psutil.Process]:
    """Find who listens at a URL of this machine, at whose addresses alone a socket can be bound."""
    if not url.startswith("unix:"):
        try:
            host = urlsplit(url).hostname or ""
            version, *_, (ip, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
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
