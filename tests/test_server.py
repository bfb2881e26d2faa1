"""The server of the API as a user runs it, in real processes: it starts, and stops in order."""

import asyncio
import hashlib
import inspect
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from granian import _signals
from granian.constants import HTTPModes, Interfaces
from granian.server.common import AbstractServer, AbstractWorker

from app.host.processes import SUPERVISED
from app.server import Server
from app.settings.schema import Settings
from tests.fakes.http import listening_on
from tests.fakes.triton import FakeTriton
from tests.processes import PATIENCE_SECONDS, has_ended, nothing_left_running  # noqa: F401 - a fixture
from tests.running_api import BEATS, FOREVER, Api, running, triton_of_api  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port, until

# Notes each signal to stop; those that follow another one within some seconds are the same.
SIGNALS = """
import os
from app.host import signals
signals._SAME_SECONDS = {same_seconds}
note = signals.StopSignals.note
def note_down(self, number):
    note(self, number)
    with open(os.environ["NEREID_SOCKET"] + ".signals", "a") as file:
        file.write("x")
signals.StopSignals.note = note_down
"""


@asynccontextmanager
async def stalled(fake: FakeTriton, api: Api) -> AsyncIterator["asyncio.Task[httpx.Response]"]:
    """Send a request that Triton does not answer before the test lets it."""
    fake.may_answer.clear()
    before = fake.running
    request = asyncio.create_task(api.detect())

    async def runs() -> bool:
        assert not request.done()
        return fake.running > before

    try:
        await until(runs)
        yield request
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


async def check_graceful_end(fake: FakeTriton, api: Api, request: "asyncio.Task[httpx.Response]") -> None:
    """The stalled request is answered, and the server ends without a word."""
    fake.may_answer.set()
    assert (await request).status_code == 200
    assert await api.exit_code() == 0
    assert api.messages == []


@pytest.mark.system
async def test_server_answers_on_a_unix_socket_and_says_when_it_is_ready(fake: FakeTriton, tmp_path: Path) -> None:
    """A socket that a killed server has left behind is no obstacle; one in use is, and the first server goes on."""
    listening_on(tmp_path / "api.sock").close()
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    async with running(fake, tmp_path, socket_mode="640") as api:

        async def has_said(count: int) -> bool:
            return len(api.announcements) == count

        await until(partial(has_said, 1))
        fake.query_refusal = None
        await until(partial(has_said, 2))
        listening, ready = api.announcements
        assert listening.startswith(f"nereid: listening at {api.socket}, but no Triton at {fake.url} can run tiny yet: ")
        assert ready == f"nereid: ready: 1 instance at {api.socket}; Ctrl-C stops it"
        assert stat.S_IMODE(api.socket.stat().st_mode) == 0o640

        second = Api(fake.url, api.socket.parent, log_level="error")
        assert await second.exit_code() == 1
        assert f"nereid: socket {api.socket} is in use" in second.log.read_text(encoding="utf-8")
        assert (await api.detect()).status_code == 200
        await second.client.aclose()


@pytest.mark.system
async def test_address_where_the_server_cannot_listen_is_one_line(fake: FakeTriton, tmp_path: Path) -> None:
    """Another program may have taken the address after it was checked."""
    patch = "import app.preflight; app.preflight.require_address = lambda _: None"
    missing = tmp_path / "missing" / "api.sock"
    api = Api(fake.url, tmp_path, patch, socket=missing)

    assert await api.exit_code() == 1
    assert api.messages == [f"nereid: cannot listen on {missing}: No such file or directory (os error 2)"]
    await api.client.aclose()


@pytest.mark.system
async def test_server_is_not_ready_before_it_stops(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, drain_delay_seconds=10) as api, stalled(fake, api) as request:
        (worker,) = api.workers()
        assert await api.status("/readyz") == 200
        api.process.terminate()
        await until(partial(api.answers, "/readyz", 503))
        assert await api.status("/livez") == 200
        await until(api.is_refused)
        assert api.process.poll() is None
        assert not request.done()
        await check_graceful_end(fake, api, request)
        assert has_ended(worker)
        assert not api.socket.exists()


