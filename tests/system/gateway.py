"""The API as a user runs it, without a Triton of its own."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from app.host.processes import end_group
from bench.harness.processes import wait_for_answer
from tests.processes import PATIENCE_SECONDS, wait_for_search
from tests.support import REPOSITORY, ROOT, free_port

_START_SECONDS = PATIENCE_SECONDS
_STOP_SECONDS = 30


class RunningGateway(NamedTuple):
    port: int
    process: "subprocess.Popen[bytes]"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if child.status() != psutil.STATUS_ZOMBIE]


@asynccontextmanager
async def running_gateway(
    triton_address: str, folder: Path, prefix: Sequence[str] = (), /, **settings: object
) -> AsyncIterator[RunningGateway]:
    """Run the API until the block ends, with `prefix` before its command; it leaves its log in the folder."""
    port = free_port()
    given = {
        "port": port,
        "triton_endpoints": triton_address,
        "model": "tiny",
        "model_repository": REPOSITORY,
        "timeout_seconds": 20,  # the default is too short for a machine that stands still for seconds
        **settings,
    }
    environ = {**os.environ, **{f"NEREID_{name.upper()}": str(value) for name, value in given.items()}}
    log = folder / "gateway.log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: ASYNC220 - it takes no time
            [*prefix, sys.executable, "-m", "app", "api"],
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    gateway = RunningGateway(port, process)
    try:
        # A fake Triton runs in this event loop, and the workers ask it while they start.
        status = await asyncio.to_thread(wait_for_answer, f"{gateway.url}/livez", process, _START_SECONDS)
        assert status == 200, log.read_text()
        if settings.get("search") == "on":
            await asyncio.to_thread(wait_for_search, gateway.url)
        yield gateway
    finally:
        await asyncio.to_thread(end_group, process, _STOP_SECONDS)
