"""A generic client, Locust, on a running server: both tasks at once, with varied images."""

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.experiments.options import Commands, add_shared
from bench.experiments.service import Plan, Service, add_service, check_warm_up, one_line, reach
from bench.harness.environments import LOCUST
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT
from bench.load import driver
from bench.load.images import given_samples
from bench.report.measurements import PERCENTILES
from bench.report.records import describe_machine
from bench.report.text import number, places, table

TASKS = ("detect", "classify")
"""Tasks of the client: tags in `bench/locustfile.py`."""

_STOP_SECONDS = 20
"""Maximum time for requests in progress at the end."""


class Entry(msgspec.Struct):
    """Requests to one path in Locust's `--json`."""

    name: str
    num_requests: int
    num_failures: int
    response_times: dict[int, int]
    """Number of requests by milliseconds, rounded to two digits."""
    start_time: float
    last_request_timestamp: float | None
    """Time of the last request, in seconds."""


def run(options: argparse.Namespace) -> int:
    """Print the results of each task; the exit code is 1 if a request failed."""
    if options.install:
        LOCUST.install()
    python = LOCUST.python()
    with one_line(options.url):
        samples = given_samples(options.image)
        url = f"{options.url.rstrip('/')}/{options.tasks[0]}"
        service = reach(options, url, Plan(options.clients, options.seconds))
        if service.is_elsewhere or service.target.tls:  # Locust would follow redirects, and repeat a failure for each request
            check_warm_up(url, driver.run(driver.Driver(service.target, samples, 30).closed(1, requests=1)))
    with TemporaryDirectory(prefix="nereid-locust-") as folder:
        for place, sample in enumerate(samples):
            Path(folder, f"{place}.jpg").write_bytes(sample.body)
        command = [str(python), *arguments(options, service, Path(folder))]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ContestantError(f"Locust ended with exit code {done.returncode}")
    entries = sorted(msgspec.json.decode(done.stdout, type=list[Entry]), key=lambda entry: TASKS.index(entry.name.strip("/")))
    print(places(describe_machine(), service.server))
    print(summary(entries))
    return 1 if any(entry.num_failures for entry in entries) or not entries else 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("locust", help="Locust, a generic client, on both tasks (a server must run)")
    add_service(command, "its path is a prefix of the routes")
    command.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="what to ask for")
    command.add_argument("--install", action="store_true", help="install Locust's environment first, if it is missing")
    add_shared(command, clients=8, seconds=20.0)
    command.set_defaults(run=run)


def arguments(options: argparse.Namespace, service: Service, images: Path) -> Sequence[str]:
    """Return the arguments for Python to run Locust headless on a folder of images."""
    values: dict[str, object] = {
        "locustfile": ROOT / "bench" / "locustfile.py",
        "host": options.url.rstrip("/"),
        "users": options.clients,
        "spawn-rate": options.clients,
        "run-time": f"{max(1, round(options.seconds))}s",
        "images": images,
        "stop-timeout": _STOP_SECONDS,
        "exit-code-on-error": 0,
        "key-file": options.key_file,
        "ca": options.ca,
        "requests": service.requests,
    }
    values = {name: value for name, value in values.items() if value is not None}
    named = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    polite = ["--polite"] if service.is_elsewhere else []
    return ["-P", "-m", "locust", "--headless", "--json", "--skip-log-setup", *named, *polite, "--tags", *options.tasks]


def summary(entries: Sequence[Entry]) -> str:
    """Format a table of the tasks."""
    rows = [["task", "requests/s", *(f"p{percent} ms" for percent in PERCENTILES), "failures"]]
    for entry in entries:
        seconds = (entry.last_request_timestamp or entry.start_time) - entry.start_time
        rate = entry.num_requests / seconds if seconds > 0 else None
        latencies = [number(percentile(entry.response_times, percent / 100)) for percent in PERCENTILES]
        rows.append([entry.name, number(rate), *latencies, f"{entry.num_failures:,} of {entry.num_requests:,}"])
    return table(rows)


def percentile(response_times: Mapping[int, int], share: float) -> float | None:
    """Return the time within which a share of the requests was answered; None without requests."""
    left = share * sum(response_times.values())
    for milliseconds, requests in sorted(response_times.items()):
        left -= requests
        if left <= 0:
            return milliseconds
    return None
