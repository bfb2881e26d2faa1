"""Batches of 64 images: latency relative to decoding and the model, and throughput relative to single requests."""

import argparse
import json
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import NamedTuple
from urllib.request import Request, urlopen

import numpy as np

from app.api.batch.body import MAX_IMAGES
from app.imaging.decode import decode
from app.imaging.fit import Letterbox
from app.imaging.header import PixelLimits, read_header
from bench.experiments.options import Commands, add_shared
from bench.harness.errors import ContestantError
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import Sample, unlabelled_samples

_MODEL = "sim_gpu"
# As in bench/models/sim_gpu/config.pbtxt.
_BATCH, _CALL_MS, _IMAGE_MS = 32, 8.0, 0.5
_MODEL_MS = math.ceil(MAX_IMAGES / _BATCH) * _CALL_MS + MAX_IMAGES * _IMAGE_MS
_BOUNDARY = "nereid-bench"
_LIMITS = PixelLimits(10**8, 10**8)
_LETTERBOX = Letterbox((640, 640), "center", enlarge=True, pad=114)
_BATCHES = 8
"""Batches per round."""


class Round(NamedTuple):
    """Measurements of one round, in milliseconds and images per second."""

    decoding: float
    """Decoding of 64 images, in as many threads as a worker has."""
    round_trip: float
    """Latency of a request with one image."""
    batch: float
    """Latency of a batch of 64 images."""
    single_rate: float
    batch_rate: float

    @property
    def latency_ratio(self) -> float:
        """Return the latency of a batch relative to its necessary work."""
        return self.batch / (max(self.decoding, _MODEL_MS) + self.round_trip)

    @property
    def throughput_ratio(self) -> float:
        """Return the throughput of batches relative to single requests."""
        return self.batch_rate / self.single_rate


def run(options: argparse.Namespace) -> int:
    """Measure, and print each round and the medians of the ratios."""
    samples = list(islice(cycle(unlabelled_samples(options.images)), MAX_IMAGES))
    # If decoding uses all cores, it is slowed down by the CPU time of client, gateway and Triton.
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    batch = Sample("batch", encode_form([sample.body for sample in samples]), frozenset())
    print(
        f"{_MODEL}, {MAX_IMAGES} images of {len(batch.body) / MAX_IMAGES / 1e3:.0f} kB, model time {_MODEL_MS:g} ms,"
        f" {options.workers} workers with {threads} decoding threads"
    )
    print("decoding ms  round trip ms  batch ms  ratio    single images/s  batched images/s  ratio")
    rounds: list[Round] = []
    with TemporaryDirectory(prefix="nereid-bench-") as logs, fixture_triton() as triton:
        lineup = Lineup(triton, options.workers, Path(logs), settings={"NEREID_DECODE_THREADS": str(threads)})
        with lineup.start(lineup.contestant(DEFAULT, _MODEL)) as server:
            _require_answers(f"{server.url}/detect/batch", batch)
            for _ in range(options.rounds):
                rounds.append(_measure(server.url, samples, batch, threads, options))
                one = rounds[-1]
                print(
                    f"{one.decoding:11.0f} {one.round_trip:14.1f} {one.batch:9.0f} {one.latency_ratio:6.2f}"
                    f" {one.single_rate:18.0f} {one.batch_rate:17.0f} {one.throughput_ratio:6.2f}",
                    flush=True,
                )
    print(f"a batch takes {median(one.latency_ratio for one in rounds):.2f} x (the longer of decoding and model, and a round trip)")
    print(f"batches have {median(one.throughput_ratio for one in rounds):.2f} x the throughput, {options.clients} clients")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("batch", help="batches of 64 images beside single requests, with the simulated GPU")
    add_shared(command, seconds=3.0, rounds=3, clients=4, workers=2, images=None)
    command.set_defaults(run=run)


def encode_form(images: Sequence[bytes]) -> bytes:
    """Encode a form with these images; its boundary is in the first line."""
    head = b'--%b\r\nContent-Disposition: form-data; name="images"; filename="%d.jpg"\r\n\r\n'
    boundary = _BOUNDARY.encode()
    parts = [head % (boundary, number) + image + b"\r\n" for number, image in enumerate(images)]
    return b"".join([*parts, b"--%b--\r\n" % boundary])


def _measure(url: str, samples: Sequence[Sample], batch: Sample, threads: int, options: argparse.Namespace) -> Round:
    clients, seconds = options.clients, options.seconds
    trip = drive(drive_closed_loop(f"{url}/detect", samples, clients=1, seconds=seconds, requests=MAX_IMAGES))
    images = [sample.body for sample in samples]
    decoding, ones = [], []
    for _ in range(_BATCHES):  # in turn, so that other work on the machine affects both
        decoding.append(_time_decoding(images, threads))
        ones.append(drive(drive_closed_loop(f"{url}/detect/batch", [batch], clients=1, seconds=30, requests=1)))
    single = drive(drive_closed_loop(f"{url}/detect", samples, clients=clients, seconds=seconds))
    batched = drive(drive_closed_loop(f"{url}/detect/batch", [batch], clients=clients, seconds=seconds))
    for outcome in (trip, *ones, single, batched):
        if outcome.failed:
            raise ContestantError(f"not all requests were answered: {outcome.statuses}")
    latency = median(one.percentile(50) for one in ones)
    return Round(median(decoding), trip.percentile(50), latency, single.rate, batched.rate * MAX_IMAGES)


def _time_decoding(images: Sequence[bytes], threads: int) -> float:
    """Return the time to draw these images with this number of threads, in milliseconds."""

    def draw(image: bytes) -> None:
        header, canvas = read_header(image, _LIMITS), np.empty((640, 640, 3), np.uint8)
        transform = _LETTERBOX.fit(header.width, header.height)
        _LETTERBOX.draw(decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(draw, images[:4]))
        started = perf_counter()
        list(pool.map(draw, images))
        return (perf_counter() - started) * 1e3


def _require_answers(url: str, batch: Sample) -> None:
    """Send a batch and check that each image succeeds."""
    kind = f"multipart/form-data; boundary={_BOUNDARY}"
    with urlopen(Request(url, batch.body, {"Content-Type": kind}), timeout=30) as response:  # noqa: S310 - it is http
        answer = json.load(response)
    if answer["processed_images"] != MAX_IMAGES:
        raise ContestantError(f"{answer['failed_images']} images of a batch failed: {answer['failures'][0]['error']}")
