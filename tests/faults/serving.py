"""The gateway as it runs in production: its processes, their log, their memory and their open files."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import psutil

from bench.harness.counters import read_counters
from bench.harness.ports import find_free
from bench.harness.processes import running
from bench.harness.triton import Triton
from tests.processes import PATIENCE_SECONDS, wait_for, wait_for_search
from tests.support import REPOSITORY

T = TypeVar("T")

WORKERS = 2


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Return a log so far, without lines that are not JSON."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_for_line(log: Path, request_id: str) -> dict[str, Any]:
    """Wait for the line of a request, which follows its answer, and may come after that of a later request."""
    wait_for(lambda: any(line.get("request_id") == request_id for line in read_lines(log)))
    return next(line for line in read_lines(log) if line.get("request_id") == request_id)


class Gateway(NamedTuple):
    url: str
    process: psutil.Process
    """The parent of the workers."""
    log: Path

    @property
    def address(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def workers(self) -> list[psutil.Process]:
        return list(self.process.children())

    def pids(self) -> set[int]:
        return {worker.pid for worker in self.workers()}

    def rss(self) -> int:
        return sum(worker.memory_info().rss for worker in self.workers())

    def fds(self) -> int:
        return sum(worker.num_fds() for worker in self.workers())

    def cpu_seconds(self) -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in self.workers())

    def wait_for_line(self, request_id: str) -> dict[str, Any]:
        return wait_for_line(self.log, request_id)

    def log_lines(self) -> list[dict[str, Any]]:
        return read_lines(self.log)


@contextmanager
def serving(
    triton: Triton | None,
    folder: Path,
    *,
    wrapper: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    ready: str = "/readyz",
) -> Iterator[Gateway]:
    """Run a gateway until the block ends, in a folder that gets its log, in an environment of a `wrapper`.

    Its settings are given by name, in addition to what a test needs, and name its Triton and models if none is given; it is ready
    for the test when the path `ready` answers 200.
    """
    (port,) = find_free(1)
    log = folder / "gateway.log"
    wanted = {
        "port": port,
        "workers": WORKERS,
        "model": "null",
        **({"triton_home": triton.settings.triton_home, "model_repository": triton.repository} if triton else {}),
        **(settings or {}),
    }
    environment = {f"NEREID_{name.upper()}": str(value) for name, value in wanted.items()}
    command = [*wrapper, sys.executable, "-m", "app", "api"]
    with running(command, environment, port, ready, log, ready_seconds=PATIENCE_SECONDS) as server:
        yield Gateway(server.url, server.process, log)


@asynccontextmanager
async def apart(context: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave a context in a thread: this event loop, through which a way to Triton leads, goes on meanwhile."""
    entered = await asyncio.to_thread(context.__enter__)
    try:
        yield entered
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def serving_apart(triton: Triton | None, folder: Path, **others: Any) -> AbstractAsyncContextManager[Gateway]:  # noqa: ANN401
    return apart(serving(triton, folder, **others))


@asynccontextmanager
async def running_gateway(
    triton_address: str, folder: Path, prefix: Sequence[str] = (), /, **settings: object
) -> AsyncIterator[Gateway]:
    """Run a gateway to an address, by default with the model of a fake, and with `prefix` before its command."""
    given = {
        "triton_endpoints": triton_address,
        "model": "tiny",
        "model_repository": REPOSITORY,
        "timeout_seconds": 20,  # the default is too short for a machine that stands still for seconds
        **settings,
    }
    async with serving_apart(None, folder, wrapper=prefix, settings=given, ready="/livez") as gateway:
        if settings.get("search") == "on":
            await asyncio.to_thread(wait_for_search, gateway.url)
        yield gateway


@contextmanager
def gateway_to(triton: Triton, folder: Path, **settings: object) -> Iterator[Gateway]:
    with serving(
        triton, folder, settings={"model": "checksum", "timeout_seconds": 5, "log_level": "warning", **settings}
    ) as gateway:
        yield gateway


@asynccontextmanager
async def stopped(process: psutil.Process) -> AsyncIterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def count_images(triton: Triton, model: str) -> int:
    return (await asyncio.to_thread(read_counters, triton.address, model)).inferences


@contextmanager
def unharmed(gateway: Gateway, *, growth_mb: float = inf, allowed: Collection[int] = ()) -> Iterator[None]:
    """Demand that a block leaves the workers alive, that all of them use little more memory, and that none answers as a failure.

    The workers return the memory of a burst to the system within seconds, so it may be higher for a moment.
    """
    pids, rss, lines = gateway.pids(), gateway.rss(), len(gateway.log_lines())
    yield
    assert gateway.pids() == pids, "a worker has died"
    logged = gateway.log_lines()[lines:]
    wrong = [line for line in logged if "exception" in line or (line.get("status", 0) >= 500 and line["status"] not in allowed)]
    assert wrong == []
    wait_for(lambda: gateway.rss() - rss < growth_mb * 2**20)
