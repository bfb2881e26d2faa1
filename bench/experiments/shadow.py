"""What a request notices of a shadow: p50 and p99 with it, relative to the same route without, beside those of an A/A pair."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.experiments.options import Commands, add_shared, positive
from bench.experiments.progress import say
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.processes import Running
from bench.harness.triton import fixture_triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run as drive
from bench.load.images import Sample, unlabelled_samples
from bench.load.open_loop import drive_open_loop
from bench.load.outcome import Outcome
from bench.report.text import number, table

MODELS = ("wait_200", "wait_20", "sim_gpu")
P50_RATIO, P99_RATIO = 1.05, 1.15
"""The most that a shadow may cost."""

_ROUTES = ("without", "again", "shadow")
"""Routes to the same model: an A/A pair, and one with a shadow."""
_LOAD = 0.5  # of the capacity
_CAPACITY_CLIENTS = 8


def run(options: argparse.Namespace) -> int:
    """Send the same load to each route in turn; print the medians of the rounds, and of their ratios to the first route."""
    samples = unlabelled_samples(options.images)
    with fixture_triton() as triton, TemporaryDirectory(prefix="nereid-bench-") as folder:
        routes = Path(folder) / "routes.toml"
        shadow = f'shadow = {{to = "{options.shadow}", share = {options.share}}}'
        tables = [f'[{name}]\nto = "{options.model}"\n{shadow if name == "shadow" else ""}\n' for name in _ROUTES]
        routes.write_text("".join(tables), encoding="utf-8")
        lineup = Lineup(triton, options.workers, Path(folder), settings={"NEREID_ROUTES_FILE": str(routes)})
        with lineup.start(lineup.contestant(DEFAULT, options.model)) as server:
            rounds = list(_measure(server, samples, options))
            results = _results(server)
    say()
    rate = median(outcome.goodput for one in rounds for outcome in one.values())
    head = ("route", "p50", "p99", "p50 ratio", "p99 ratio", "failed", "holds")
    print(table([head, *(_row(name, rounds) for name in _ROUTES)]))
    print(
        f"{options.model}, {number(rate)} requests/s, {_LOAD:.0%} of its capacity; {options.shadow} gets {options.share:.0%} of"
        f" them: {', '.join(f'{count:.0f} {result}' for result, count in results.items())}; ms; medians of {options.rounds} rounds"
    )
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("shadow", help="what a request notices of a shadow, beside an A/A pair")
    command.add_argument("--model", choices=MODELS, default="wait_200", help="model that answers")
    command.add_argument("--shadow", choices=MODELS, default="sim_gpu", help="model of the shadow")
    command.add_argument("--share", type=positive, default=0.1, help="share of the images that the shadow gets")
    add_shared(command, seconds=8.0, rounds=5, workers=2, images=None)
    command.set_defaults(run=run)


def _measure(server: Running, samples: Sequence[Sample], options: argparse.Namespace) -> Iterator[Mapping[str, Outcome]]:
    """Yield the outcome of each route in each round; the order changes from round to round."""
    urls = {name: f"{server.url}/detect?model={name}" for name in _ROUTES}
    seconds = options.seconds / 4
    capacity = max(drive(drive_closed_loop(url, samples, clients=_CAPACITY_CLIENTS, seconds=seconds)).rate for url in urls.values())
    for turn in range(options.rounds):
        outcomes = {}
        for name in (*_ROUTES[turn % 3 :], *_ROUTES[: turn % 3]):
            say(f"round {turn + 1}: {name}")
            outcomes[name] = drive(drive_open_loop(urls[name], samples, rate=capacity * _LOAD, seconds=options.seconds))
        yield outcomes


def _results(server: Running) -> dict[str, float]:
    """Read what came of the images for the shadow."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families if family.name == "api_shadow_images" for sample in family.samples]
    return {sample.labels["result"]: sample.value for sample in samples if sample.name.endswith("_total")}


def _row(name: str, rounds: Sequence[Mapping[str, Outcome]]) -> tuple[str, ...]:
    p50, p99 = (median(one[name].percentile(percent) for one in rounds) for percent in (50, 99))
    ratios = [median(one[name].percentile(percent) / one["without"].percentile(percent) for one in rounds) for percent in (50, 99)]
    holds = ratios[0] <= P50_RATIO and ratios[1] <= P99_RATIO
    failed = median(one[name].failed for one in rounds)
    return name, number(p50), number(p99), *(f"{ratio:.3f}" for ratio in ratios), f"{failed:.1%}", "yes" if holds else "NO"
