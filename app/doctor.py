"""Checks that everything needed is on this machine, and that it works together."""

import asyncio
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
from PIL import features

from app.config import Settings
from app.detection.outputs import decode_outputs
from app.embedded.launch import loadable_models
from app.errors import GatewayError
from app.host.packages import has_pillow_simd
from app.triton import credentials
from app.triton.client import TritonClient
from app.triton.credentials import CredentialsError
from app.triton.specs import SpecCache

_OLDEST, _NEWEST = (3, 11), (3, 13)


def report(settings: Settings) -> int:
    """Print one line per check; return 1 if any of them failed."""
    results = [*_check_machine(settings), *asyncio.run(_check_triton(settings))]
    for is_good, text in results:
        print(f"{'ok  ' if is_good else 'FAIL'}  {text}")
    return 0 if all(is_good for is_good, _ in results) else 1


def _check_machine(settings: Settings) -> Iterator[tuple[bool, str]]:
    yield _OLDEST <= sys.version_info[:2] <= _NEWEST, f"Python {platform.python_version()} (3.11 to 3.13)"
    needs_simd = sys.platform == "linux" and platform.machine() == "x86_64"
    yield has_pillow_simd() or not needs_simd, f"{'pillow-simd' if has_pillow_simd() else 'stock Pillow'} is installed"
    for name in ("jpg", "zlib", "webp"):
        yield bool(features.check(name)), f"{name} support"
    repository = Path(settings.model_repository)
    yield repository.is_dir(), f"model repository {repository}: {', '.join(loadable_models(repository)) or 'no model pulled'}"


async def _check_triton(settings: Settings) -> list[tuple[bool, str]]:
    """Ask a running Triton as a worker does."""
    try:
        tls = credentials.load(settings.triton_tls_files)
    except CredentialsError as error:
        return [(False, str(error))]
    triton = TritonClient(settings.triton_url, settings.control_key_path, credentials=tls)
    results = []
    try:
        results.append((True, f"Triton {(await triton.read_server()).version} at {settings.triton_url}"))
        spec = await SpecCache(triton).get(settings.model)
        formats = f"{spec.input_format.value} in, {spec.output_format.description} out"
        results.append((True, f"{spec.name}: {formats}, {len(spec.labels)} class names"))
        if spec.dtype is not None:
            start = perf_counter()
            answer = await triton.infer(spec, np.zeros(spec.image_shape, spec.dtype), timeout_seconds=settings.timeout_seconds)
            decode_outputs(spec, answer.outputs, images=1)
            results.append((True, f"{spec.name} answers on {spec.device} in {(perf_counter() - start) * 1e3:.0f} ms"))
    except GatewayError as error:
        results.append((False, f"Triton at {settings.triton_url}, model {settings.model}: {error.detail}"))
    finally:
        await triton.close()
    return results
