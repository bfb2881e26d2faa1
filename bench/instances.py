"""Does Triton do more with two instances of one thread than with one instance of two?"""

import asyncio
import shutil
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import msgspec
import numpy as np

from app import bundle, config, embedded
from app.config import Settings
from app.triton import Triton

CLIENTS = 4
CONTESTANTS = {"2-instances-of-1-thread": (2, 1), "1-instance-of-2-threads": (1, 2)}


def report(seconds: float, rounds: int) -> None:
    """Print inferences per second of both, interleaved, and the ratio of the medians."""
    base = config.load()
    bundle.install(Path(base.triton_home))
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder, "triton")
        home.mkdir()
        for part in ("server", "python"):
            (home / part).symlink_to(Path(base.triton_home, part).resolve())
        running = {}
        # All servers first: gRPC must not be in use when a process is forked. An idle one costs nothing.
        for name, (instances, threads) in CONTESTANTS.items():
            _write(Path(base.model_repository), Path(folder, name), base.model, instances, threads)
            http, grpc, metrics = islice((p for p in range(14_600, 15_000) if embedded.is_free("127.0.0.1", p)), 3)
            running[name] = msgspec.structs.replace(
                base,
                model_repository=str(Path(folder, name)),
                triton_home=str(home),
                triton_http_port=http,
                triton_grpc_port=grpc,
                triton_metrics_port=metrics,
            )
            server = embedded.Server(running[name])
            stack.callback(server.stop)
            server.start()
        for _ in range(rounds):
            for name, settings in running.items():
                rates[name].append(asyncio.run(_rate(settings, seconds)))
                print(f"{name}: {rates[name][-1]:.1f} inferences/s", flush=True)
    first, second = (median(values) for values in rates.values())
    print(
        f"{base.model}, {CLIENTS} clients, median of {rounds} rounds: {first:.1f} against {second:.1f}, ratio {first / second:.2f}"
    )


def _write(source: Path, target: Path, model: str, instances: int, threads: int) -> None:
    """Copy the model with another instance group."""
    shutil.copytree(source / model, target / model)
    path = target / model / "configs" / f"{embedded.CONFIG_NAME}.pbtxt"
    text = path.read_text(encoding="utf-8")
    group = "count: 2 kind: KIND_CPU"
    if group not in text:
        raise ValueError(f"{path} has no {group!r}")
    text = text.replace(group, f"count: {instances} kind: KIND_CPU")
    text += f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{threads}" }} }}\n'
    path.write_text(text, encoding="utf-8")


async def _rate(settings: Settings, seconds: float) -> float:
    """Count the inferences of `CLIENTS` callers that each ask again once they are answered."""
    triton = Triton(settings.triton_url)
    model = await triton.contract(settings.model)
    tensor = np.zeros(model.shape, model.dtype)
    start = perf_counter()

    async def ask() -> int:
        count = 0
        while perf_counter() - start < seconds:
            await triton.infer(model, tensor, 60, "bench")
            count += 1
        return count

    count = sum(await asyncio.gather(*(ask() for _ in range(CLIENTS))))
    rate = count / (perf_counter() - start)
    await triton.close()
    return rate
