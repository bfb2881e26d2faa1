"""The API and Triton side by side, with stand-ins for both: watched, restarted, and stopped in order."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from app.config import Settings
from app.embedded.server import EmbeddedTriton, EmbeddedTritonError
from app.embedded.supervisor import ignore_signals, supervise
from tests import processes
from tests.processes import wait_until_gone
from tests.support import free_port

# Stands in for `python -m app api`: writes down what happens to it, and answers /livez.
API = """#!{python}
import os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

notes = Path({notes!r})
def note(text):
    with notes.open("a") as file:
        file.write(text + "\\n")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/livez" else 404)
        self.end_headers()
        note("asked " + self.path)

class Server(HTTPServer):
    address_family = {family}

def stop(*_):
    note("told to stop")
    {stop}

signal.signal(signal.SIGTERM, stop)
note("started with " + " ".join(sys.argv[1:]) + " in " + ("its own session" if os.getsid(0) == os.getpid() else "ours"))
{begin}
server = Server(({host!r}, {port}), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
{serve}
while True:
    time.sleep(0.05)
"""
PYTHON = sys.executable
STARTED = "started with -P -m app api in its own session"
AT_ONCE = "os._exit(0)"


class Api:
    """Writes the stand-in, and reads its notes."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.program = folder / "api"
        self._notes = folder / "notes"

    def write(self, *, begin: str = "", serve: str = "", stop: str = AT_ONCE) -> None:
        """Write it; what it does before and after it listens, and when it is told to stop, is Python."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)  # noqa: S104
        self.program.write_text(
            API.format(
                python=PYTHON,
                notes=str(self._notes),
                family=int(socket.AF_INET6 if ":" in host else socket.AF_INET),
                host=host,
                port=self.settings.port,
                begin=begin,
                serve=serve,
                stop=stop,
            ),
            encoding="utf-8",
        )
        self.program.chmod(0o755)

    def notes(self) -> list[str]:
        return self._notes.read_text(encoding="utf-8").splitlines() if self._notes.exists() else []


class Triton(EmbeddedTriton):
    """Stands in for Triton: it ends, or a Ctrl-C arrives, as often as a test says, and later it just runs."""

    def __init__(self, settings: Settings, *events: int | BaseException | None) -> None:
        super().__init__(settings)
        self.log = Path("triton.log")
        self.events = list(events)
        self.calls: list[str] = []
        self.cannot_start: Exception | None = None

    def start(self) -> None:
        self.calls.append("start")
        if self.cannot_start is not None:
            raise self.cannot_start

    def poll(self) -> int | None:
        event = self.events[0] if self.events else None
        if isinstance(event, BaseException):
            raise event
        if event is None and self.events:
            self.events.pop(0)
        return event

    def stop(self) -> None:
        self.calls.append("stop")
        self.events.pop(0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(port=free_port(), triton_home=str(tmp_path))


@pytest.fixture
def api(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Api:
    """The stand-in takes the place of Python, which would run the API."""
    api = Api(tmp_path, settings)
    api.write()
    monkeypatch.setattr(sys, "executable", str(api.program))
    return api


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
def signals() -> Iterator[None]:
    """Let signals interrupt, as the command line does, and take back that they are ignored in the end."""
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Demand of every test that none of its processes outlives it."""
    with processes.no_process_left():
        yield


@pytest.fixture
def long_uptime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a minute pass with each look at the clock."""
    minutes = iter(range(0, 60_000, 60))
    monkeypatch.setattr("app.embedded.supervisor.time", SimpleNamespace(monotonic=lambda: float(next(minutes)), sleep=time.sleep))


@pytest.mark.parametrize("code", [0, 1, 7])
def test_exit_code_is_that_of_the_api(api: Api, settings: Settings, capsys: pytest.CaptureFixture[str], code: int) -> None:
    """When the API ends, everything ends with its code."""
    api.write(begin=f"os._exit({code})")

    assert supervise(settings, None) == code
    assert api.notes() == [STARTED]
    assert capsys.readouterr().err.splitlines() == [f"nereid: the API exited with code {code}"]


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),  # noqa: S104
        pytest.param("::", "[::1]", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")),
        pytest.param("::1", "[::1]", marks=pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")),
    ],
)
def test_address_is_shown_once_the_api_answers(
    api: Api, settings: Settings, capsys: pytest.CaptureFixture[str], host: str, shown: str
) -> None:
    """The person at the terminal gets an address that can be opened, whatever the API listens on."""
    api.settings = settings = msgspec.structs.replace(settings, host=host)
    api.write(serve="while 'asked' not in notes.read_text(): time.sleep(0.05)\ntime.sleep(0.2); os._exit(0)")
    supervise(settings, None)

    assert api.notes() == [STARTED, "asked /livez"]
    url = f"http://{shown}:{settings.port}"
    ready, ended = capsys.readouterr().err.splitlines()
    assert ready == f"nereid: ready: POST {url}/detect, documentation at {url}/docs; Ctrl-C stops everything"
    assert ended == "nereid: the API exited with code 0"


def test_ctrl_c_lets_requests_end(api: Api, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """The API is told to stop, and waited for; the exit code is 0."""
    api.write(stop="time.sleep(0.5); note('drained'); os._exit(3)")

    assert supervise(settings, Triton(settings, None, KeyboardInterrupt())) == 0
    assert api.notes() == [STARTED, "asked /livez", "told to stop", "drained"]
    assert capsys.readouterr().err.splitlines()[-1] == "nereid: waiting for requests in progress"


def test_api_that_missed_the_signal_gets_another(api: Api, settings: Settings) -> None:
    """A worker that was just starting may have lost the first one."""
    api.write(stop="if sum(line == 'told to stop' for line in notes.read_text().splitlines()) > 1: os._exit(0)")

    assert supervise(settings, Triton(settings, KeyboardInterrupt())) == 0
    assert api.notes() == [STARTED, "asked /livez", "told to stop", "told to stop"]


def test_api_that_does_not_end_is_killed(api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time to drain, it and what it has started are killed."""
    monkeypatch.setattr("app.embedded.supervisor.DRAIN_SECONDS", 0.3)
    child = "subprocess.Popen(['sh', '-c', \"trap '' TERM; while :; do sleep 0.1; done\"]).pid"
    api.write(begin=f"note(str({child}))", stop="pass")

    assert supervise(settings, Triton(settings, None, None, KeyboardInterrupt())) == 0
    (pid,) = [int(text) for text in api.notes() if text.isdigit()]
    if psutil.pid_exists(pid):
        wait_until_gone([psutil.Process(pid)])


def test_signals_are_ignored_while_everything_is_stopped(api: Api, settings: Settings) -> None:
    """A second Ctrl-C does not interrupt the clean-up."""
    api.write(stop="os.kill(os.getppid(), signal.SIGINT); os.kill(os.getppid(), signal.SIGTERM); note('done'); os._exit(0)")

    assert supervise(settings, Triton(settings, KeyboardInterrupt())) == 0
    assert api.notes()[-1] == "done"
    assert {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} == {signal.SIG_IGN}


def test_signals_can_be_ignored() -> None:
    """A process that ignores them goes on."""
    ignore_signals()

    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("long_uptime")
def test_triton_that_ends_is_restarted(api: Api, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Its leftovers are removed first, the API goes on meanwhile, and the message names the old log."""
    triton = Triton(settings, None, -11, None, -9, None, KeyboardInterrupt())

    assert supervise(settings, triton) == 0
    assert triton.calls == ["stop", "start", "stop", "start"]
    assert api.notes().count("told to stop") == 1
    shown = capsys.readouterr().err.splitlines()
    assert "nereid: Triton exited with code -11; restarting it; its last log is triton.log.1" in shown
    assert "nereid: Triton exited with code -9; restarting it; its last log is triton.log.1" in shown


@pytest.mark.usefixtures("api")
def test_triton_that_ends_right_after_its_start_is_an_error(settings: Settings, swept: list[int]) -> None:
    """It would do so again; the API is stopped, and the message has the code and the log."""
    triton = Triton(settings, -11)

    with pytest.raises(EmbeddedTritonError, match=r"Triton exited with code -11 right after its start; its log is triton\.log"):
        supervise(settings, triton)
    assert triton.calls == []
    assert swept == [1]


def test_triton_that_ends_right_after_a_restart_is_an_error(api: Api, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its uptime counts from its last start."""
    seconds = iter([0.0, 60.0, 61.0, 62.0])
    monkeypatch.setattr("app.embedded.supervisor.time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=time.sleep))
    triton = Triton(settings, -11, -11)

    with pytest.raises(EmbeddedTritonError, match="right after its start"):
        supervise(settings, triton)
    assert triton.calls == ["stop", "start"]
    assert api.notes()[-1] == "told to stop"


@pytest.mark.usefixtures("long_uptime")
def test_triton_that_cannot_be_restarted_is_an_error(api: Api, settings: Settings) -> None:
    """The API is stopped, too."""
    triton = Triton(settings, -11)
    triton.cannot_start = EmbeddedTritonError("port 4600 is in use")

    with pytest.raises(EmbeddedTritonError, match="port 4600 is in use"):
        supervise(settings, triton)
    assert api.notes()[-1] == "told to stop"


def test_leftovers_are_removed_only_with_a_triton_of_ones_own(api: Api, settings: Settings, swept: list[int]) -> None:
    """Another Triton still maps them; the next worker tells it to unmap them."""
    api.write(begin="os._exit(0)")

    supervise(settings, None)
    assert swept == []

    supervise(settings, Triton(settings))
    assert swept == [1]


def test_nothing_runs_once_it_returns(api: Api, settings: Settings) -> None:
    """The API has ended by then, and so have its children."""
    before = processes.children()
    api.write(begin="subprocess.Popen(['sleep', '60'])")

    supervise(settings, Triton(settings, None, KeyboardInterrupt()))

    wait_until_gone(processes.children() - before)


@pytest.mark.parametrize("where", ["current folder", "PYTHONPATH", "both"])
def test_api_is_this_package_beside_another_package_of_its_name(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    """A package `app` in the current folder or on PYTHONPATH is not run instead. With a real Python; an invalid setting ends it."""
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