@pytest.mark.system
@pytest.mark.parametrize("drain_delay", [0.5, FOREVER])
async def test_second_signal_ends_the_server_at_once(fake: FakeTriton, tmp_path: Path, drain_delay: float) -> None:
    """It may be waiting for load balancers or for a request that hangs."""
    patch = SIGNALS.format(same_seconds=0)
    async with running(fake, tmp_path, patch, drain_delay_seconds=drain_delay) as api, stalled(fake, api) as request:
        api.process.terminate()
        await until(partial(api.answers, "/readyz", 503 if drain_delay == FOREVER else None))
        assert api.process.poll() is None
        api.process.terminate()
        assert await api.exit_code() == 0
        with pytest.raises(httpx.HTTPError):
            await request
        assert not api.socket.exists()
        assert api.messages == ["nereid: ending requests in progress"]


@pytest.mark.system
async def test_a_second_signal_is_ignored_under_a_supervisor(
    fake: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systemd may have sent the first one, to all processes; the supervisor kills what shows no sign of life."""
    beats = os.eventfd(0)
    monkeypatch.setenv(SUPERVISED, str(beats))
    patch = SIGNALS.format(same_seconds=0)
    async with running(fake, tmp_path, patch, drain_delay_seconds=0.5) as api, stalled(fake, api) as request:
        api.process.terminate()
        await until(api.is_refused)
        api.process.terminate()
        await until(partial(api.has_noted, signals=2))
        assert not request.done()
        for _ in range(2):
            assert await asyncio.to_thread(os.eventfd_read, beats)
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_systemd_is_told_that_it_works(fake: FakeTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(PATIENCE_SECONDS)
        async with running(fake, tmp_path):
            told: list[bytes] = []
            while {b"READY=1", b"WATCHDOG=1"} > {*told} or told[-1] == b"READY=1":
                told.append(await asyncio.to_thread(systemd.recv, 64))

    assert told.count(b"READY=1") == 1


@pytest.mark.system
async def test_ctrl_c_does_not_wait_for_load_balancers(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, drain_delay_seconds=FOREVER) as api, stalled(fake, api) as request:
        api.process.send_signal(signal.SIGINT)
        await until(api.is_refused)
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_signal_may_be_sent_twice_and_to_workers_too(fake: FakeTriton, tmp_path: Path) -> None:
    """As a terminal and systemd do; requests in progress end all the same, and no end is unexpected."""
    patch = SIGNALS.format(same_seconds=FOREVER)
    async with running(fake, tmp_path, patch, drain_delay_seconds=1, workers=2) as api, stalled(fake, api) as request:
        for count in (1, 2):
            os.killpg(api.process.pid, signal.SIGTERM)
            await until(partial(api.has_noted, signals=count))
        await until(api.is_refused)
        assert not request.done()
        await check_graceful_end(fake, api, request)


SLOW_START = f"""
{BEATS}
import asyncio
from contextlib import asynccontextmanager
from app.api import application
build = application.build
def build_slowly(open_resources, *arguments):
    @asynccontextmanager
    async def open_slowly():
        async with open_resources() as resources:
            try:
                os.mkdir(os.environ["NEREID_SOCKET"] + ".first")
            except FileExistsError:
                while not os.path.exists(os.environ["NEREID_SOCKET"] + ".go"):
                    await asyncio.sleep(0.02)
            yield resources
    return build(open_slowly, *arguments)
application.build = build_slowly
"""
"""All workers but the first one are not ready before the test lets them, though their event loops run."""


@pytest.mark.system
async def test_a_ctrl_c_reaches_a_worker_that_is_starting(fake: FakeTriton, tmp_path: Path) -> None:
    """It ends once it has started; Granian would block the signal."""
    async with running(fake, tmp_path, SLOW_START, workers=2) as api:
        await until(partial(api.has_noted, alive=2))  # before, it would be killed
        os.killpg(api.process.pid, signal.SIGINT)
        (tmp_path / "api.sock.go").touch()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_a_worker_that_is_starting_is_not_waited_for(fake: FakeTriton, tmp_path: Path) -> None:
    """It has no requests, but Triton may keep it busy for as long as a request may take."""
    fake.may_answer.clear()
    async with running(fake, tmp_path, has_begun=lambda: fake.running > 0, drain_delay_seconds=0) as api:
        api.process.terminate()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_a_worker_that_has_ended_is_not_killed(fake: FakeTriton, tmp_path: Path) -> None:
    """Nor is a kill logged: on a busy machine, the thread that collects the worker may run late."""
    patch = """
import os, threading, time
waitpid = os.waitpid
def wait_late(pid, options):
    is_watcher = threading.current_thread() is not threading.main_thread()
    if not is_watcher:
        time.sleep(0.1)
    found = waitpid(pid, options)
    if is_watcher and found[0]:
        time.sleep(1)
    return found
os.waitpid = wait_late"""
    async with running(fake, tmp_path, patch, workers=2, drain_delay_seconds=0) as api:
        api.process.terminate()
        assert await api.exit_code() == 0
        assert api.messages == []


@pytest.mark.system
async def test_a_worker_that_misses_the_signal_stops_all_the_same(fake: FakeTriton, tmp_path: Path) -> None:
    """Between its start and its first request the event loop does not run, and forgets signals until another one comes."""
    patch = f"""
import os, time
import granian.server.mp as mp
worker = mp.ASGIWorker
def make_late(*arguments):
    open({str(tmp_path / "started")!r}, "w").close()
    while not os.path.exists({str(tmp_path / "told")!r}):
        time.sleep(0.02)
    return worker(*arguments)
mp.ASGIWorker = make_late"""
    patient = {"drain_delay_seconds": 0, "timeout_seconds": 1, "max_timeout_seconds": 1, "body_seconds": 4}
    async with running(fake, tmp_path, patch, (tmp_path / "started").exists, **patient) as api:
        os.killpg(api.process.pid, signal.SIGTERM)
        (tmp_path / "told").touch()
        assert await api.exit_code() == 0
        assert api.messages == []


@pytest.mark.parametrize(
    ("function", "digest"),
    [
        (AbstractServer.startup, "6b80a44c5e1db15e"),
        (AbstractServer.shutdown, "e6559a0343cf7bdb"),
        (AbstractServer.signal_handler_interrupt, "e9efe050e7e2d430"),
        (AbstractServer._respawn_workers, "164f5281ce938dbe"),  # noqa: SLF001
        (AbstractWorker.is_alive, "fbf49ffdde8a7170"),
        (_signals.set_loop_signals, "ce78d76020b2e048"),
    ],
)
def test_code_of_granian_that_the_server_overrides_is_unchanged(function: Callable[..., object], digest: str) -> None:
    """If Granian has changed it, look through `app/server.py` before the new digest."""
    assert hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16] == digest


def test_server_is_as_the_settings_say(tmp_path: Path) -> None:
    port = free_port()
    server = Server(Settings(host="127.0.0.2", port=port, workers=3, timeout_seconds=5, max_timeout_seconds=40))
    assert (server.target, server.factory) == ("app.main:create_app", True)
    assert (server.bind_addr, server.bind_port, server.bind_uds, server.workers) == ("127.0.0.2", port, None, 3)
    assert (server.interface, server.http, server.websockets) == (Interfaces.ASGI, HTTPModes.http1, False)
    assert server.workers_kill_timeout == 75
    assert server.backpressure >= server.backlog > 1024
    assert (server.workers_lifetime, server.workers_rss) == (None, None)
    server = Server(Settings(socket=str(tmp_path / "api.sock"), socket_mode="606"))
    assert (server.bind_uds, server.uds_permissions) == (tmp_path / "api.sock", 0o606)
