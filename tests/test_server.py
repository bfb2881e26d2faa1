"""The server of the API as a user runs it, in real processes: it starts, stops in order, and replaces its workers."""

import asyncio
import hashlib
import inspect
import os
import pty
import signal
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from granian import _signals
from granian.server.common import AbstractServer, AbstractWorker

from app.api.caller import keys
from app.host.processes import REPLACE_SIGNAL, SUPERVISED
from tests.api_process import FOREVER, Api, running
from tests.fakes.http import listening_on
from tests.fakes.triton import FakeTriton, serving
from tests.processes import PATIENCE_SECONDS, has_ended, nothing_left_running  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import until


@pytest.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton().find_nothing()
    async with serving(fake):
        yield fake


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
async def test_server_is_not_ready_before_it_stops(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, drain_delay_seconds=10) as api, stalled(fake, api) as request:
        (worker,) = api.workers()
        os.kill(worker.pid, REPLACE_SIGNAL)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (ready := await api.client.get("/readyz")).headers.get("connection") != "close":
                assert ready.status_code == 200
        assert ready.status_code == 200
        api.process.terminate()
        await until(partial(api.answers, "/readyz", 503))
        alive = await api.client.get("/livez")
        assert (alive.status_code, alive.headers["connection"]) == (200, "close")
        await until(api.is_refused)
        assert api.process.poll() is None
        assert not request.done()
        await check_graceful_end(fake, api, request)
        assert has_ended(worker)
        assert not api.socket.exists()


@pytest.mark.system
async def test_second_signal_ends_the_server_at_once(fake: FakeTriton, tmp_path: Path) -> None:
    patch = SIGNALS.format(same_seconds=0)
    async with running(fake, tmp_path, patch, drain_delay_seconds=FOREVER) as api, stalled(fake, api) as request:
        api.process.terminate()
        await until(partial(api.answers, "/readyz", 503))
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
        await until(partial(api.has_noted, 2))
        assert not request.done()
        for _ in range(2):
            assert await asyncio.to_thread(os.eventfd_read, beats)
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_signal_may_be_sent_twice_and_to_workers_too(fake: FakeTriton, tmp_path: Path) -> None:
    """As a terminal and systemd do; requests in progress end all the same, and no end is unexpected."""
    patch = SIGNALS.format(same_seconds=FOREVER)
    async with running(fake, tmp_path, patch, drain_delay_seconds=1, workers=2) as api, stalled(fake, api) as request:
        for count in (1, 2):
            os.killpg(api.process.pid, signal.SIGTERM)
            await until(partial(api.has_noted, count))
        await until(api.is_refused)
        assert not request.done()
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_closing_the_terminal_ends_the_server(fake: FakeTriton, tmp_path: Path) -> None:
    """The kernel sends SIGHUP then, which otherwise renews the workers."""
    outer, inner = pty.openpty()
    on_terminal = f"import os\nos.dup2(os.open({os.ttyname(inner)!r}, os.O_RDWR), 0)"
    async with running(fake, tmp_path, on_terminal) as api:
        os.close(inner)
        os.close(outer)
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_a_worker_that_is_starting_is_not_waited_for(fake: FakeTriton, tmp_path: Path) -> None:
    """It has no requests, but Triton may keep it busy for as long as a request may take."""
    fake.may_answer.clear()
    async with running(fake, tmp_path, has_begun=lambda: fake.running > 0, drain_delay_seconds=0) as api:
        api.process.terminate()
        assert await api.exit_code() == 0


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
        (AbstractServer.signal_handler_reload, "8d88cc8590fc6b21"),
        (AbstractServer._respawn_workers, "164f5281ce938dbe"),  # noqa: SLF001
        (AbstractWorker.is_alive, "fbf49ffdde8a7170"),
        (_signals.set_loop_signals, "ce78d76020b2e048"),
    ],
)
def test_code_of_granian_that_the_server_overrides_is_unchanged(function: Callable[..., object], digest: str) -> None:
    """If Granian has changed it, look through `app/server.py` before the new digest."""
    assert hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16] == digest


FAILING_START = """
import os, app.server
from app.api import application
app.server._MAX_PAUSE_SECONDS = 0.1
app.server._HANDOVER_SECONDS = 3.0
build = application.build
def build_or_fail(*arguments):
    if os.path.exists(os.environ["NEREID_SOCKET"] + ".broken"):
        raise SystemExit("broken")
    return build(*arguments)
application.build = build_or_fail
"""
"""No worker can start while there is a certain file."""


@pytest.mark.system
async def test_a_worker_that_cannot_start_does_not_end_the_others(fake: FakeTriton, tmp_path: Path) -> None:
    broken = tmp_path / "api.sock.broken"
    async with running(fake, tmp_path, FAILING_START, workers=2) as api:

        async def workers() -> object:
            return (await api.client.get("/health")).json()["workers"]

        async def are_all_there() -> bool:
            return await workers() == {"running": 2, "wanted": 2}

        async def is_said(text: str, times: int = 1) -> bool:
            assert await api.status("/readyz") == 200
            return sum(text in message for message in api.messages) >= times

        await until(are_all_there)
        ended, other = api.workers()
        broken.touch()
        ended.kill()
        await until(partial(is_said, "5 times in a row"))
        assert api.workers()[0] == other
        assert (await api.detect()).status_code == 200
        assert await workers() == {"running": 1, "wanted": 2}

        broken.unlink()
        await until(are_all_there)
        before = api.workers()
        broken.touch()
        api.process.send_signal(signal.SIGHUP)
        await until(partial(is_said, "renewing worker-", times=2))
        await until(partial(is_said, "stays, because its successor cannot start", times=2))
        assert api.workers() == before
        api.process.terminate()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_an_api_of_which_no_worker_can_start_ends(fake: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "api.sock.broken").touch()
    api = Api(fake.url, tmp_path, FAILING_START, workers=2)

    assert await api.exit_code() == 1
    assert sum("cannot start, and no other serves" in message for message in api.messages) == 1
    await api.client.aclose()


@pytest.mark.system
async def test_files_that_become_invalid_do_not_end_the_workers(fake: FakeTriton, tmp_path: Path) -> None:
    credential, table = keys.create("camera-1")
    (file := tmp_path / "keys.toml").write_text(table.replace('["detect"]', '["detect", "health"]'), encoding="utf-8")
    patch = "import app.server; app.server._HANDOVER_SECONDS = 3.0"
    async with running(fake, tmp_path, patch, workers=2, api_keys_file=file) as api:
        api.client.headers["x-api-key"] = credential
        file.write_text("", encoding="utf-8")
        first = set(api.workers())

        async def are_replaced(count: int) -> bool:
            status = await api.status("/models")
            assert status in {200, None}  # the key is valid; on a busy machine, a worker may end before the next one answers
            return status == 200 and len(api.workers()) == 2 and len(set(api.workers()) - first) == count

        api.workers()[0].kill()
        await until(partial(are_replaced, 1))
        api.process.send_signal(signal.SIGHUP)
        await until(partial(are_replaced, 2))

        async def is_told() -> bool:
            return [*(await api.client.get("/health")).json()["refused_files"]] == ["api_keys"]

        await until(is_told)
        api.process.terminate()
        assert await api.exit_code() == 0
