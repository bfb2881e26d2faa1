"""A Triton on another host, to which the network is lost: nothing comes back, not even a refusal."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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

# Forwards connections from a network of its own to a unix socket, which networks do not separate.
_FORWARDER = """
import asyncio, sys

async def forward(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()

async def connect(reader, writer):
    there = await asyncio.open_unix_connection(sys.argv[3])
    await asyncio.gather(forward(reader, there[1]), forward(there[0], writer))

async def main():
    server = await asyncio.start_server(connect, sys.argv[1], int(sys.argv[2]))
    print("ready", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class Networks:
    """Two networks with a cable between them, which can be pulled."""

    def __init__(self, name: str) -> None:
        self.near, self.far = f"{name}-a", f"{name}-b"

    def create(self) -> None:
        for network in (self.near, self.far):
            _ip("netns", "add", network)
            _ip("-n", network, "link", "set", "lo", "up")
        _ip("-n", self.near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", self.far)
        for network, end, address in ((self.near, "near", "10.99.0.1"), (self.far, "far", _ADDRESS)):
            _ip("-n", network, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", network, "link", "set", end, "up")

    def set_cable(self, state: str) -> None:
        """Plug it (`up`) or pull it (`down`) at the far end: what the near one sends is lost without a word."""
        _ip("-n", self.far, "link", "set", "far", state)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks(f"nereid-{os.getpid()}")
    try:
        made.create()
        yield made
    finally:
        for network in (made.near, made.far):
            subprocess.run(["ip", "netns", "delete", network], check=False, capture_output=True)


@contextmanager
def running(network: str, command: list[str], log: Path, **environment: str) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["ip", "netns", "exec", network, sys.executable, *command],
            cwd=ROOT,
            env={**environment_of(ROOT), **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(_PATIENCE_SECONDS)


@asynccontextmanager
async def far_triton(triton: Triton, networks: Networks, folder: Path) -> AsyncIterator[None]:
    """Make Triton reachable from the near network, over the cable."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay((reader, writer), await connect(triton.address))

    socket = folder / "triton.sock"
    server = await asyncio.start_unix_server(pass_on, socket)
    log = folder / "forwarder.log"
    with running(networks.far, ["-c", _FORWARDER, _ADDRESS, str(_PORT), str(socket)], log):
        yield
    server.close()


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
    socket = tmp_path / "api.sock"
    settings = {
        "NEREID_SOCKET": str(socket),
        "NEREID_WORKERS": "1",
        "NEREID_TRITON_ENDPOINTS": f"{_ADDRESS}:{_PORT}",
        "NEREID_MODEL": "checksum",
        "NEREID_TIMEOUT_SECONDS": str(_SECONDS),
    }
    url = f"unix:{socket}"
    async with far_triton(triton, networks, tmp_path):
        with running(networks.near, ["-m", "app", "api"], tmp_path / "gateway.log", **settings):
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
    assert counted.slowest <= _SECONDS + 0.25
    assert back <= 2
