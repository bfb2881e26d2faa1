"""The server of the API as a user runs it, in real processes: it stops in order, and replaces workers that do not respond."""

import asyncio
import hashlib
import inspect
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import trustme
from granian import _signals
from granian.constants import HTTPModes, Interfaces
from granian.server.common import AbstractServer, AbstractWorker

from app.api.caller import keys
from app.host.processes import SUPERVISED, kill_group
from app.server import Server
from app.settings.schema import Settings
from app.triton.shared_memory import sweep
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.processes import PATIENCE_SECONDS, has_ended, nothing_left_running  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import REPOSITORY, ROOT, SCENE, eventually, free_port, until
from tests.system.gateway import running_gateway

FOREVER = 600
"""Seconds; longer than any test takes."""

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
# Notes each worker that has shown that it is alive.
BEATS = """
import os
from app.resilience.worker_table import WorkerTable
beat = WorkerTable.beat
def beat_and_note(table):
    beat(table)
    open(f"{os.environ['NEREID_SOCKET']}.{os.getpid()}.alive", "w").close()
WorkerTable.beat = beat_and_note
"""


_ANNOUNCEMENTS = "nereid: listening at ", "nereid: ready: "


class Api:
    """An API that runs in processes of its own and listens on a unix socket."""

    def __init__(self, triton_address: str, folder: Path, patch: str = "", **settings: object) -> None:
        """Start it.

        Args:
            triton_address: Its Triton.
            folder: For its socket and its log.
            patch: Python that it runs first.
            **settings: What is not as usual in these tests.
        """
        self.socket = folder / "api.sock"
        self.log = folder / "api.log"
        given = {
            "socket": self.socket,
            "triton_endpoints": triton_address,
            "model": "tiny",
            "model_repository": REPOSITORY,
            "workers": 1,
            "timeout_seconds": FOREVER,
            **settings,
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"import sys\n{patch}\nfrom app.__main__ import main\nsys.exit(main())", "api"],
                cwd=ROOT,
                env={**os.environ, **{f"NEREID_{name.upper()}": str(value) for name, value in given.items()}},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[int(os.environ[SUPERVISED])] if SUPERVISED in os.environ else [],
            )
        # Each request has a connection of its own, so that none is sent to a worker that has stopped meanwhile.
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket), limits=httpx.Limits(max_keepalive_connections=0))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://nereid", timeout=PATIENCE_SECONDS)

    async def status(self, path: str) -> int | None:
        """Return the status of a path; None if there is no answer."""
        try:
            return (await self.client.get(path)).status_code
        except httpx.HTTPError:
            return None

    async def answers(self, path: str, status: int | None) -> bool:
        return await self.status(path) == status

    async def detect(self) -> httpx.Response:
        return await self.client.post("/detect", content=SCENE)

    def workers(self) -> list[psutil.Process]:
        return [child for child in psutil.Process(self.process.pid).children() if not has_ended(child)]

    async def is_refused(self) -> bool:
        return await self.answers("/livez", None)

    async def has_noted(self, *, signals: int = 0, alive: int = 0) -> bool:
        """Return whether so many of the signals, or of the workers that are alive, have been noted by a patch."""
        noted = self.socket.with_name("api.sock.signals")
        return (noted.stat().st_size if noted.exists() else 0) >= signals and len(list(self.log.parent.glob("*.alive"))) >= alive

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_SECONDS)

    @property
    def messages(self) -> list[str]:
        """What it has said, without the log and where it listens."""
        return [line for line in self._lines if not line.startswith(("{", *_ANNOUNCEMENTS))]

    @property
    def announcements(self) -> list[str]:
        return [line for line in self._lines if line.startswith(_ANNOUNCEMENTS)]

    @property
    def _lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()


@asynccontextmanager
async def running(
    fake: FakeTriton, folder: Path, patch: str = "", has_begun: Callable[[], bool] | None = None, **settings: object
) -> AsyncIterator[Api]:
    """Run an API, which answers unless only something else is waited for, until the block ends, however it ends."""
    api = Api(fake.url, folder, patch, **settings)

    async def answers() -> bool:
        assert api.process.poll() is None, api.log.read_text(encoding="utf-8")
        return has_begun() if has_begun else await api.answers("/livez", 200)

    try:
        await until(answers)
        yield api
    finally:
        fake.may_answer.set()
        await api.client.aclose()
        kill_group(api.process)
        sweep()  # as the next worker would


@pytest.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    async with serving(fake):
        yield fake


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
async def test_server_answers_on_a_unix_socket(fake: FakeTriton, tmp_path: Path) -> None:
    """A socket that a killed server has left behind is no obstacle."""
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "api.sock"))
        killed.listen()
    async with running(fake, tmp_path, socket_mode="640") as api:
        assert (await api.client.get("/livez")).json() == {"status": "alive"}
        assert (await api.detect()).status_code == 200
        assert stat.S_IMODE(api.socket.stat().st_mode) == 0o640

        await check_socket_in_use(api, fake)


