"""The instances of the API and Triton side by side, with stand-ins for all: watched, restarted, and stopped in order."""

import io
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.embedded.service import CheckError, Service
from app.embedded.supervisor import ignore_signals, supervise
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.telemetry.instruments import Counter
from app.telemetry.metrics import MODEL_DEATHS, WRONG_ANSWERS
from tests import processes
from tests.processes import nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.sockets import NEEDS_IPV6, short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

VARIABLE = "NEREID_INTERNAL_WORKER_TABLE_FD"

# Stands in for `python -m app api`: writes down what happens to it, and answers /livez and /readyz.
API = """#!{python} -IS
import os, signal, socket, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer

notes = Path({notes!r})
path = os.environ.get("NEREID_SOCKET")
name = Path(path).stem + " " if path else ""
def note(text):
    with notes.open("a") as file:
        file.write(name + text + "\\n")
def wait_until(holds):
    while not holds():
        time.sleep(0.02)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/livez":
            note("asked /livez")
        self.send_response(503 if self.path == "/readyz" and notes.with_name("no model").exists() else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

class Server(TCPServer):
    address_family = socket.AF_UNIX if path else {family}
    allow_reuse_address = not path

def stop(number, _):
    note("told to stop by " + signal.Signals(number).name)
    {stop}

signal.signal(signal.SIGHUP, lambda *_: note("told to renew its workers"))
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note("started with " + " ".join(sys.argv[1:]) + " in " + ("its own process group" if os.getpgid(0) == os.getpid() else "ours"))
note("process " + str(os.getpid()))
{begin}
if path:
    Path(path).unlink(missing_ok=True)
server = Server(path or ({host!r}, {port}), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
"""
PYTHON = sys.executable
STARTED = "started with -P -m app api in its own process group"
ASKED = "asked /livez"
TOLD = "told to stop by SIGTERM"
AT_ONCE = "os._exit(0)"
NEVER = "pass"


class Api:
    """Writes the stand-in for the API and reads its notes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.program = folder / "api"
        self.may_end = folder / "may end"
        self._notes = folder / "notes"

    def write(self, *, begin: str = "", stop: str = AT_ONCE) -> None:
        """Write it; what it does before it listens, and when it is told to stop, is Python."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)  # noqa: S104
        text = API.format(
            python=PYTHON,
            notes=str(self._notes),
            family=int(socket.AF_INET6 if ":" in host else socket.AF_INET),
            host=host,
            port=self.settings.port,
            begin=begin,
            stop=stop,
        )
        written = self.program.with_name("written")
        written.write_text(text, encoding="utf-8")
        written.chmod(0o755)
        written.replace(self.program)

    def all_notes(self) -> list[str]:
        return self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []

    def notes(self, instance: str = "") -> list[str]:
        """Return what it, or one of its instances, has noted, without the process ids."""
        start = f"{instance} " if instance else ""
        notes = [line.removeprefix(start) for line in self.all_notes() if line.startswith(start)]
        return [line for line in notes if not line.startswith("process ")]

    def has_noted(self, *notes: str) -> Callable[[], bool]:
        return lambda: set(notes) <= set(self.all_notes())

    def process(self, instance: str = "") -> int:
        start = f"{instance} process ".lstrip()
        return int([line for line in self.all_notes() if line.startswith(start)][-1].removeprefix(start))


class Triton(EmbeddedTriton):
    """Runs a stand-in for Triton's program, which need not answer anything."""

    def __init__(self, settings: Settings, *ends: str) -> None:
        """Prepare it.

        Args:
            settings: Its home is a folder of the test's own.
            *ends: What the program does at its first starts, as shell commands; after that it just runs.
        """
        super().__init__(settings)
        self.works = True
        home = Path(settings.triton_home)
        self._starts = home / "starts"
        for folder in ("bin", "backends"):
            (home / "server" / "pytriton" / "tritonserver" / folder).mkdir(parents=True)
        cases = "\n".join(f"{number}) {end};;" for number, end in enumerate(ends, 1))
        program = home / "server" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        program.write_text(
            f"#!/bin/sh\necho >> {self._starts}\ncase $(wc -l < {self._starts}) in\n{cases}\nesac\nexec sleep 60\n",
            encoding="utf-8",
        )
        program.chmod(0o755)

    @property
    def starts(self) -> int:
        return len(self._starts.read_text(encoding="utf-8")) if self._starts.exists() else 0

    def check(self) -> None:
        if not self.works:
            raise CheckError("its inference failed")


