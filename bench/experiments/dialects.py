"""Cost of each dialect relative to the gateway's own interface, and whether responses are in time for Frigate."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import NamedTuple
from urllib.parse import urlsplit

from PIL import Image, ImageOps

from bench.experiments.options import Commands, add_shared
from bench.experiments.progress import say
from bench.harness.errors import ContestantError
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.meters import busiest, precise_cpu_seconds
from bench.harness.triton import fixture_triton, pulled
from bench.load.closed_loop import drive_closed_loop
from bench.load.dialects import PAIRS, Pair, Request, deepstack
from bench.load.driver import run as drive
from bench.load.images import Sample, unlabelled_samples
from bench.models.repository import YOLO
from bench.report.text import number, table

_MODEL = "objects"
"""Takes the file, and returns ten objects at once, to measure only HTTP, checks and the encoding of the response."""
_NOTHING_ELSE = "(none)"
"""The gateway's own request compared with itself, to show the noise of the differences."""
_PAUSE_SECONDS = 0.001
"""Pause after a response, for the worker's work after sending it."""
_WARM_UP_REQUESTS = 50
_PATIENCE_SECONDS = 30
_OK, _NOT_FOUND = 200, 404

# Frigate's frigate/detectors/plugins/deepstack.py: the default of `api_timeout`, and a JPEG of the size of its model.
_FRIGATE_MS = 100.0
_FRIGATE_SIDE = 320
_FRIGATE_CLIENTS = (1, 2, 4)


class Spent(NamedTuple):
    """Cost of one request, in microseconds."""

    latency: float
    """Latency, measured by the client."""
    cpu: float
    """CPU time of the gateway's worker."""


class Round(NamedTuple):
    """Both requests of a pair, one after the other, so that other work on the machine affects both."""

    own: Spent
    other: Spent


def run(options: argparse.Namespace) -> int:
    """Print the cost of each dialect, then the share of responses in time for Frigate."""
    jpeg = unlabelled_samples(options.images)[0].body
    real = [YOLO] if pulled(YOLO) else []
    with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton(real) as triton:
        lineup = Lineup(triton, 1, Path(logs))
        with lineup.start(lineup.contestant("nereid_file", _MODEL)) as server, _connected(server.url) as connection:
            pairs, left_out = _find(connection, jpeg)
            rounds = _measure(connection, busiest(server.process), pairs, options.rounds)
        print(describe(rounds))
        print(f"us; a JPEG of {len(jpeg) / 1e3:.0f} kB, a model that finds ten objects at once, one worker, one client; medians of")
        print(f"{options.rounds} pairs of requests, in brackets the middle half of the differences")
        for line in left_out:
            print(line)
        models = ["sim_gpu", *real]
        rows = [row for model in models for row in _measure_frigate(lineup, model, jpeg, options.seconds)]
    print()
    print(table([["model", "clients", "answers/s", "p50 ms", "p99 ms", f"within {_FRIGATE_MS:g} ms"], *rows]))
    print(f"as Frigate's detector deepstack: {_FRIGATE_SIDE} x {_FRIGATE_SIDE} pixels, one worker, {options.seconds:g} s each")
    if not real:
        print(f"{YOLO} is left out: it has not been pulled; run: ./just pull {YOLO}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("dialects", help="what each dialect costs beside /detect; answers in time for Frigate")
    add_shared(command, rounds=1000, seconds=5.0, images=None)
    command.set_defaults(run=run)


def describe(rounds: dict[str, list[Round]]) -> str:
    """Format a table of dialects: medians of both latencies, and of the differences."""
    rows = [("dialect", "own", "dialect's", "more latency", "more CPU")]
    for name, measured in rounds.items():
        own, other = (median(spent.latency for spent in side) for side in zip(*measured, strict=True))
        latency = _spread([one.other.latency - one.own.latency for one in measured])
        cpu = _spread([one.other.cpu - one.own.cpu for one in measured])
        rows.append((name, f"{own:.0f}", f"{other:.0f}", latency, cpu))
    return table(rows)


def frigate_request(jpeg: bytes) -> Request:
    """Make Frigate's request for an image."""
    with Image.open(BytesIO(jpeg)) as image:
        fitted = ImageOps.fit(image.convert("RGB"), (_FRIGATE_SIDE, _FRIGATE_SIDE))
    file = BytesIO()
    fitted.save(file, "JPEG")
    return deepstack(file.getvalue(), "").other


def _spread(differences: Sequence[float]) -> str:
    lower, middle, upper = quantiles(differences) if len(differences) > 1 else [*differences] * 3
    return f"{middle:.0f} ({lower:.0f}..{upper:.0f})"


@contextmanager
def _connected(url: str) -> Iterator[HTTPConnection]:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=_PATIENCE_SECONDS)
    try:
        yield connection
    finally:
        connection.close()