@pytest.mark.system
async def test_server_says_where_it_listens_and_when_it_is_ready(fake: FakeTriton, tmp_path: Path) -> None:
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    async with running(fake, tmp_path) as api:

        async def has_said(count: int) -> bool:
            return len(api.announcements) == count

        await until(partial(has_said, 1))
        fake.query_refusal = None
        await until(partial(has_said, 2))
        listening, ready = api.announcements
    assert listening.startswith(f"nereid: listening at {api.socket}, but no Triton at {fake.url} can run tiny yet: ")
    assert ready == f"nereid: ready: 1 instance at {api.socket}; Ctrl-C stops it"


async def check_socket_in_use(api: Api, fake: FakeTriton) -> None:
    """A second server says in one line why it does not start, and the first one goes on."""
    second = Api(fake.url, api.socket.parent, log_level="error")
    assert await second.exit_code() == 1
    assert [line for line in second.messages if "in use" in line] == second.messages
    assert second.messages[0].startswith(f"nereid: socket {api.socket} is in use")
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
async def test_a_signal_that_is_sent_twice_is_one(fake: FakeTriton, tmp_path: Path) -> None:
    patch = SIGNALS.format(same_seconds=FOREVER)
    async with running(fake, tmp_path, patch, drain_delay_seconds=0.5) as api, stalled(fake, api) as request:
        for count in (1, 2, 3):
            api.process.terminate()
            await until(partial(api.has_noted, signals=count))
        await until(api.is_refused)
        assert not request.done()
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_ctrl_c_does_not_wait_for_load_balancers(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, drain_delay_seconds=FOREVER) as api, stalled(fake, api) as request:
        api.process.send_signal(signal.SIGINT)
        await until(api.is_refused)
        await check_graceful_end(fake, api, request)


@pytest.mark.system
async def test_workers_may_get_the_signal_too(fake: FakeTriton, tmp_path: Path) -> None:
    """A terminal and systemd send it to all processes; requests in progress end all the same, and no end is unexpected."""
    async with running(fake, tmp_path, drain_delay_seconds=1, workers=2) as api, stalled(fake, api) as request:
        os.killpg(api.process.pid, signal.SIGTERM)
        await until(api.is_refused)
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


