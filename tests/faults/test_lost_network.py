"""A Triton on another host, to which the network is lost: nothing comes back, not even a refusal."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic

import pytest

from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import ask, encode
from tests.faults.relay import connect, relay
from tests.faults.traffic import traffic
from tests.networks import bring_up, enter, ip, network
from tests.processes import PATIENCE_SECONDS

_SECONDS = 5.0
"""The gateway's deadline."""
_ADDRESS, _PORT = "10.99.0.2", 4601
"""Where the gateway finds Triton."""
_IMAGE = encode(models.solid(10, 20, 30), Content_Type="image/png")


def listen(network: str) -> socket.socket:
    """Listen in a network of its own, to which the socket belongs although this process is in another one."""

    def enter_and_listen() -> socket.socket:
        enter(network)
        return socket.create_server((_ADDRESS, _PORT))

    with ThreadPoolExecutor(1) as thread:  # which ends afterwards, in that network
        return thread.submit(enter_and_listen).result()


@contextmanager
def running_gateway(network: str, folder: Path) -> Iterator[str]:
    settings = {
        "NEREID_SOCKET": str(folder / "api.sock"),
        "NEREID_WORKERS": "1",
        "NEREID_TRITON_ENDPOINTS": f"{_ADDRESS}:{_PORT}",
        "NEREID_MODEL": "checksum",
        "NEREID_TIMEOUT_SECONDS": str(_SECONDS),
    }
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "app", "api"]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**environment_of(ROOT), **settings}, stdout=log, stderr=log)
    try:
        yield f"unix:{folder / 'api.sock'}"
    finally:
        process.terminate()
        process.wait(30)


async def until_answered(url: str) -> float:
    """Wait until an image is answered; return the time."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with suppress(OSError):  # the socket is not there yet
                if (await ask(url, _IMAGE)).status == 200:
                    return monotonic()
            await asyncio.sleep(0.01)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
    reason="a network of its own needs root or CAP_NET_ADMIN, and ip from iproute2",
)
async def test_network_that_swallows_everything_costs_a_deadline_at_most(
    triton: Triton, tmp_path: Path, record_figure: RecordFigure
) -> None:
    """Requests are answered again within two seconds of its return."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay((reader, writer), await connect(triton.address))

    with network(f"nereid-{os.getpid()}-a") as near, network(f"nereid-{os.getpid()}-b") as far:
        ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        bring_up(near, "near", "10.99.0.1")
        bring_up(far, "far", _ADDRESS)
        server = await asyncio.start_server(pass_on, sock=listen(far))
        with running_gateway(near, tmp_path) as url:
            await until_answered(url)
            async with traffic(url) as counted:
                for seconds in (3, 15):
                    await counted.until(counted.requests + 200)
                    ip("-n", far, "link", "set", "far", "down")  # what the near network sends is lost without a word
                    await asyncio.sleep(seconds)
                    ip("-n", far, "link", "set", "far", "up")
                    returned = monotonic()
                    back = await until_answered(url) - returned
                    record_figure(f"network lost for {seconds} s: first 200 after its return, s", back, 2)
                await counted.until(counted.requests + 200)
        server.close()
    counted.record(record_figure, "network lost", slowest=_SECONDS + 0.25)

    assert set(counted.statuses) <= {200, 503, 504}