class Terminal(io.StringIO):
    @property
    def lines(self) -> list[str]:
        return [line.removeprefix("nereid: ") for line in self.getvalue().splitlines()]

    def shows(self, text: str) -> Callable[[], bool]:
        return lambda: any(line.startswith(text) for line in self.lines)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=free_port(), triton_home=str(tmp_path))


@pytest.fixture
def two(settings: Settings, tmp_path: Path) -> Settings:
    return msgspec.structs.replace(settings, instances=2, workers=3, socket=str(tmp_path))


@pytest.fixture
def api(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The stand-in replaces Python, which would run the API."""
    api = Api(tmp_path, settings)
    api.write()
    monkeypatch.setattr(sys, "executable", str(api.program))
    return api


RunTriton = Callable[..., Triton]


@pytest.fixture
def run_triton(settings: Settings) -> Iterator[RunTriton]:
    """Starts a Triton that does what a test says, as `serve` does before it runs the API."""
    tritons: list[Triton] = []

    def run(*ends: str) -> Triton:
        tritons.append(Triton(settings, *ends))
        tritons[-1].spawn()
        return tritons[-1]

    yield run
    for triton in tritons:
        triton.kill()
        triton.stop()


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Record messages while `supervise` runs, and still print them."""
    terminal = Terminal()
    monkeypatch.setattr("app.telemetry.logging.sys", SimpleNamespace(stderr=terminal))
    return terminal


@pytest.fixture(autouse=True)
def swept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count how often leftovers in shared memory are removed."""
    calls: list[int] = []

    def sweep() -> list[str]:
        calls.append(1)
        return []

    monkeypatch.setattr("app.triton.shared_memory.sweep", sweep)
    return calls


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setenv(VARIABLE, "")  # restored in the end, whatever is written
    yield
    if os.environ[VARIABLE]:
        os.close(int(os.environ[VARIABLE]))
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, restart soon, and take signals for one although a busy machine may be late with the second."""
    monkeypatch.setattr("app.host.signals._SAME_SECONDS", 60)
    monkeypatch.setattr("app.embedded.supervisor._POLL_SECONDS", 0.01)
    for name in ("_STARTING_CHECK", "_RECHECK", "_FIRST_DELAY"):
        monkeypatch.setattr(f"app.embedded.service.{name}_SECONDS", 0.02)


LookAgain = Callable[[], None]


@pytest.fixture
def look_again(monkeypatch: pytest.MonkeyPatch) -> LookAgain:
    """Waits until `supervise` has looked after everything again."""
    looks: list[Service] = []
    tick = Service.tick

    def tick_and_note(service: Service) -> None:
        tick(service)
        looks.append(service)

    def wait() -> None:
        before = len(looks)
        wait_for(lambda: len(looks) > before + 10)

    monkeypatch.setattr(Service, "tick", tick_and_note)
    return wait


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Do something in another thread while `supervise` runs; if that fails, `supervise` is interrupted, too."""
    is_over = threading.Event()

    def run() -> None:
        try:
            act()
        except BaseException:
            for _ in range(2):
                if not is_over.wait(0.5):
                    stop()
            raise

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            is_over.set()
    running.result()


def stop(number: int = signal.SIGTERM) -> None:
    """Send this process, in which `supervise` runs, a signal to stop."""
    os.kill(os.getpid(), number)


def stop_when(*conditions: Callable[[], bool], number: int = signal.SIGTERM) -> Callable[[], None]:
    """Make an action: send a signal when the first condition holds, another one when the second does, and so on."""

    def act() -> None:
        for holds in conditions:
            wait_for(holds)
            stop(number)

    return act


class Host(NamedTuple):
    """What the API listens on, and how it is reached from this machine."""

    listens_on: str
    reached_at: str


@pytest.mark.usefixtures("api")
def test_serve_is_not_ready_before_a_triton_can_run_the_model(
    settings: Settings, terminal: Terminal, tmp_path: Path, look_again: LookAgain
) -> None:
    (no_model := tmp_path / "no model").touch()
    settings = msgspec.structs.replace(settings, triton_endpoints="gpu:8001")

    def act() -> None:
        wait_for(terminal.shows("listening at"))
        look_again()
        no_model.unlink()
        wait_for(terminal.shows("ready: POST"))
        look_again()
        stop()

    with meanwhile(act):
        assert supervise(settings, None) == 0
    listening, ready, _ = terminal.lines
    assert listening.startswith(f"listening at {settings.local_url}, but no Triton at gpu:8001 can run yolo11n yet: ")
    assert ready.startswith(f"ready: POST {settings.local_url}/detect")


@pytest.mark.parametrize(("code", "exit_code"), [(0, 1), (1, 1), (7, 7)])
def test_api_that_cannot_start_ends_everything(api: Api, settings: Settings, terminal: Terminal, code: int, exit_code: int) -> None:
    api.write(begin=f"os._exit({code})")

    assert supervise(settings, None) == exit_code
    assert api.notes() == [STARTED]
    assert terminal.lines == [f"the API exited with code {code}"]


@pytest.mark.parametrize(
    "host",
    [
        Host("127.0.0.1", "127.0.0.1"),
        Host("0.0.0.0", "127.0.0.1"),  # noqa: S104
        pytest.param(Host("::", "[::1]"), marks=NEEDS_IPV6),
        pytest.param(Host("::1", "[::1]"), marks=NEEDS_IPV6),
    ],
)
def test_address_is_shown_once_the_api_answers(
    api: Api, settings: Settings, terminal: Terminal, tmp_path: Path, host: Host
) -> None:
    api.settings = settings = msgspec.structs.replace(settings, host=host.listens_on)
    listen = tmp_path / "listen"
    api.write(begin=f"wait_until(lambda: os.path.exists({str(listen)!r}))")

    def act() -> None:
        wait_for(api.has_noted(STARTED))
        assert terminal.lines == []
        listen.touch()
        wait_for(terminal.shows("ready"))
        stop()

    with meanwhile(act):
        supervise(settings, None)
    assert api.notes() == [STARTED, ASKED, TOLD]
    url = f"http://{host.reached_at}:{settings.port}"
    assert terminal.lines[0] == f"ready: POST {url}/detect, documentation at {url}/docs; Ctrl-C stops everything"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_sent_twice", [False, True])
def test_a_signal_lets_requests_end(
    api: Api, settings: Settings, terminal: Terminal, number: signal.Signals, *, is_sent_twice: bool
) -> None:
    api.write(stop=f"wait_until(lambda: os.path.exists({str(api.may_end)!r})); note('drained'); os._exit(3)")
    told = f"told to stop by {number.name}"

    def act() -> None:
        stop_when(terminal.shows("ready"), *[api.has_noted(told)] * is_sent_twice, number=number)()
        wait_for(api.has_noted(told))
        api.may_end.touch()

    with meanwhile(act):
        assert supervise(settings, None) == 0
    assert api.notes() == [STARTED, ASKED, told, "drained"]
    assert terminal.lines[1:] == ["stopping when requests in progress have ended; a second signal ends them"]


CHILD = "subprocess.Popen(['sh', '-c', \"trap '' TERM; exec sleep 60\"]).pid"


def test_a_second_signal_ends_what_does_not_end_itself(
    api: Api, settings: Settings, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.host.signals._SAME_SECONDS", 0)
    api.write(begin=f"note('child ' + str({CHILD}))", stop=NEVER)

    def is_ending() -> bool:
        return signal.getsignal(signal.SIGTERM) is signal.SIG_IGN

    with meanwhile(stop_when(terminal.shows("ready"), api.has_noted(TOLD), is_ending)):
        assert supervise(settings, None) == 0

    assert api.notes()[-1] == TOLD
    assert terminal.lines[1:] == [
        "stopping when requests in progress have ended; a second signal ends them",
        "ending requests in progress",
    ]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    (child,) = [int(line.split()[1]) for line in api.notes() if line.startswith("child ")]
    if psutil.pid_exists(child):
        wait_until_gone([psutil.Process(child)])


def test_api_that_does_not_end_in_time_is_killed(
    api: Api, settings: Settings, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.embedded.supervisor._MARGIN_SECONDS", 0.3)
    monkeypatch.setattr(Settings, "drain_seconds", 0)
    settings = msgspec.structs.replace(settings, drain_delay_seconds=0)
    before = processes.children()
    api.write(begin=CHILD, stop=NEVER)
    with meanwhile(stop_when(terminal.shows("ready"))):
        assert supervise(settings, None) == 0

    assert api.notes()[:2] == [STARTED, ASKED]
    assert terminal.lines[1:] == ["stopping when requests in progress have ended; a second signal ends them"]
    wait_until_gone(processes.children() - before)


def test_signals_can_be_ignored() -> None:
    ignore_signals()

    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


def test_api_that_ends_is_restarted(api: Api, settings: Settings, terminal: Terminal, look_again: LookAgain) -> None:
    def act() -> None:
        wait_for(terminal.shows("ready"))
        first = api.process()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: api.process() != first and api.notes().count(ASKED) == 2)
        look_again()
        stop()

    with meanwhile(act):
        assert supervise(settings, None) == 0
    assert api.notes() == [STARTED, ASKED, STARTED, ASKED, TOLD]
    assert terminal.lines[1:] == [
        "the API exited with code -9; restarting it",
        "stopping when requests in progress have ended; a second signal ends them",
    ]


def test_api_that_hangs_is_restarted(api: Api, settings: Settings, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers, as its workers would, but shows no sign of life."""
    monkeypatch.setattr("app.embedded.service._CHECK_SECONDS", 0.02)
    with meanwhile(stop_when(lambda: api.notes().count(ASKED) >= 2)):
        assert supervise(settings, None) == 0

    assert api.notes()[:3] == [STARTED, ASKED, STARTED]
    assert terminal.lines[1] == "the API does not work (its main process does not respond); restarting it"


def test_systemd_is_told_when_all_is_ready_and_then_that_it_works(
    api: Api, settings: Settings, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by `serve` alone: an API would hide that it hangs."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    stop_late = f"wait_until(lambda: os.path.exists({str(api.may_end)!r})); os._exit(0)"
    api.write(begin="note('tells ' + repr(os.environ['NOTIFY_SOCKET']))", stop=stop_late)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(processes.PATIENCE_SECONDS)

        def act() -> None:
            while systemd.recv(64) != b"READY=1":
                pass
            assert ASKED in api.notes()
            assert systemd.recv(64) == b"WATCHDOG=1"
            stop()
            wait_for(terminal.shows("stopping when"))
            for _ in range(20):
                assert systemd.recv(64) == b"WATCHDOG=1"
            api.may_end.touch()

        with meanwhile(act):
            assert supervise(settings, None) == 0
    assert api.notes()[:2] == [STARTED, "tells ''"]


def test_each_instance_has_a_socket(api: Api, two: Settings, terminal: Terminal, tmp_path: Path) -> None:
    api.write(
        begin="note(f'listens at {path}')\n"
        "note('has ' + os.environ['NEREID_WORKERS'] + ' workers')\n"
        "Path(str(notes) + '.tables').open('a').write(str(os.fstat(int(os.environ['" + VARIABLE + "'])).st_ino) + '\\n')"
    )
    with meanwhile(stop_when(terminal.shows("ready"))):
        assert supervise(two, None) == 0

    sockets = [str(tmp_path / f"nereid-{number}.sock") for number in (1, 2)]
    for number, path in enumerate(sockets, 1):
        assert api.notes(f"nereid-{number}") == [STARTED, f"listens at {path}", "has 3 workers", ASKED, TOLD]
    assert terminal.lines[0] == f"ready: 2 instances at {sockets[0]}, {sockets[1]}; Ctrl-C stops everything"
    assert not any(map(os.path.exists, sockets))  # although the stand-ins leave them behind
    first, second = (tmp_path / "notes.tables").read_text(encoding="utf-8").split()
    assert first == second == str(os.fstat(int(os.environ[VARIABLE])).st_ino)


def test_a_socket_of_the_settings_takes_the_place_of_the_port(
    api: Api, settings: Settings, terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_SOCKET", str(tmp_path / "api.sock"))
    monkeypatch.setattr("app.embedded.api_process.ApiProcess.ready_seconds", 5.0)
    with meanwhile(stop_when(terminal.shows("ready"))):
        assert supervise(msgspec.structs.replace(settings, socket=str(tmp_path / "api.sock")), None) == 0

    assert api.notes("api") == [STARTED, ASKED, TOLD]


def test_serve_is_not_ready_before_all_instances_answer(
    api: Api, two: Settings, terminal: Terminal, tmp_path: Path, look_again: LookAgain
) -> None:
    """A proxy may be started once all instances answer."""
    listen = tmp_path / "listen"
    api.write(begin=f"wait_until(lambda: name != 'nereid-2 ' or os.path.exists({str(listen)!r}))")

    def act() -> None:
        wait_for(api.has_noted(f"nereid-1 {ASKED}"))
        look_again()
        assert terminal.lines == []
        listen.touch()
        wait_for(terminal.shows("ready: 2 instances"))
        stop()

    with meanwhile(act):
        assert supervise(two, None) == 0


def test_an_instance_that_ends_is_restarted_while_the_others_run(api: Api, two: Settings, terminal: Terminal) -> None:
    def act() -> None:
        wait_for(terminal.shows("ready"))
        os.kill(api.process("nereid-1"), signal.SIGKILL)
        wait_for(lambda: api.notes("nereid-1").count(ASKED) == 2)
        stop()

    with meanwhile(act):
        assert supervise(two, None) == 0
    assert api.notes("nereid-1") == [STARTED, ASKED, STARTED, ASKED, TOLD]
    assert api.notes("nereid-2") == [STARTED, ASKED, TOLD]
    assert terminal.lines[1:] == [
        "instance nereid-1.sock exited with code -9; restarting it",
        "stopping when requests in progress have ended; a second signal ends them",
    ]


def test_an_instance_that_cannot_start_ends_all(api: Api, two: Settings, terminal: Terminal) -> None:
    api.write(begin="if name == 'nereid-2 ':\n    os._exit(7)")

    assert supervise(two, None) == 7
    assert terminal.lines[-1] == "instance nereid-2.sock exited with code 7"


def test_all_instances_drain_together(api: Api, two: Settings, terminal: Terminal) -> None:
    others = f"{{'nereid-1 {TOLD}', 'nereid-2 {TOLD}'}}"
    api.write(stop=f"wait_until(lambda: {others} <= set(notes.read_text().splitlines())); note('drained'); os._exit(0)")
    with meanwhile(stop_when(terminal.shows("ready"))):
        assert supervise(two, None) == 0

    assert [api.notes(f"nereid-{number}")[-1] for number in (1, 2)] == ["drained", "drained"]


def test_a_hang_up_renews_the_workers_of_all_instances(api: Api, two: Settings, terminal: Terminal) -> None:
    """Operators send SIGHUP to a service that should read its files again, so it must not end anything."""
    renewed = [f"nereid-{number} told to renew its workers" for number in (1, 2)]

    def hang_up_and_stop() -> None:
        wait_for(terminal.shows("ready"))
        stop(signal.SIGHUP)
        wait_for(api.has_noted(*renewed))
        stop()

    with meanwhile(hang_up_and_stop):
        assert supervise(two, None) == 0


def test_a_hang_up_of_the_terminal_stops_everything(api: Api, settings: Settings, terminal: Terminal) -> None:
    """The user has closed the terminal's window."""
    ours, theirs = os.openpty()
    stdin = os.dup(0)
    os.dup2(theirs, 0)
    os.close(theirs)

    def close_terminal() -> None:
        wait_for(terminal.shows("ready"))
        os.close(ours)
        stop(signal.SIGHUP)

    with meanwhile(close_terminal):
        assert supervise(settings, None) == 0
    os.dup2(stdin, 0)
    os.close(stdin)

    assert api.notes()[-1] == TOLD
    assert "told to renew its workers" not in api.notes()


@pytest.mark.parametrize("end", ["exit 0", "exit 7", "kill -SEGV $$"])
def test_triton_that_ends_right_after_its_start_is_restarted(
    api: Api, settings: Settings, terminal: Terminal, run_triton: RunTriton, end: str
) -> None:
    """It has worked once, so it is worth a try; the API goes on meanwhile."""
    triton = run_triton(end)
    with meanwhile(stop_when(lambda: triton.starts == 2 and terminal.shows("ready")())):
        assert supervise(settings, triton) == 0

    assert triton.poll() is None  # whoever has started it ends it
    assert api.notes() == [STARTED, ASKED, TOLD]
    code = {"exit 0": 0, "exit 7": 7, "kill -SEGV $$": -signal.SIGSEGV}[end]
    assert f"Triton exited with code {code}; restarting it" in terminal.lines


def test_triton_that_ends_again_and_again_is_restarted_later_and_later(
    api: Api, settings: Settings, terminal: Terminal, run_triton: RunTriton
) -> None:
    triton = run_triton("exit 7", "exit 8")
    with meanwhile(stop_when(lambda: triton.starts == 3 and api.has_noted(STARTED)())):
        assert supervise(settings, triton) == 0

    assert api.notes().count(STARTED) == 1
    assert [line for line in terminal.lines if line.startswith("Triton")] == [
        "Triton exited with code 7; restarting it",
        "Triton exited with code 8; restarting it in 0.02 s",
    ]


def test_triton_that_does_not_work_is_restarted(api: Api, settings: Settings, terminal: Terminal, run_triton: RunTriton) -> None:
    triton = run_triton()
    triton.works = False
    wait_for(lambda: triton.starts == 1)
    broken = psutil.Process(triton.pid)

    def act() -> None:
        wait_for(terminal.shows("Triton does not work (its inference failed); restarting it"))
        triton.works = True
        wait_for(lambda: triton.starts == 2 and api.has_noted(STARTED)())
        stop()

    with meanwhile(act):
        assert supervise(settings, triton) == 0
    wait_until_gone([broken])
    assert api.notes().count(STARTED) == 1


@pytest.mark.parametrize(
    ("metric", "reason"), [(MODEL_DEATHS, "a process of other has died"), (WRONG_ANSWERS, "the answers of other are wrong")]
)
def test_triton_whose_model_has_died_or_is_wrong_is_restarted(  # noqa: PLR0913, PLR0917 - as many fixtures
    api: Api, settings: Settings, terminal: Terminal, run_triton: RunTriton, look_again: LookAgain, metric: str, reason: str
) -> None:
    triton = run_triton()
    wait_for(lambda: triton.starts == 1)

    def act() -> None:
        wait_for(terminal.shows("ready"))
        worker = WorkerTable()
        for model in ("other", "tiny"):
            Counter(worker, metric, "Defects.", ["model"]).add(1, model)
        worker.close()
        wait_for(lambda: triton.starts == 2)
        look_again()
        stop()

    with meanwhile(act):
        assert supervise(settings, triton) == 0
    assert triton.starts == 2
    assert f"Triton does not work ({reason}); restarting it" in terminal.lines
    assert api.notes().count(STARTED) == 1


def test_triton_that_cannot_be_restarted_ends_everything(
    api: Api, settings: Settings, terminal: Terminal, run_triton: RunTriton
) -> None:
    triton = run_triton()

    def act() -> None:
        wait_for(terminal.shows("ready"))
        shutil.rmtree(settings.triton_folder)
        settings.triton_folder.touch()
        os.kill(triton.pid, signal.SIGKILL)

    with meanwhile(act):
        assert supervise(settings, triton) == 1
    settings.triton_folder.unlink()

    assert api.notes() == [STARTED, ASKED, TOLD]
    reason = f"could not be started ({settings.triton_folder}, for Triton's socket, is not a folder of mode 700; "
    assert [line.startswith(f"Triton {reason}") for line in terminal.lines[2:]] == [True] * 5
    assert terminal.lines[1] == "Triton exited with code -9; restarting it"
    assert [line.rpartition(")")[2] for line in terminal.lines[2:]] == [
        *(f"; restarting it in {seconds} s" for seconds in (0.02, 0.04, 0.08, 0.16)),
        "",
    ]


def test_leftovers_are_removed_only_with_a_triton_of_ones_own(
    api: Api, settings: Settings, swept: list[int], run_triton: RunTriton
) -> None:
    """Another Triton still maps them; the next worker tells it to unmap them."""
    api.write(begin="os._exit(0)")

    supervise(settings, None)
    assert swept == []

    supervise(settings, run_triton())
    assert swept == [1]


@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH", "both"])
def test_api_is_this_package_beside_another_package_of_its_name(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    other = tmp_path / "app"
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "__main__.py").write_text("raise SystemExit(42)", encoding="utf-8")
    if where != "PYTHONPATH":
        monkeypatch.chdir(tmp_path)
    if where == "current folder":
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NEREID_PORT", "none")

    assert supervise(settings, None) == 1
    assert "NEREID_PORT" in capfd.readouterr().err
