"""A GPU without the gateway: how much ONNX Runtime computes and Triton answers, and whether FP16 finds the same."""

import asyncio
import json
import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np

from app.embedded.install import GPU_FOLDER
from app.host.processes import die_with_parent
from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena, Slot
from app.zoo import check, inference
from app.zoo.configs import HALF
from app.zoo.repository import NETWORK
from bench.harness.errors import ContestantError
from bench.harness.model_control import call
from bench.harness.processes import ROOT

_BATCHES = ("1", "8", "32")
_SECONDS = 60.0
# Of boxes that are the same, as for `pull`.
_MIN_OVERLAP, _SCORE_TOLERANCE = 0.9, 0.05


def run_alone(settings: Settings, model: str, seconds: float) -> float:
    """Return the images/s of ONNX Runtime by CUDA for the first version of a model, with the best size of batch."""
    python = Path(settings.triton_home, GPU_FOLDER, "bin", "python").absolute()
    version = Path(settings.model_repository, model, "1")
    file = next(path for name in (HALF, NETWORK) if (path := version / name).is_file())
    command: list[str | Path] = [python, ROOT / "bench" / "contestants" / "cuda.py", file, f"{seconds:g}", *_BATCHES]
    end = partial(die_with_parent, os.getpid(), signal.SIGKILL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=end)
    if done.returncode:
        raise ContestantError(done.stderr.strip().rpartition("\n")[2])
    return float(max(json.loads(done.stdout).values()))


def saturate(settings: Settings, model: str, seconds: float) -> float:
    """Return the images/s that Triton answers if it gets full batches of noise, which are in shared memory already."""

    async def work(client: TritonClient) -> float:
        spec = from_triton_config(*await client.read_config(model))
        arena = Arena(spec.image_bytes * spec.max_batch)
        try:
            await client.register(arena)
            slot = Slot(arena, 0, arena.nbytes)
            images = slot.array((spec.max_batch, *spec.image_shape), np.uint8)
            images[:] = np.random.default_rng(0).integers(0, 256, images.shape, np.uint8)
            start = perf_counter()

            async def call() -> int:
                count = 0
                while perf_counter() - start < seconds:
                    await client.infer(spec, [*images], timeout_seconds=_SECONDS, slot=slot)
                    count += len(images)
                return count

            callers = spec.instances + 1  # one full batch waits
            return sum(await asyncio.gather(*(call() for _ in range(callers)))) / (perf_counter() - start)
        finally:
            await client.unregister(arena.region)
            arena.close()

    return call(settings, work, f"{model} in Triton")


def compare(settings: Settings, model: str, pictures: Path) -> float:
    """Return the F1 of the boxes that Triton finds in a folder of pictures, against those of the file in FP32 on the CPU."""

    async def work(client: TritonClient) -> float:
        spec = from_triton_config(*await client.read_config(model))
        session = inference.open_session(Path(settings.model_repository, spec.name, spec.version, NETWORK))
        same = total = 0.0
        for canvas in check.draw_samples(pictures, spec):
            served = await client.infer(spec, [canvas], timeout_seconds=_SECONDS)
            outputs = served.outputs, inference.run(session, {"image": canvas[None]})
            one, other = (check.detections(each, check.CONFIDENCE) for each in outputs)
            boxes = len(one.scores) + len(other.scores)
            same += boxes * check.agreement(one, other, _MIN_OVERLAP, _SCORE_TOLERANCE)
            total += boxes
        return same / total if total else 0.0

    return call(settings, work, f"{model} in Triton")
