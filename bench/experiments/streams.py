"""Cameras that send more frames than a model can take: the age of the frames that are answered, and who gets the answers."""

import argparse
import asyncio
from collections.abc import Sequence

import uvloop

from bench.experiments.options import Commands, add_shared, count, positive
from bench.harness.lineup import DEFAULT, lineup_of
from bench.load.driver import Driver
from bench.load.images import Sample, unlabelled_samples
from bench.load.outcome import Outcome, merge_histograms
from bench.load.target import Target, local_target
from bench.report.progress import say
from bench.report.text import number, responses, table

MODELS = ("wait_20", "wait_50_batch8", "sim_gpu", "sim_gpu_batch1")
CALLS, MOST = 2, 1.1
"""A frame may be older than the interval, and a single request later than alone, by so many calls; the best camera gets at most so
many times the answers of the worst one."""

_SINGLE_RATE = 2.0  # requests without a stream per second
_WARM_UP_SECONDS = 3.0
_PATIENCE_SECONDS = 10.0


def run(options: argparse.Namespace) -> int:
    """Measure single requests alone, then beside the cameras; print both and whether the bars hold."""
    samples = [Sample("", unlabelled_samples()[0].body, None)]
    with lineup_of([options.model], options.workers) as lineup, lineup.start(lineup.contestant(DEFAULT, options.model)) as server:
        target = local_target(f"{server.url}/detect")
        say(f"{options.model}: alone")
        uvloop.run(_load(target, samples, _WARM_UP_SECONDS, options))
        alone = uvloop.run(_driver(target, samples, options.seconds).constant(_SINGLE_RATE))
        say(f"{options.model}: {options.cameras} cameras")
        single, *cameras = uvloop.run(_load(target, samples, options.seconds, options))
    say()
    print(describe(alone, single, cameras, 1e3 / options.rate))
    print(
        f"{options.model}, {options.workers} workers, {options.cameras} cameras of {options.rate:g} frames/s, {options.seconds:g} s"
    )
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("streams", help="cameras that send more frames than the model can take")
    command.add_argument("--model", choices=MODELS, default="wait_20", help="model to use")
    command.add_argument("--cameras", type=count, default=16, help="number of cameras, all of one caller")
    command.add_argument("--rate", type=positive, default=5.0, help="frames of each camera per second")
    command.add_argument("--reconnect", action="store_true", help="send each frame over a connection of its own")
    add_shared(command, seconds=60.0, workers=2)
    command.set_defaults(run=run)


def describe(alone: Outcome, single: Outcome, cameras: Sequence[Outcome], interval: float) -> str:
    """Format a table of the bars; a call is the median of single requests alone, `interval` is in milliseconds."""
    call, ages = alone.percentile(50), merge_histograms(camera.latency for camera in cameras)
    p50, p99 = (ages.get_value_at_percentile(percent) / 1e3 for percent in (50, 99))
    answers = [camera.correct for camera in cameras]
    rows = [
        ("age of an answered frame, p99 ms", p99, interval + CALLS * call),
        ("single request, p99 ms", single.percentile(99), alone.percentile(99) + CALLS * call),
        ("answers of the best camera, by those of the worst", max(answers), MOST * min(answers)),
    ]
    lines = [(name, *map(number, (value, bar, value / max(bar, 1))), "yes" if value <= bar else "NO") for name, value, bar in rows]
    alone_p99 = number(alone.percentile(99))
    return "\n".join(
        [
            table([("measured", "value", "bar", "ratio", "holds"), *lines]),
            f"alone: p50 {number(call)} ms, which is a call, p99 {alone_p99} ms; age p50 {number(p50)} ms; answers {sum(answers)}",
            f"single: {responses(single)}; first camera: {responses(cameras[0])}",
        ]
    )


def _driver(target: Target, samples: Sequence[Sample], seconds: float) -> Driver:
    driver = Driver(target, samples, seconds, patience=_PATIENCE_SECONDS)
    driver.counts_unfinished = False  # after the last frame of a camera, no newer one takes its place
    return driver


async def _load(target: Target, samples: Sequence[Sample], seconds: float, options: argparse.Namespace) -> list[Outcome]:
    """Send single requests, and the frames of the cameras, which begin one after the other within an interval."""

    async def film(number: int) -> Outcome:
        await asyncio.sleep(number / options.cameras / options.rate)
        driver = _driver(target._replace(stream=f"camera-{number}"), samples, seconds)
        driver.keeps_connections = not options.reconnect
        return await driver.constant(options.rate)

    return await asyncio.gather(_driver(target, samples, seconds).constant(_SINGLE_RATE), *map(film, range(options.cameras)))
