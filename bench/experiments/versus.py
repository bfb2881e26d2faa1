"""Nereid compared with other servers: same Triton, images, client and number of workers, in interleaved rounds."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from bench.experiments.memory import show_memory
from bench.experiments.options import Commands, add_shared, describe
from bench.experiments.progress import say
from bench.harness.contest import Load, hold_contest
from bench.harness.environments import REFERENCE
from bench.harness.lineup import BATCH1, NAMES, NEREID, Lineup, add_counterparts
from bench.harness.processes import require_checkout
from bench.harness.triton import Triton, fixture_triton
from bench.load.images import Sample, classifier_samples, coco_samples, large_sample, unlabelled_samples
from bench.models.repository import CLASSIFIER, YOLO
from bench.report.contest_text import contest_text
from bench.report.contests import Contest
from bench.report.records import make_record, save_record

MODELS = ("null", "sim_gpu", YOLO)
CONTESTS = ("load", "one", "photo", "batching", "in_process", "memory")
"""Kinds of contests.

`load`: all contestants, `--clients` clients. `one`: the same with one client. `photo`: one client, an image of 12 megapixels,
which all but `nereid_file` decode whole. `batching`: the simulated GPU against the same without batches, 64 clients.
`in_process`: a detector and a classifier through Triton against ONNX Runtime in the web server's process, 1 and 6 clients.
`memory`: the memory of each worker over 10,000 requests.
"""

_DEFAULTS = {"null": ("load",), "sim_gpu": ("load", "batching"), YOLO: ("load", "in_process")}
_BATCHING_CLIENTS = 64
_IN_PROCESS_CLIENTS = (1, 6)
_MEMORY_NAMES = ("reference_uint8", *NEREID)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned contest."""

    kind: str
    """One of `CONTESTS`."""
    title: str
    contestants: list[tuple[str, str]]
    """Name of each contestant, with a model of `MODELS` or a variant of one."""
    clients: int


def run(options: argparse.Namespace) -> int:
    """Run the contests in the options, and print each."""
    before = require_checkout(options.before, or_file=True) if options.before else None
    if options.install:
        REFERENCE.install()
    plans = list(make_plans(options.contests or _DEFAULTS[options.model], options.model, options.clients, options.only, before))
    contests: list[Contest] = []
    try:
        with fixture_triton(set[str]().union(*map(_models, plans)) & {YOLO, CLASSIFIER}) as triton:
            for plan in plans:
                contests += _hold(plan, triton, before, options)
    except KeyboardInterrupt:
        print("stopped; what was complete is above", file=sys.stderr)
        raise
    finally:
        if options.json is not None and contests:
            save_record(options.json, make_record(describe(options), contests=contests))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("versus", help="Nereid beside other stacks, on the same Triton, in interleaved rounds")
    command.add_argument("--model", choices=MODELS, default="null", help="model to use")
    command.add_argument(
        "--contests", nargs="+", choices=CONTESTS, default=[], help="contests to hold; by default those that suit the model"
    )
    command.add_argument("--only", nargs="+", choices=NAMES, default=[], help="contestants to measure; by default all")
    add_shared(command, rounds=5, seconds=8.0, clients=32, workers=2, images=None, before=None, json=None)
    command.add_argument("--install", action="store_true", help="install the reference's environment first, if it is missing")
    command.set_defaults(run=run)


def make_plans(kinds: Sequence[str], model: str, clients: int, only: Sequence[str], before: Path | None = None) -> Iterator[Plan]:
    """Plan contests.

    Args:
        kinds: Kinds in `CONTESTS`.
        model: A model in `MODELS`.
        clients: Number of concurrent clients, unless the kind sets it.
        only: Contestants; empty for all.
        before: Another checkout, whose contestants are added to Nereid's; None for none.
    """
    for plan in _plans(kinds, model, clients, only):
        if before is None:
            yield plan
        else:
            contestants = [(each, asked) for name, asked in plan.contestants for each in add_counterparts([name])]
            yield msgspec.structs.replace(plan, contestants=contestants)


def _plans(kinds: Sequence[str], model: str, clients: int, only: Sequence[str]) -> Iterator[Plan]:
    names = only or NAMES
    everyone = [(name, model) for name in names if name != "in_process" or model == YOLO]
    for kind in kinds:
        match kind:
            case "load":
                yield Plan(kind=kind, title=f"{model}, {clients} clients", contestants=everyone, clients=clients)
            case "one":
                yield Plan(kind=kind, title=f"{model}, one client", contestants=everyone, clients=1)
            case "photo":
                yield Plan(kind=kind, title=f"{model}, one client, 12 megapixels", contestants=everyone, clients=1)
            case "batching":
                nereid = next((name for name in reversed(NEREID) if name in names), "nereid_file")
                title = f"batching against batches of one, {_BATCHING_CLIENTS} clients, simulated GPU"
                pair = [(BATCH1, "sim_gpu_batch1"), (nereid, "sim_gpu")]
                yield Plan(kind=kind, title=title, contestants=pair, clients=_BATCHING_CLIENTS)
            case "in_process":
                three = [name for name in names if name in {"in_process", "nereid_inline", "nereid_shm"}]
                for asked, count in product((YOLO, CLASSIFIER), _IN_PROCESS_CLIENTS):
                    title = f"{asked}: ONNX Runtime in the process against Triton, {count} client{'s' if count > 1 else ''}"
                    yield Plan(kind=kind, title=title, contestants=[(name, asked) for name in three], clients=count)
            case "memory":
                some = [(name, asked) for name, asked in everyone if only or name in _MEMORY_NAMES]
                yield Plan(kind=kind, title=f"{model}, memory", contestants=some, clients=clients)


def _hold(plan: Plan, triton: Triton, before: Path | None, options: argparse.Namespace) -> list[Contest]:
    """Run and print one contest; return nothing for kinds that are only printed."""
    path = "/classify" if _models(plan) == {CLASSIFIER} else "/detect"
    load = Load(_samples(plan, options.images), plan.clients, options.seconds, path=path)
    with TemporaryDirectory(prefix="nereid-bench-") as logs:
        lineup = Lineup(triton, options.workers, Path(logs), before=before)
        if plan.kind == "memory":
            show_memory(plan.contestants, lineup, load)
            return []
        contest = hold_contest(plan.title, plan.contestants, lineup, load, options.rounds, say)
    say()
    print(f"\n{contest_text(contest)}", flush=True)
    return [contest]


def _models(plan: Plan) -> set[str]:
    return {model for _, model in plan.contestants}


def _samples(plan: Plan, folder: Path | None) -> Sequence[Sample]:
    """Choose images; for a real model without a folder, images with known contents."""
    if _models(plan) == {CLASSIFIER}:
        return classifier_samples(folder)
    is_real = _models(plan) == {YOLO}
    if plan.kind == "photo":
        photo = large_sample()
        return [photo if is_real else photo._replace(expected=frozenset())]
    return coco_samples(folder) if is_real else unlabelled_samples(folder)
