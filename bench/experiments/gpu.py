"""A GPU: how many images a second callers get of what it can do without the gateway, and whether FP16 finds the same."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from app import feature
from app.embedded import gpu
from app.embedded.install import install
from app.host.program import first_line
from app.settings.schema import Settings
from bench.experiments.options import Commands, add_shared, count, describe, positive
from bench.experiments.server_load import Session
from bench.experiments.service import MAX_RATE, add_service
from bench.harness import engine
from bench.harness.bundle import pack
from bench.harness.lineup import NEREID, lineup_of
from bench.harness.processes import calling
from bench.harness.triton import fixture_triton
from bench.load.images import COCO_FOLDER, SAMPLE_FOLDER, coco_samples, given_samples, unlabelled_samples
from bench.models.repository import YOLO
from bench.report.gpu import GpuRecord, load_gpu_record
from bench.report.measurements import Run
from bench.report.records import make_record, save_record

_CLIENTS = [1, 16, 64, 256]
_PART_SECONDS, _ALL_SECONDS = 110.0, 540.0
_SIMULATED = "sim_gpu"
"""The model under load in a rehearsal: it waits as a GPU would, because the CPU would take much longer."""


class Found(msgspec.Struct):
    """What a part has measured; fields as in `GpuRecord`."""

    runs: list[Run] = []
    limits: dict[str, float] = {}
    f1: float | None = None


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser(
        "gpu", help="what callers get of what a GPU can do, by CUDA here or from a server that runs; FP16"
    )
    add_service(command, "by default, gateways and a Triton are started here")
    command.add_argument("--triton", help="gRPC endpoint of the server's Triton; by default that in the settings")
    command.add_argument("--model", default=YOLO, help="model to use")
    command.add_argument("--gpu", metavar="NAME", help="name of the GPU; by default, nvidia-smi is asked")
    command.add_argument("--clients", type=count, nargs="+", default=_CLIENTS, help="numbers of clients, one after the other")
    add_shared(command, seconds=6.0, workers=len(os.sched_getaffinity(0)), json=None)
    command.add_argument("--budget", type=positive, default=_ALL_SECONDS, help="seconds for all parts")
    command.add_argument("--check", type=Path, metavar="FILE", help="check and show a file of --json, and measure nothing")
    command.add_argument("--pack", type=Path, metavar="FOLDER", help="make a folder that does the same on a host without a network")
    command.add_argument("--python", help="for --pack, a Python of that host's version, with pip")
    command.add_argument("--rehearse", action="store_true", help="for the program in that folder: simulate the GPU")
    command.set_defaults(run=run, name="gpu", url=None)


def run(options: argparse.Namespace) -> int:
    """Measure all parts, and print them; or pack, or check. Return 1 if a part has no result, or a result was wrong."""
    if options.check:
        print(load_gpu_record(options.check))
        return 0
    if options.pack:
        print(pack(options.pack, options.python or sys.executable))
        return 0
    options.duration = options.seconds  # as it is called for a session
    options.gpu = options.gpu or ("simulated GPU" if options.rehearse else gpu.find())
    whole, failures = Found(), dict[str, str]()
    for name, found in take(_parts(options), options.budget):
        if isinstance(found, str):
            failures[name] = found
        else:
            whole = Found(whole.runs + found.runs, whole.limits | found.limits, whole.f1 if found.f1 is None else found.f1)
    about = msgspec.structs.asdict(make_record(describe(options), whole.runs))
    record = GpuRecord(**about, gpu=options.gpu, limits=whole.limits, f1=whole.f1, failures=failures)
    if options.json:
        save_record(options.json, record)
    print(record)
    return int(bool(failures) or any(one.outcome.statuses.get("wrong") for one in whole.runs))


def take(parts: dict[str, tuple[Any, ...]], budget: float, limit: float = _PART_SECONDS) -> Iterator[tuple[str, Found | str]]:
    """Call each part, a function with arguments, in a process of its own, within limits; yield its result, or why it has none."""
    until = monotonic() + budget
    for name, part in parts.items():
        print(f"{name} ...", file=sys.stderr)
        end = monotonic() + min(limit, max(until - monotonic(), 1))
        try:
            with calling(_within, end, *part) as wait:
                yield name, wait()
        except Exception as error:  # noqa: BLE001 - the other parts go on
            yield name, first_line(error) if monotonic() < end else "no result in time"


def _within(end: float, function: Any, *arguments: object) -> Any:  # noqa: ANN401 - of a part
    # The signal ends this process also where no Python runs, and the kernel then ends its servers.
    signal.setitimer(signal.ITIMER_REAL, max(end - monotonic(), 0.001))
    return function(*arguments)


def _parts(options: argparse.Namespace) -> dict[str, tuple[Any, ...]]:
    parts: dict[str, tuple[Any, ...]] = {"triton": (_saturate, options), "f1": (_compare, options)}
    if options.url:
        return {**parts, "served": (_load, options, "served")}
    install(Path(feature.read_settings().triton_home), for_gpu=True)
    return {"onnxruntime": (_run_alone, options), **parts, **{name: (_serve, options, name) for name in NEREID}}


def _run_alone(options: argparse.Namespace) -> Found:
    return Found(limits={"onnxruntime": engine.run_alone(feature.read_settings(), options.model, options.seconds)})


def _saturate(options: argparse.Namespace) -> Found:
    model = _SIMULATED if options.rehearse else options.model
    with _triton(options, model) as settings:
        return Found(limits={"triton": engine.saturate(settings, model, options.seconds)})


def _compare(options: argparse.Namespace) -> Found:
    pictures = options.image or (COCO_FOLDER if COCO_FOLDER.is_dir() else SAMPLE_FOLDER)
    with _triton(options, options.model) as settings:
        return Found(f1=engine.compare(settings, options.model, pictures))


@contextmanager
def _triton(options: argparse.Namespace, model: str) -> Iterator[Settings]:
    """Start a Triton with a model, unless a server runs; yield settings with it, and with the repository of the model."""
    if options.url:
        given = feature.read_settings()
        yield msgspec.structs.replace(given, triton_endpoints=options.triton) if options.triton else given
    else:
        with fixture_triton([model], options.gpu) as triton:
            yield triton.settings


def _serve(options: argparse.Namespace, name: str) -> Found:
    """Load a gateway and a Triton of its own."""
    model = _SIMULATED if options.rehearse else options.model
    loaded = f"{model}_file" if name == "nereid_file" and not options.rehearse else model  # the fixture brings its variants
    with lineup_of([loaded], options.workers, gpu=options.gpu) as lineup:
        contestant = lineup.contestant(name, model)
        with lineup.start(contestant) as server:
            given = {"url": server.url, "triton": lineup.triton.address, "model": contestant.model}
            return _load(argparse.Namespace(**vars(options) | given), name)


def _load(options: argparse.Namespace, name: str) -> Found:
    """Load a server with each number of clients, and then at half of what it did."""
    made = unlabelled_samples() if options.rehearse else coco_samples()
    session = Session(options, given_samples(options.image) if options.image else made)
    session.is_polite = True
    session.measure(clients=max(options.clients))  # for nothing: the first batches of each size take longer
    best = max(session.measure(clients=clients).outcome.rate for clients in options.clients)
    session.measure(rate=min(best / 2, MAX_RATE) if session.is_elsewhere else best / 2)
    for one in session.runs:
        one.contestant = name
    return Found(session.runs[1:])