@pytest.mark.system
async def test_a_worker_that_does_not_respond_is_replaced(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, BEATS, workers=2) as api:
        await until(partial(api.has_noted, alive=2))
        stopped, other = api.workers()
        stopped.suspend()

        async def is_replaced() -> bool:
            return has_ended(stopped) and len(api.workers()) == 2

        await until(is_replaced)
        assert other in api.workers()

        async def answers() -> bool:
            return (await api.detect()).status_code == 200

        await until(answers)
        assert f"nereid: worker {stopped.pid} does not respond; replacing it" in api.messages
        api.process.terminate()
        assert await api.exit_code() == 0


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
    contents = {
        "keys.toml": table.replace('["detect"]', '["detect", "health"]'),
        "ca.crt": trustme.CA().cert_pem.bytes().decode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    more: dict[str, Any] = {
        "api_keys_file": tmp_path / "keys.toml",
        "triton_tls_folder": tmp_path,
    }
    patch = "import app.server; app.server._HANDOVER_SECONDS = 3.0"
    async with running(fake, tmp_path, patch, workers=2, **more) as api:
        api.client.headers["x-api-key"] = credential
        for name in contents:
            (tmp_path / name).write_text("", encoding="utf-8")
        first = set(api.workers())

        async def are_replaced(count: int) -> bool:
            assert await api.answers("/models", 503)  # the key is valid; there is no TLS at this Triton
            return len(api.workers()) == 2 and len(set(api.workers()) - first) == count

        api.workers()[0].kill()
        await until(partial(are_replaced, 1))
        api.process.send_signal(signal.SIGHUP)
        await until(partial(are_replaced, 2))

        async def is_told() -> bool:
            refused = (await api.client.get("/health")).json()["refused_files"]
            return sorted(refused) == ["api_keys", "triton_tls"]

        await until(is_told)
        api.process.terminate()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_a_worker_with_too_much_memory_is_replaced(fake: FakeTriton, tmp_path: Path) -> None:
    flag, is_ready, is_told = tmp_path / "too much", tmp_path / "ready", tmp_path / "told"
    patch = (
        "import app.server, os, time; app.server._HANDOVER_SECONDS = 1.0\n"
        "from granian.server.mp import WorkerProcess; terminate = WorkerProcess.terminate\n"
        "def hand_over(worker):\n"
        f"    while not os.path.exists({str(is_ready)!r}): time.sleep(0.01)  # on a busy machine\n"
        f"    open({str(is_told)!r}, 'w').close()\n"
        "    terminate(worker)\n"
        "WorkerProcess.terminate = hand_over\n"
        "app.server.Server.rss_sample_interval = property(lambda _: 0.2, lambda *_: None)\n"
        f"app.server.Server.workers_rss = property(lambda _: 1 if os.path.exists({str(flag)!r}) else 2**50, lambda *_: None)"
    )
    async with running(fake, tmp_path, patch) as api:
        (first,) = api.workers()
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        head = f"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Type: image/bmp\r\nContent-Length: {len(SCENE)}\r\n\r\n"
        writer.write(head.encode() + SCENE[:100])
        await writer.drain()
        flag.touch()

        async def is_next_there() -> bool:
            assert await api.status("/livez") == 200
            return len(api.workers()) == 2

        await until(is_next_there)
        flag.unlink()

        async def are_both_ready() -> bool:
            return (await api.client.get("/health")).json()["workers"]["running"] == 2  # type: ignore[no-any-return]

        await until(are_both_ready)
        is_ready.touch()
        (second,) = set(api.workers()) - {first}

        async def is_only_next_there() -> bool:
            assert await api.status("/livez") == 200
            return api.workers() == [second]

        await eventually(is_told.exists)
        for _ in range(20):  # a connection that the first one has just accepted is closed, and a client repeats the request
            await until(partial(api.answers, "/livez", 200))
        writer.write(SCENE[100:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(is_only_next_there)
        writer.close()


@pytest.mark.system
async def test_each_line_of_all_processes_is_one_write(fake: FakeTriton, tmp_path: Path) -> None:
    read, write = os.pipe2(os.O_DIRECT)  # which keeps each write apart
    writes: list[str] = []

    def collect() -> None:
        while written := os.read(read, 4096):
            writes.append(written.decode())

    settings = {"SOCKET": tmp_path / "api.sock", "MODEL": "tiny", "MODEL_REPOSITORY": REPOSITORY, "DRAIN_DELAY_SECONDS": 0}
    process = subprocess.Popen(  # noqa: ASYNC220 - it takes no time
        [sys.executable, "-m", "app", "serve", "--triton", fake.url, "--workers", "2"],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **{f"NEREID_{name}": str(value) for name, value in settings.items()}},
        stdout=write,
        stderr=write,
        start_new_session=True,
    )
    os.close(write)
    collecting = asyncio.create_task(asyncio.to_thread(collect))

    async def is_said(text: str) -> bool:
        return any(text in written for written in writes)

    try:
        await until(lambda: is_said("nereid: ready: "))
        (api,) = psutil.Process(process.pid).children()
        api.children()[0].kill()
        await until(lambda: is_said("Unexpected exit from worker-1"))
        process.terminate()
        assert await asyncio.to_thread(process.wait, PATIENCE_SECONDS) == 0
    finally:
        kill_group(process)
        await collecting
        os.close(read)

    assert [text for text in writes if text.count("\n") != 1 or not text.endswith("\n")] == []


@pytest.mark.system
async def test_host_may_be_a_name(fake: FakeTriton, tmp_path: Path) -> None:
    """The server itself takes only an address."""
    async with running_gateway(fake.url, tmp_path, host="localhost", workers=1) as gateway, httpx.AsyncClient() as client:
        assert (await client.get(f"http://localhost:{gateway.port}/livez")).status_code == 200


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


def test_server_is_as_the_settings_say() -> None:
    port = free_port()
    server = Server(Settings(host="127.0.0.2", port=port, workers=3, timeout_seconds=5, max_timeout_seconds=40))

    assert (server.target, server.factory) == ("app.main:create_app", True)
    assert (server.bind_addr, server.bind_port, server.bind_uds, server.workers) == ("127.0.0.2", port, None, 3)
    assert (server.interface, server.http, server.websockets) == (Interfaces.ASGI, HTTPModes.http1, False)
    assert server.workers_kill_timeout == 75
    assert server.backpressure >= server.backlog > 1024
    assert (server.workers_lifetime, server.workers_rss) == (None, None)


def test_server_may_listen_on_a_unix_socket(tmp_path: Path) -> None:
    server = Server(Settings(socket=str(tmp_path / "api.sock"), socket_mode="606"))

    assert server.bind_uds == tmp_path / "api.sock"
    assert server.uds_permissions == 0o606


def test_workers_of_several_instances_are_not_replaced_together() -> None:
    ages = [Server(Settings(worker_max_age_seconds=10_000)).workers_lifetime for _ in range(20)]

    assert 9000 <= min(ages) < max(ages) <= 11_000
    assert min(Server(Settings(worker_max_age_seconds=60)).workers_lifetime for _ in range(20)) >= 60


def test_memory_of_a_worker_is_limited_in_mebibytes() -> None:
    limits = [Server(Settings(worker_max_memory_mb=1000)).workers_rss / 2**20 for _ in range(20)]

    assert 900 <= min(limits) < max(limits) <= 1100
    assert Server(Settings(worker_max_memory_mb=1)).workers_rss == 2**20  # the least; none would be no limit
