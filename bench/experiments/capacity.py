"""How much this machine does with the default model, and below it with a model that does nothing; runs if no name is given."""

import argparse
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app.host import program
from bench.experiments.limit import CLIENTS as NULL_CLIENTS
from bench.experiments.limit import show_limits
from bench.experiments.options import Commands, add_shared, describe
from bench.experiments.progress import say
from bench.harness.contest import WARM_UP_SECONDS, Load, measure
from bench.harness.errors import ContestantError
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.triton import embedded_triton, pulled
from bench.load.images import coco_samples
from bench.models.repository import YOLO, write_model
from bench.report.machine import describe_machine
from bench.report.measurements import Measurement, Run
from bench.report.records import make_record, save_record
from bench.report.text import number, responses, table

CLIENTS = (1, 6, 24)
"""Numbers of clients that wait for responses."""
SHARE = "model's CPU %"

_AS_SERVE = 0
"""A worker process per core."""
_NULL_SHARE = 0.25  # of the seconds per measurement, for each with the null model


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 1 if a result was wrong."""
    runs = _measure(_pull(YOLO), options)
    say()
    print(_text(runs), flush=True)
    print(f"\nWith a model that does nothing, for {NULL_CLIENTS} clients:")
    for name, measured in show_limits(options.images, options.seconds * _NULL_SHARE).items():
        runs.append(_run(name, measured.outcome.model, NULL_CLIENTS, measured))
    print("./just bench --help lists all experiments")
    if options.json is not None:
        save_record(options.json, make_record(describe(options), runs))
    return int(any(one.outcome.statuses.get("wrong") for one in runs))


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    text = f"what this machine does with {YOLO} and {', '.join(map(str, CLIENTS))} clients, then `limit`; runs if no name is given"
    command = commands.add_parser("capacity", help=text)
    add_shared(command, seconds=6.0, images=None, json=None)
    command.set_defaults(run=run)


def model_share(cpu_ms: Mapping[str, float]) -> float:
    """Return the share of Triton and its models in the CPU time of the servers, that is, without the clients."""
    return 1 - cpu_ms["gateway"] / sum(spent for kind, spent in cpu_ms.items() if kind != "client")


def _pull(model: str) -> Path:
    """Return the folder of a model; pull it first if necessary, as `serve` does.

    Raises:
        ContestantError: It cannot be pulled; the reason has been printed.
    """
    if not pulled(model):
        subprocess.run(program.command("app", "pull", "--", model), env=program.environment(), check=False)
    if (folder := pulled(model)) is None:
        raise ContestantError(f"{model} was not pulled")
    return folder


def _measure(model: Path, options: argparse.Namespace) -> list[Run]:
    """Load a gateway with the settings of `serve`, in front of a Triton that has only this model."""
    samples = coco_samples(options.images)
    runs = []
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        repository = Path(folder, "models")
        write_model(model, repository, {})
        say(f"starting Triton and the gateway with {model.name}")
        with embedded_triton(repository, model.name) as triton:
            lineup = Lineup(triton, _AS_SERVE, Path(folder))
            contestant = lineup.contestant(DEFAULT, model.name)
            with lineup.start(contestant) as server:
                measure(contestant, server, [triton], Load(samples, max(CLIENTS), WARM_UP_SECONDS))
                for clients in CLIENTS:
                    say(f"{model.name}, {clients} clients")
                    measured = measure(contestant, server, [triton], Load(samples, clients, options.seconds))
                    if measured.outcome.requests:
                        measured.figures[SHARE] = round(100 * model_share(measured.cpu_ms), 1)
                    runs.append(_run(DEFAULT, model.name, clients, measured))
    return runs


def _run(contestant: str, model: str, clients: int, measured: Measurement) -> Run:
    return Run(contestant=contestant, mode="capacity", model=model, clients=clients, **msgspec.structs.asdict(measured))


def _text(runs: list[Run]) -> str:
    figures = {"/detect per second": "requests/s", "p50 ms": "p50", "p99 ms": "p99", SHARE: SHARE}
    rows = [("", *figures), *((one.load, *(number(one.figures.get(name)) for name in figures.values())) for one in runs)]
    lines = [
        f"{runs[0].model} in the embedded Triton, images of COCO's sizes; {describe_machine()}, which the clients use as well",
        table(rows),
        f"{SHARE}: the part of Triton's processes in the CPU time of Triton and the gateway, without the clients",
    ]
    lines += [f"{one.load}: {responses(one.outcome)}" for one in runs if one.outcome.failed]
    return "\n".join(lines)
