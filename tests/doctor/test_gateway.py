"""What is said of a gateway that runs already, or of what listens in its place."""

import asyncio
import os
import socket
from pathlib import Path

import psutil
import pytest

from app import healthcheck
from app.doctor import gateway
from app.settings.schema import Settings
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding
from tests.fakes.http import answering, scripted
from tests.fakes.triton import FakeTriton, serving
from tests.support import free_port
from tests.system.gateway import running_gateway


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = Settings(port=free_port(), host="0.0.0.0")  # noqa: S104 - nobody listens
    assert_finding(gateway.check(everywhere), OK, "nothing listens at http://127.0.0.1:")
    with answering(b"") as url:
        found = gateway.check(Settings(port=int(url.rpartition(":")[2])))
    assert_finding(found, OK, f"a gateway runs at {url}, and is ready")
    monkeypatch.setattr(gateway, "_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = gateway.check(Settings(port=server.getsockname()[1]))
    assert_finding(found, WARNING, "something else", f"process {os.getpid()} (", "--port")


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1", "a..b"])
def test_host_of_another_machine(host: str) -> None:
    assert_finding(gateway.check(Settings(host=host)), FAILURE, host, "NEREID_HOST=127.0.0.1")


def test_sockets(tmp_path: Path) -> None:
    first = tmp_path / "nereid-1.sock"
    with scripted(path=first):
        assert_finding(gateway.check(Settings(socket=str(first))), OK, f"1 of 1 gateways answer: {first}")
        assert_finding(gateway.check(Settings(instances=2, socket=str(tmp_path))), OK, f"1 of 2 gateways answer: {first}")
    assert_finding(gateway.check(Settings(socket=str(tmp_path / "other.sock"))), OK, "no gateway answers at")


@pytest.mark.system
@pytest.mark.parametrize("with_workers", [False, True])
async def test_gateway_that_hangs(tmp_path: Path, *, with_workers: bool) -> None:
    """A container's health check notices as soon as nobody answers; with only the main process stopped, the workers do."""
    fake = FakeTriton()
    async with serving(fake), running_gateway(fake.url, tmp_path, workers=1) as running:
        main = psutil.Process(running.process.pid)
        stopped = [main, *(running.workers() if with_workers else [])]
        for process in stopped:
            process.suspend()
        settings = Settings(port=running.port)
        failure = await asyncio.to_thread(healthcheck.failure, settings)
        finding = await asyncio.to_thread(gateway.check, settings)
        for process in stopped:
            process.resume()
        running.process.terminate()  # at once: another thread may take the signal then, which must not wake nobody
        assert await asyncio.to_thread(running.process.wait, 30) == 0

    if with_workers:
        assert failure == f"{running.url} does not answer"
        assert_finding(finding, FAILURE, "a Nereid", f"process {main.pid} (nereid)", f"kill -9 {main.pid}")
    else:
        assert failure == ""
        assert_finding(finding, OK, "a gateway runs at")
