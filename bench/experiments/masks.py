"""Masks of 30 objects in a picture of 12 megapixels, beside its boxes alone: latency, and how long the event loop is busy."""

import argparse
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import perf_counter
from urllib.parse import urlsplit
from urllib.request import urlopen

from bench.experiments.options import Commands, add_shared
from bench.harness.errors import ContestantError
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import Sample, large_sample
from bench.report.text import number, table

_MODEL = "sim_gpu_masks"
FORMATS = ("none", "polygon", "rle", "png")
"""Values of `masks`; the others are compared with the first one."""
# As in bench/models/model.py.
_OBJECTS = 30
_PAUSE_SECONDS = 0.001


def run(options: argparse.Namespace) -> int:
    """Measure all formats of masks in turn; print the medians of the rounds, and the longest wait for `/livez`."""
    sample = large_sample()._replace(expected=frozenset())
    latencies: dict[str, list[float]] = {masks: [] for masks in FORMATS}
    waits: dict[str, list[float]] = {masks: [] for masks in FORMATS}
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as logs:
        lineup = Lineup(triton, options.workers, Path(logs))
        with lineup.start(lineup.contestant(DEFAULT, _MODEL)) as server:
            urls = {masks: f"{server.url}/segment?model={_MODEL}&masks={masks}" for masks in FORMATS}
            sizes = {masks: _require_answer(url, sample, has_masks=masks != "none") for masks, url in urls.items()}
            for _ in range(options.rounds):
                for masks, url in urls.items():
                    with _polling(server.url, waits[masks]):
                        outcome = drive(drive_closed_loop(url, [sample], clients=options.clients, seconds=options.seconds))
                    if outcome.failed:
                        raise ContestantError(f"not all requests were answered: {outcome.statuses}")
                    latencies[masks].append(outcome.percentile(50))
    boxes = latencies["none"]
    rows = [
        (
            masks,
            number(median(own)),
            number(median(one / other for one, other in zip(own, boxes, strict=True))),
            number(sizes[masks] / 1e3),
            number(sorted(waits[masks])[len(waits[masks]) * 99 // 100]),
            number(max(waits[masks])),
        )
        for masks, own in latencies.items()
    ]
    print(table([("masks", "p50 ms", "/ none", "kB", "/livez p99 ms", "/livez max ms"), *rows]))
    print(f"{_OBJECTS} objects, {options.clients} clients, {options.workers} workers; medians of {options.rounds} rounds")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("masks", help="masks as polygons, RLE and PNG beside boxes alone, with the simulated GPU")
    add_shared(command, seconds=3.0, rounds=5, clients=1, workers=1)
    command.set_defaults(run=run)


def _require_answer(url: str, sample: Sample, *, has_masks: bool) -> int:
    """Check that all objects are found, with or without masks; return the size of the response in bytes."""
    with urlopen(url, sample.body, timeout=30) as response:  # noqa: S310 - it is http
        body: bytes = response.read()
    if [("mask" in found) for found in json.loads(body)["detections"]] != [has_masks] * _OBJECTS:
        raise ContestantError(f"{url} does not return {_OBJECTS} objects as asked")
    return len(body)


@contextmanager
def _polling(url: str, waits: list[float]) -> Iterator[None]:
    """Ask for `/livez`, which the event loop answers at once, until the block ends; append each wait in milliseconds.

    This is an upper bound of the time for which the loop is busy: on shared cores the waits have those for a core as well.
    """
    is_over = Event()

    def poll() -> None:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        while not is_over.wait(_PAUSE_SECONDS):
            started = perf_counter()
            connection.request("GET", "/livez")
            connection.getresponse().read()
            waits.append((perf_counter() - started) * 1e3)
        connection.close()

    thread = Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
