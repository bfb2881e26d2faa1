"""What is said of a gateway that runs already, or of what listens in its place."""

import asyncio
import os
import socket
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import UnixStreamServer
from threading import Thread

import psutil
import pytest

from app import healthcheck
from app.doctor import gateway
from app.doctor.finding import Severity
from app.settings.schema import Settings
from tests.doctor.setups import assert_useful
from tests.fakes.http import answering
from tests.fakes.triton import FakeTriton, serving
from tests.support import free_port
from tests.system.gateway import running_gateway


def test_a_port_without_a_listener_is_ok() -> None:
    finding = gateway.check(Settings(port=free_port(), host="0.0.0.0"))  # noqa: S104 - nobody listens

    assert finding.severity is Severity.OK
    assert "nothing listens at http://127.0.0.1:" in finding.message


def test_another_program_that_listens_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = Settings(port=server.getsockname()[1])
        finding = gateway.check(settings)

    assert_useful(finding, Severity.WARNING, says=["something else", f"process {os.getpid()} (", str(settings.port)], fix="--port")


@pytest.mark.system
@pytest.mark.parametrize("with_workers", [False, True])
async def test_a_gateway_that_hangs(tmp_path: Path, *, with_workers: bool) -> None:
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

    if not with_workers:
        assert failure == ""
        assert "a gateway runs at" in finding.message
    else:
        assert failure == f"{running.url} does not answer"
        assert_useful(finding, Severity.FAILURE, says=["a Nereid", f"process {main.pid} (nereid)"], fix=f"kill -9 {main.pid}")


def test_a_listener_that_answers_like_a_gateway_is_ok() -> None:
    with answering(b"") as url:
        finding = gateway.check(Settings(port=int(url.rpartition(":")[2])))

    assert finding.severity is Severity.OK
    assert f"a gateway runs at {url}, and is ready" in finding.message


@pytest.mark.parametrize("host", ["no-such-host.invalid", "203.0.113.1", "a..b"])
def test_a_host_of_another_machine(host: str) -> None:
    assert_useful(gateway.check(Settings(host=host)), Severity.FAILURE, says=[host], fix="NEREID_HOST=127.0.0.1")


class Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def first_socket(tmp_path: Path) -> Iterator[Path]:
    """The socket of the first instance, on which a server answers."""
    path = tmp_path / "nereid-1.sock"
    with UnixStreamServer(str(path), Live) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield path
        server.shutdown()
        thread.join()


def test_sockets_are_asked(first_socket: Path) -> None:
    one = gateway.check(Settings(socket=str(first_socket)))
    two = gateway.check(Settings(instances=2, socket=str(first_socket.parent)))
    none = gateway.check(Settings(socket=str(first_socket.with_name("other.sock"))))

    assert one.severity is two.severity is none.severity is Severity.OK
    assert f"1 of 1 gateways answer: {first_socket}" in one.message
    assert f"1 of 2 gateways answer: {first_socket}" in two.message
    assert "no gateway answers at" in none.message
