"""One of two Tritons hangs, and the network to one on another host is lost; `tests/system/test_several_gpus.py` kills one."""

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
from bench.harness.triton import Triton, embedded_triton
from tests.faults import models
from tests.faults.exchange import Line, ask, encode
from tests.faults.meanwhile import traffic
from tests.faults.serving import count_images, gateway_to, stopped
from tests.networks import bring_up, enter, ip, network
from tests.processes import PATIENCE_SECONDS

_SHARE = 0.4
"""What a Triton that is back must get of the images."""
_REQUESTS = 500
_DEADLINE = 5
_ADDRESS, _PORT = "10.99.0.2", 4601
"""Where the gateway finds Triton in another network."""


@pytest.fixture
def tritons(fault_repository: Path) -> Iterator[list[Triton]]:
    with embedded_triton(fault_repository, "checksum") as one, embedded_triton(fault_repository, "checksum") as other:
        yield [one, other]


async def until_share(tritons: list[Triton], place: int) -> None:
    """Wait until a Triton has got its share of the images for a while."""
    end = monotonic() + PATIENCE_SECONDS
    before = [await count_images(triton, "checksum") for triton in tritons]
    while True:
        await asyncio.sleep(0.5)
        now = [await count_images(triton, "checksum") for triton in tritons]
        images = [after - first for after, first in zip(now, before, strict=True)]
        if images[place] >= _SHARE * sum(images) > 0:
            return
        assert monotonic() < end, images
        before = now


async def test_only_requests_that_a_hung_triton_had_are_late(tritons: list[Triton], tmp_path: Path) -> None:
    addresses = ",".join(triton.address for triton in tritons)
    with gateway_to(tritons[0], tmp_path, triton_endpoints=addresses, timeout_seconds=_DEADLINE) as gateway:
        async with traffic(gateway.url) as counted:
            await counted.until(_REQUESTS)
            async with stopped(tritons[0].process):
                await counted.until(counted.requests + _REQUESTS)
            await until_share(tritons, 0)

    # Those that the eight clients had sent, once for each of the two workers; half of all if the other one did not take its place.
    assert sum(counted.statuses[status] for status in (503, 504)) <= 16
    assert set(counted.statuses) <= {200, 503, 504}


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
        "NEREID_TIMEOUT_SECONDS": str(_DEADLINE),
    }
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "app", "api"]
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**environment_of(ROOT), **settings}, stdout=log, stderr=log)
    try:
        yield f"unix:{folder / 'api.sock'}"
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


async def until_answered(url: str) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            with suppress(OSError):  # the socket is not there yet
                if (await ask(url, encode(models.solid(10, 20, 30), Content_Type="image/png"))).status == 200:
                    return
            await asyncio.sleep(0.01)


@pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
    reason="a network of its own needs root or CAP_NET_ADMIN, and ip from iproute2",
)
async def test_network_that_swallows_everything_costs_a_deadline_at_most(triton: Triton, tmp_path: Path) -> None:
    """Nothing comes back from there, not even a refusal."""
    line = Line(triton.address)
    with network(f"nereid-{os.getpid()}-a") as near, network(f"nereid-{os.getpid()}-b") as far:
        ip("-n", near, "link", "add", "near", "type", "veth", "peer", "name", "far", "netns", far)
        bring_up(near, "near", "10.99.0.1")
        bring_up(far, "far", _ADDRESS)
        await line.open(sock=listen(far))
        with running_gateway(near, tmp_path) as url:
            await until_answered(url)
            async with traffic(url) as counted:
                for seconds in (3, 15):
                    await counted.until(counted.requests + 200)
                    ip("-n", far, "link", "set", "far", "down")  # what the near network sends is lost without a word
                    await asyncio.sleep(seconds)
                    ip("-n", far, "link", "set", "far", "up")
                    await until_answered(url)
                await counted.until(counted.requests + 200)
        line.cut()

    assert counted.slowest < 2 * _DEADLINE
    assert set(counted.statuses) <= {200, 503, 504}
