"""Two Triton instances of one thread against one instance of two: inferences per second."""

import argparse
import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

from app.embedded.launch import loadable_models
from app.model.spec import from_triton_config
from app.settings import environment
from app.settings.schema import Settings
from app.triton.client import TritonClient
from bench.experiments.options import Commands, add_rounds, add_seconds
from bench.experiments.tuning.config_text import config_file, edit
from bench.experiments.tuning.variant import Variant
from bench.harness.errors import ContestantError
from bench.harness.triton import embedded_triton
from bench.models.repository import write_model

CLIENTS = 4
CASES = {
    "2-instances-of-1-thread": Variant(instances=2, threads=1),
    "1-instance-of-2-threads": Variant(instances=1, threads=2),
}


def run(options: argparse.Namespace) -> int:
    """Print inferences per second of both, interleaved, and the ratio of the medians."""
    base = environment.load()
    pulled = Path(base.model_repository)
    if base.model not in loadable_models(pulled):
        raise ContestantError(f"{base.model} has not been pulled; run: ./just pull {base.model}")
    file = config_file(pulled, base.model, is_embedded=True)
    with TemporaryDirectory(prefix="nereid-bench-") as folder, ExitStack() as stack:
        settings = {}
        # Start all servers first: gRPC must not be in use when a process is forked. An idle server costs nothing.
        for name, variant in CASES.items():
            repository = Path(folder, name)
            write_model(pulled / base.model, repository, {file: edit(file, variant)})
            settings[name] = stack.enter_context(embedded_triton(repository, base.model)).settings
        rates = asyncio.run(_measure(settings, options.rounds, options.seconds))
    first, second = (median(values) for values in rates.values())
    medians = f"{first:.1f} against {second:.1f}, ratio {first / second:.2f}"
    print(f"{base.model}, {CLIENTS} clients, median of {options.rounds} rounds: {medians}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("instances", help="two Triton instances of one thread against one of two")
    add_seconds(command, 8.0)
    add_rounds(command, 3)
    command.set_defaults(run=run)


async def _measure(settings: Mapping[str, Settings], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Return inferences per second by case and round, all in one event loop, because gRPC does not support several."""
    clients = {name: TritonClient(case.triton_address, case.control_key_path) for name, case in settings.items()}
    rates: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, client in clients.items():
            rates[name].append(await _rate(client, settings[name].model, seconds))
            print(f"{name}: {rates[name][-1]:.1f} inferences/s", flush=True)
    await asyncio.gather(*(client.close() for client in clients.values()))
    return rates


async def _rate(client: TritonClient, model: str, seconds: float) -> float:
    """Return inferences per second of `CLIENTS` callers that run inferences back to back."""
    spec = from_triton_config(*await client.read_config(model))
    tensor = np.zeros(spec.batch_shape(1), spec.dtype)
    start = perf_counter()

    async def ask() -> int:
        count = 0
        while perf_counter() - start < seconds:
            await client.infer(spec, [tensor], timeout_seconds=60)
            count += 1
        return count

    return sum(await asyncio.gather(*(ask() for _ in range(CLIENTS)))) / (perf_counter() - start)
