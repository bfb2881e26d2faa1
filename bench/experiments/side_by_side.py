"""Servers side by side, in interleaved rounds. An experiment is a table of cases: what is started, its load, and its bases."""

import argparse
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from app.host import program
from bench.experiments.options import Commands, add_shared, describe
from bench.experiments.stages import image_files, spend
from bench.harness.contest import Case, hold
from bench.harness.environments import PEERS, REFERENCE, ROBOFLOW
from bench.harness.errors import ContestantError
from bench.harness.lineup import BEFORE, DEFAULT, NAMES, NEREID, lineup_of
from bench.harness.peers import AT_ITS_BEST, PACKAGE, SAME_ENGINE, peers_of
from bench.harness.processes import require_checkout
from bench.harness.triton import pulled
from bench.load.images import Sample, coco_samples, large_sample, roboflow_request, unlabelled_samples
from bench.load.outcome import Outcome, encode_latencies
from bench.models.repository import YOLO
from bench.report.measurements import Measurement, Run
from bench.report.records import describe_machine, make_record, save_record
from bench.report.text import overview

Plan = Iterator[tuple[str, list[Case]]]
"""Titles and cases of contests, one after the other."""

CONTESTS = ("load", "photo", "batching")
"""The contests of `versus`.

`load`: all contestants, `--clients` clients. `photo`: one client, an image of 12 megapixels, which all but `nereid_file` decode
whole. `batching`: the simulated GPU against the same without batches, 64 clients.
"""
MODELS = ("null", "sim_gpu")
CAPACITY_CLIENTS = (1, 6, 24)
MASKS = ("none", "polygon", "rle", "png")
"""Values of `masks`; the others are compared with the first one."""

_BATCHING_CLIENTS = 64
_CORES = len(os.sched_getaffinity(0))
_BASES = ("reference", "reference_uint8")
_ENVIRONMENTS = {True: REFERENCE, "peers": PEERS, "roboflow": ROBOFLOW}  # by the value of --install
_DECODE, _HTTP, _FORWARDED = "decode alone", "http_only", "http_and_triton"


def add_to(commands: Commands) -> None:
    """Add these experiments to the command line."""
    clients = ", ".join(map(str, CAPACITY_CLIENTS))
    capacity = _add(commands, "capacity", _capacity, f"{YOLO} with {clients} clients, then `limit`; runs if no name is given")
    add_shared(capacity, seconds=6.0, rounds=1, clients=32, workers=_CORES, json=None)
    limit = _add(commands, "limit", _limit, "a model that does nothing, beside decoding alone and HTTP alone")
    add_shared(limit, seconds=3.0, rounds=3, clients=32, workers=2, json=None)
    masks = _add(commands, "masks", _masks, "masks as polygons, RLE and PNG beside boxes alone, with the simulated GPU")
    add_shared(masks, seconds=3.0, rounds=5, clients=1, workers=1, json=None)
    versus = _add(commands, "versus", _versus, "Nereid beside other stacks, on the same Triton, in interleaved rounds")
    add_shared(versus, seconds=8.0, rounds=5, clients=32, workers=2, json=None)
    versus.add_argument("--model", choices=MODELS, default="null", help="model to use")
    versus.add_argument("--contests", nargs="+", choices=CONTESTS, default=["load"], help="contests to hold")
    versus.add_argument("--only", nargs="+", choices=NAMES, default=[], help="contestants to measure; by default all")
    versus.add_argument("--before", type=Path, metavar="PATH", help="another checkout, or the one file, to measure its Nereid, too")
    versus.add_argument("--install", action="store_true", help="install the reference's environment first, if it is missing")
    peers = _add(commands, "peers", _peers, f"Nereid beside other whole servers, with {clients} clients, in interleaved rounds")
    add_shared(peers, seconds=8.0, rounds=5, workers=_CORES, json=None)
    peers.add_argument("--model", default=YOLO, help="pulled or added detector with a square of 640")
    names = [*SAME_ENGINE, *AT_ITS_BEST]
    peers.add_argument("--only", nargs="+", choices=names, default=names, help="servers to measure; by default all")
    peers.add_argument("--install", nargs="?", const="peers", choices=["peers", "roboflow"], help="install their environment first")
    peers.set_defaults(lineup=peers_of)


def run(options: argparse.Namespace) -> int:
    """Hold the contests of an experiment, and print each; return 1 if a result was wrong."""
    before = require_checkout(options.before) if options.before else None
    if options.install:
        _ENVIRONMENTS[options.install].install()
    runs: list[Run] = []
    try:
        for title, cases in options.plan(options):
            compared = [each for case in cases for each in (_with_counterpart(case) if before else (case,))]
            with options.lineup({case.model for case in cases}, options.workers, before=before) as lineup:
                found = hold(title, compared, lineup, options.seconds, options.rounds)
            about = f"{options.workers} workers; medians of {options.rounds} interleaved rounds of {options.seconds:g} s"
            print(f"\n{title}; {about}; {describe_machine()}\n{overview(found)}", flush=True)
            runs += found
    finally:
        if options.json is not None and runs:
            save_record(options.json, make_record(describe(options), runs))
    return int(any(one.outcome.statuses.get("wrong") for each in runs for one in each.rounds))


