"""Is everything here that is needed, and does it work together."""

import asyncio
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
from PIL import features

from app import embedded, image, rows
from app.config import Settings
from app.contract import Form
from app.errors import GatewayError
from app.triton import Triton


def report(settings: Settings) -> int:
    """Print one line per check; 1 if any of them failed."""
    results = [*_machine(settings), *asyncio.run(_triton(settings))]
    for is_good, text in results:
        print(f"{'ok  ' if is_good else 'FAIL'}  {text}")
    return 0 if all(is_good for is_good, _ in results) else 1


def _machine(settings: Settings) -> Iterator[tuple[bool, str]]:
    version = sys.version_info
    yield (3, 11) <= version[:2] <= (3, 12), f"Python {platform.python_version()} (3.11 or 3.12)"
    simd_due = sys.platform == "linux" and platform.machine() == "x86_64"
    yield image.is_simd() or not simd_due, f"{'pillow-simd' if image.is_simd() else 'stock Pillow'} decodes"
    for name in ("jpg", "zlib", "webp"):
        yield bool(features.check(name)), f"{name} support"
    repository = Path(settings.model_repository)
    yield repository.is_dir(), f"model repository {repository}: {', '.join(embedded.loadable(repository)) or 'no model pulled'}"


async def _triton(settings: Settings) -> list[tuple[bool, str]]:
    """Ask a running Triton the way a worker does."""
    triton = Triton(settings.triton_url)
    results = []
    try:
        results.append((True, f"Triton {await triton.version()} at {settings.triton_url}"))
        model = await triton.contract(settings.model)
        results.append((True, f"{model.name}: {model.form.value} in, {model.layout.value} out, {len(model.labels)} class names"))
        if model.form is not Form.FILE:
            tensor = np.zeros(model.shape, model.dtype)
            start = perf_counter()
            answer = await triton.infer(model, tensor, settings.timeout_seconds, "doctor")
            rows.read(model, answer.outputs)
            results.append((True, f"{model.name} answers on {model.device} in {(perf_counter() - start) * 1e3:.0f} ms"))
    except GatewayError as error:
        results.append((False, f"Triton at {settings.triton_url}, model {settings.model}: {error.detail}"))
    finally:
        await triton.close()
    return results
