"""A Triton on another host, to which the network is lost: nothing comes back, not even a refusal."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import pytest

from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import ask, encode
from tests.faults.relay import connect, relay
from tests.faults.traffic import traffic
from tests.networks import bring_up, enter, ip, network

pytestmark = [
    pytest.mark.skipif(
        subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
        reason="a network of its own needs root or CAP_NET_ADMIN, and ip from iproute2",
    ),
]

_PATIENCE_SECONDS = 30.0
_SECONDS = 5.0
"""The gateway's deadline."""
_ADDRESS, _PORT = "10.99.0.2", 4601
"""Where the gateway finds Triton."""
_IMAGE = encode(models.solid(10, 20, 30), Content_Type="image/png")


class Networks(NamedTuple):
    """Two networks with a cable between them, which can be pulled."""

    near: str
    far: str

    def set_cable(self, state: str) -> None:
        """Plug it (`up`) or pull it (`down`) at the far end: what the near one sends is lost without a word."""
        ip("-n", self.far, "link", "set", "far", state)


@pytest.fixture
def networks() -> Iterator[Networks]:
    with network(f"nereid-{os.getpid()}-a") as near, network(f"nereid-{os.getpid()}-b") as far:
        ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        bring_up(near, "near", "10.99.0.1")
        bring_up(far, "far", _ADDRESS)
        yield Networks(near, far)


def listen(network: str) -> socket.socket:
    """Listen in a network of its own, to which the socket belongs although this process is in another one."""

    def enter_and_listen() -> socket.socket:
        enter(network)
        return socket.create_server((_ADDRESS, _PORT))

    with ThreadPoolExecutor(1) as thread:  # which ends afterwards, in that network
        return thread.submit(enter_and_listen).result()


@asynccontextmanager
async def far_triton(triton: Triton, networks: Networks) -> AsyncIterator[None]:
    """Make Triton reachable from the near network, over the cable."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay((reader, writer), await connect(triton.address))

    server = await asyncio.start_server(pass_on, sock=listen(networks.far))
    yield
    server.close()


@contextmanager
def running_gateway(network: str, log: Path, **settings: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", network, sys.executable, "-m", "app", "api"],
            cwd=ROOT,
            env={**environment_of(ROOT), **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


async def until_answered(url: str) -> float:
    """Wait until an image is answered; return the time."""
    end = monotonic() + _PATIENCE_SECONDS
    while True:
        with suppress(OSError):  # the socket is not there yet
            if (await ask(url, _IMAGE)).status == 200:
                return monotonic()
        assert monotonic() < end
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seconds", [3, 15])
async def test_a_network_that_swallows_everything(
    triton: Triton, networks: Networks, tmp_path: Path, record_figure: RecordFigure, seconds: int
) -> None:
    """Row 4: requests end at their deadline at the latest, and are answered again within two seconds of its return."""
    path = tmp_path / "api.sock"
    settings = {
        "NEREID_SOCKET": str(path),
        "NEREID_WORKERS": "1",
        "NEREID_TRITON_ENDPOINTS": f"{_ADDRESS}:{_PORT}",
        "NEREID_MODEL": "checksum",
        "NEREID_TIMEOUT_SECONDS": str(_SECONDS),
    }
    url = f"unix:{path}"
    async with far_triton(triton, networks):
        with running_gateway(networks.near, tmp_path / "gateway.log", **settings):
            await until_answered(url)
            async with traffic(url, clients=8) as counted:
                await counted.until(200)
                networks.set_cable("down")
                await asyncio.sleep(seconds)
                networks.set_cable("up")
                returned = monotonic()
                back = await until_answered(url) - returned
                await counted.until(counted.requests + 200)
    record_figure(f"network lost for {seconds} s: first 200 after its return, s", back, 2)
    counted.record(record_figure, f"network lost for {seconds} s", slowest=_SECONDS + 0.25)

    assert set(counted.statuses) <= {200, 503, 504}
