"""A `serve` of its own whose load and faults cause values of every metric."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil

from app.settings.schema import PREFIX
from bench.harness.ports import find_free
from bench.harness.processes import running
from bench.harness.triton import link_installation
from bench.load.images import unlabelled_samples
from bench.load.overload import drive_arrivals, drive_crowd
from bench.models.repository import write_fixture

_MODEL, _SLOW_MODEL = "sim_gpu", "wait_20"
_READY_SECONDS = 120.0
"""Triton starts first."""
_RATE = 40
_CROWD = 150
_ODD_SECONDS = 0.25
_ODD = (
    ("GET", "/health"),
    ("GET", "/nowhere"),
    ("POST", "/detect"),  # without a body
    ("POST", "/detect?timeout_ms=1"),
    ("POST", f"/predict/{_SLOW_MODEL}?timeout_ms=20"),
)


class Service(NamedTuple):
    url: str
    process: psutil.Process
    targets: dict[str, str]
    """Addresses of the metrics for Prometheus: `host:port` by job."""

    def kill_triton(self) -> None:
        for child in self.process.children():
            if child.status() != psutil.STATUS_ZOMBIE and child.name() == "tritonserver":
                child.kill()


@contextmanager
def loadable_service(folder: Path) -> Iterator[Service]:
    """Run a service with two workers, a fast model and a slow one, until the block ends; its files are in `folder`."""
    for model in (_MODEL, _SLOW_MODEL):
        write_fixture(model, folder / "models")
    home = folder / "triton"
    home.mkdir()
    link_installation(home)
    port, http = find_free(2)
    given = {
        "port": port,
        "triton_home": home,
        "triton_ports": http,
        "model_repository": folder / "models",
        "model": _MODEL,
        "workers": 2,
        "timeout_seconds": 2,
    }
    environment = {f"{PREFIX}{name.upper()}": str(value) for name, value in given.items()}
    command, log = [sys.executable, "-m", "app", "serve"], folder / "serve.log"
    with running(command, environment, port, "/readyz", log, ready_seconds=_READY_SECONDS) as server:
        yield Service(server.url, server.process, {"nereid": f"127.0.0.1:{port}", "triton": f"127.0.0.1:{http + 1}"})


async def exercise(service: Service, seconds: float) -> None:
    """Generate data for every panel: steady load, a crowd, invalid requests, and a killed Triton, which restarts in 20 seconds."""
    samples = unlabelled_samples()

    async def crowd() -> None:
        await asyncio.sleep(seconds / 6)
        await drive_crowd(f"{service.url}/predict/{_SLOW_MODEL}", samples, clients=_CROWD, seconds=seconds / 4, is_polite=True)

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        service.kill_triton()

    odd = asyncio.create_task(_ask_oddly(service.url, samples[0].body))
    try:
        await asyncio.gather(drive_arrivals(f"{service.url}/detect", samples, rate=_RATE, seconds=seconds), crowd(), kill())
    finally:
        odd.cancel()
        await asyncio.gather(odd, return_exceptions=True)


async def _ask_oddly(url: str, image: bytes) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            for method, path in _ODD:
                with suppress(httpx.HTTPError):  # the service may be briefly unavailable
                    await client.request(method, path, content=image if "?" in path else b"")
                await asyncio.sleep(_ODD_SECONDS)