def _add(commands: Commands, name: str, plan: Callable[[argparse.Namespace], Plan], text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text)
    command.set_defaults(run=run, plan=plan, lineup=lineup_of, before=None, install=False)
    return command


def _capacity(options: argparse.Namespace) -> Plan:
    """Pull the default model if necessary, as `serve` does; the workers are as many as those of `serve`."""
    if not pulled(YOLO):
        subprocess.run(program.command("app", "pull", "--", YOLO), env=program.environment(), check=False)
        if not pulled(YOLO):
            raise ContestantError(f"{YOLO} was not pulled")
    yield (
        f"capacity: {YOLO}, images of COCO's sizes",
        [Case(DEFAULT, coco_samples(), clients, YOLO) for clients in CAPACITY_CLIENTS],
    )
    yield from _limit(options)
    print("./just bench --help lists all experiments")


def _limit(options: argparse.Namespace) -> Plan:
    samples, clients = unlabelled_samples(), options.clients
    with image_files() as files:
        yield (
            "limit: a model that does nothing",
            [
                Case(_DECODE, samples, clients, work=partial(_decode, files)),
                Case(_HTTP, samples, clients),
                Case(_FORWARDED, samples, clients),
                Case("nereid_shm", samples, clients, bases=[_DECODE]),
                Case("nereid_file", samples, clients, bases=[_FORWARDED]),
            ],
        )


def _masks(options: argparse.Namespace) -> Plan:
    sample, model = large_sample()._replace(expected=frozenset()), "sim_gpu_masks"
    cases = [
        Case(masks, [sample], options.clients, model, DEFAULT, f"/segment?model={model}&masks={masks}", MASKS[:1] if place else ())
        for place, masks in enumerate(MASKS)
    ]
    yield "masks: 30 objects in 12 megapixels", cases


def _versus(options: argparse.Namespace) -> Plan:
    samples, clients = unlabelled_samples(), options.clients
    for contest in options.contests:
        match contest:
            case "load":
                yield f"versus: {options.model}, {clients} clients", _everyone(options, samples, clients)
            case "photo":
                photo = [large_sample()._replace(expected=frozenset())]
                yield f"versus: {options.model}, one client, 12 megapixels", _everyone(options, photo, 1)
            case _:
                single = Case("batch1", samples, _BATCHING_CLIENTS, "sim_gpu_batch1", server="nereid_file")
                batches = Case("nereid_file", samples, _BATCHING_CLIENTS, "sim_gpu", bases=["batch1"])
                yield f"versus: batching against batches of one, {_BATCHING_CLIENTS} clients, simulated GPU", [single, batches]


def _peers(options: argparse.Namespace) -> Plan:
    for title, names in (("the same engine for all", SAME_ENGINE), ("each at its best", AT_ITS_BEST)):
        if chosen := [name for name in names if name in options.only]:
            cases = [_peer(name, clients, names[0], options.model) for clients in CAPACITY_CLIENTS for name in chosen]
            yield f"peers: {options.model}, {title}", cases


def _peer(name: str, clients: int, base: str, model: str) -> Case:
    samples, path, bases = coco_samples(), "/detect", [base] if name != base else []
    if name == "roboflow":
        samples = tuple(one._replace(body=roboflow_request(one.body, PACKAGE)) for one in samples)
        path = "/infer/object_detection"
    return Case(name, samples, clients, model, path=path, bases=bases, is_polite=True)


def _everyone(options: argparse.Namespace, samples: Sequence[Sample], clients: int) -> list[Case]:
    names = options.only or NAMES
    return [Case(name, samples, clients, options.model, bases=_bases(name, names)) for name in names]


def _bases(name: str, names: Sequence[str]) -> list[str]:
    """Return those before a contestant that the later ones are compared with."""
    return [other for other in names[: names.index(name)] if other in _BASES]


def _with_counterpart(case: Case) -> Iterator[Case]:
    """Add the counterpart from the other checkout after a contestant of Nereid."""
    if case.name in NEREID:
        yield case._replace(bases=[*case.bases, f"{case.name}{BEFORE}"])
        yield case._replace(name=f"{case.name}{BEFORE}")
    else:
        yield case


def _decode(files: Path, seconds: float) -> Measurement:
    """Decode and letterbox on all cores, onto a reused canvas."""
    spent = spend("nereid", files, seconds, _CORES)
    images, empty = sum(one.images for one in spent), encode_latencies(())
    outcome = Outcome(max(one.seconds for one in spent), images, {"200": images}, empty, {}, 0.0)
    return Measurement(outcome=outcome, cpu_ms={"gateway": sum(one.total for one in spent) / len(spent)})