def _find(connection: HTTPConnection, jpeg: bytes) -> tuple[dict[str, Pair], list[str]]:
    """Return the pairs of the dialects that the server has, after a warm-up, and the reasons for omitting others."""
    pairs: dict[str, Pair] = {}
    left_out = []
    for name, make in PAIRS.items():
        pair = make(jpeg, f"{_MODEL}_file")
        try:
            for request in pair:
                for _ in range(_WARM_UP_REQUESTS):
                    _send(connection, request)
        except ContestantError as error:
            left_out.append(f"{name} is left out: {error}")
        else:
            pairs.setdefault(_NOTHING_ELSE, Pair(pair.own, pair.own))
            pairs[name] = pair
    return pairs, left_out


def _measure(connection: HTTPConnection, worker: int, pairs: dict[str, Pair], rounds: int) -> dict[str, list[Round]]:
    measured: dict[str, list[Round]] = {name: [] for name in pairs}
    for turn in range(rounds):
        say(f"{turn} of {rounds} rounds")
        for name, (own, other) in pairs.items():
            first, second = (_spend(connection, worker, request) for request in ((own, other) if turn % 2 else (other, own)))
            measured[name].append(Round(first, second) if turn % 2 else Round(second, first))
    say()
    return measured


def _spend(connection: HTTPConnection, worker: int, request: Request) -> Spent:
    cpu, start = precise_cpu_seconds(worker), perf_counter()
    _send(connection, request)
    latency = perf_counter() - start
    sleep(_PAUSE_SECONDS)
    return Spent(latency * 1e6, (precise_cpu_seconds(worker) - cpu) * 1e6)


def _send(connection: HTTPConnection, request: Request) -> None:
    """Send a request and read the response.

    Raises:
        ContestantError: The server does not have this route, or rejects the request.
    """
    connection.request("POST", request.path, request.body, request.headers)
    response = connection.getresponse()
    answer = response.read()
    if response.status == _NOT_FOUND:
        raise ContestantError(f"the server does not have {request.path}, or not for this request")
    if response.status != _OK:
        raise ContestantError(f"{request.path} is answered with {response.status}: {answer[:200].decode('utf-8', 'replace')}")


def _measure_frigate(lineup: Lineup, model: str, jpeg: bytes, seconds: float) -> list[list[str]]:
    """Send Frigate's request for an image to a gateway with this model; return a row for each number of clients."""
    request = frigate_request(jpeg)
    sample = Sample("Frigate", request.body, frozenset())
    rows = []
    with lineup.start(lineup.contestant(DEFAULT, model)) as server:
        for clients in _FRIGATE_CLIENTS:
            outcome = drive(drive_closed_loop(f"{server.url}{request.path}", [sample], clients=clients, seconds=seconds))
            latencies = (number(outcome.percentile(percent)) for percent in (50, 99))
            rows.append([model, str(clients), number(outcome.rate), *latencies, f"{outcome.share_within(_FRIGATE_MS):.1%}"])
    return rows
