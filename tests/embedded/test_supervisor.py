"""The instances of the API and Triton side by side, with stand-ins for all: watched, restarted, and stopped in order."""

import io
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from app.embedded.api_process import ApiProcess
from app.embedded.service import CheckError
from app.embedded.supervisor import supervise
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.telemetry.instruments import Counter
from app.telemetry.metrics import MODEL_DEATHS, WRONG_ANSWERS
from tests import processes
from tests.commands.conftest import restored_process  # noqa: F401 - a fixture
from tests.fakes.http import scripted
from tests.processes import nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port

# Stands in for `python -m app api`: notes what happens to it, and answers 200, or 503 while there is a file of the path's name.
API = """#!{python} -IS
import os, signal, socket, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer

folder = Path({folder!r})
path = os.environ.get("NEREID_SOCKET")
name = Path(path).stem + " " if path else ""
def note(text):
    with (folder / "notes").open("a") as file:
        file.write(name + text + "\\n")

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if (folder / self.path[1:]).exists() else 200)
        self.end_headers()
    def log_message(self, *_):
        pass

class Server(TCPServer):
    address_family = socket.AF_UNIX if path else socket.AF_INET
    allow_reuse_address = not path

def stop(number, _):
    note("told to stop by " + signal.Signals(number).name)
    {stop}

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note("started with " + " ".join(sys.argv[1:]) + " in " + ("its own process group" if os.getpgid(0) == os.getpid() else "ours"))
(folder / (name + "process")).write_text(str(os.getpid()))
{begin}
if path:
    Path(path).unlink(missing_ok=True)
server = Server(path or ("127.0.0.1", {port}), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    signal.pause()
"""
PYTHON = sys.executable
Condition = Callable[[], bool]
Story = Iterator[Condition]
"""What happens while `supervise` runs: it goes on when the condition holds."""


class Triton:
    name, ready_seconds = "Triton", 60.0

    def __init__(self) -> None:
        self.starts = 0
        self.spawn()

    def spawn(self) -> None:
        self.starts += 1
        self.process = subprocess.Popen(["sleep", "60"])

    def poll(self) -> int | None:
        return self.process.poll()

    def check(self) -> None: ...

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Serve(io.StringIO):
    """`supervise` with the stand-in in the place of Python, which would run the API; also the terminal."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.folder = folder
        self.settings = Settings(port=free_port(), triton_home=str(folder))
        self.looks, self.sweep = 0, Mock()
        self.story: Story = iter(())
        self._holds: Condition = bool
        self.write_api()
        patch.setattr(sys, "executable", str(folder / "api"))
        patch.setattr("app.telemetry.logging.sys", SimpleNamespace(stderr=self))
        patch.setattr("app.triton.shared_memory.sweep", self.sweep)
        patch.setattr("app.embedded.supervisor.time", SimpleNamespace(sleep=self._look, monotonic=time.monotonic))
        patch.setattr("app.host.signals._SAME_SECONDS", 60)  # a busy machine may be late with the second of two signals
        for name in ("_STARTING_CHECK", "_RECHECK", "_FIRST_DELAY", "_MEMORY"):
            patch.setattr(f"app.embedded.service.{name}_SECONDS", 0.02)

    def _look(self, _: float) -> None:
        time.sleep(0.01)
        self.looks += 1
        if self._holds():
            self._holds = next(self.story, bool)

    def run(self, story: Story, triton: Triton | None = None, **settings: Any) -> int:  # noqa: ANN401
        """Supervise until the story ends that, and return the exit code."""
        self.story = story
        self._holds = next(story, bool)
        return supervise(msgspec.structs.replace(self.settings, **settings), triton)

    def write_api(self, *, begin: str = "", stop: str = "os._exit(0)") -> None:
        """Write the stand-in; what it does before it listens, and when it is told to stop, is Python."""
        text = API.format(python=PYTHON, folder=str(self.folder), port=self.settings.port, begin=begin, stop=stop)
        program = self.folder / "api"
        program.write_text(text, encoding="utf-8")
        program.chmod(0o755)

    def notes(self, instance: str = "") -> list[str]:
        notes = self.folder / "notes"
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        return [line.removeprefix(f"{instance} ") for line in lines if line.startswith(instance)]

    @property
    def lines(self) -> list[str]:
        return [line.removeprefix("nereid: ") for line in self.getvalue().splitlines()]

    def shows(self, text: str) -> Condition:
        return lambda: any(line.startswith(text) for line in self.lines)

    def looked_again(self) -> Condition:
        before = self.looks
        return lambda: self.looks > before + 10


STARTED = "started with -P -m app api in its own process group"
TOLD = "told to stop by SIGTERM"
CHILD = "subprocess.Popen(['sh', '-c', \"trap '' TERM; exec sleep 60\"]).pid"


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    return Serve(tmp_path, monkeypatch)


@pytest.fixture
def triton() -> Iterator[Triton]:
    triton = Triton()
    yield triton
    triton.kill()


def stop(number: int = signal.SIGTERM) -> None:
    """Send this process, in which `supervise` runs, a signal to stop."""
    os.kill(os.getpid(), number)


def stop_when(*conditions: Condition) -> Story:
    for holds in conditions:
        yield holds
        stop()


@pytest.mark.parametrize("is_told_again", [True, False])
def test_second_signal_or_the_end_of_the_time_ends_what_does_not_end_itself(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, *, is_told_again: bool
) -> None:
    monkeypatch.setattr("app.host.signals._SAME_SECONDS", 0)
    if not is_told_again:
        monkeypatch.setattr("app.embedded.supervisor._MARGIN_SECONDS", 0.3)
        monkeypatch.setattr(Settings, "drain_seconds", 0)
    serve.write_api(begin=CHILD, stop="pass")
    before = processes.children()

    assert serve.run(stop_when(serve.shows("ready"), *[lambda: TOLD in serve.notes()] * is_told_again), drain_delay_seconds=0) == 0
    stopping = "stopping when requests in progress have ended; a second signal ends them"
    assert serve.lines[1:] == [stopping, *["ending requests in progress"] * is_told_again]
    wait_until_gone(processes.children() - before)
    stop()  # further signals do not interrupt the clean-up


def test_systemd_is_told_when_all_is_ready_and_then_that_it_works(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by `serve` alone: an API would hide that it hangs."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(serve.folder / "notify"))
    serve.write_api(begin="note('tells ' + repr(os.environ['NOTIFY_SOCKET']))")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(serve.folder / "notify"))
        systemd.settimeout(0)
        told: list[bytes] = []

        def is_told() -> bool:
            with suppress(BlockingIOError):
                while True:
                    told.append(systemd.recv(64))
            assert told.count(b"READY=1") == bool(serve.lines)
            return bool(serve.lines) and told[-10:] == [b"WATCHDOG=1"] * 10

        assert serve.run(stop_when(is_told)) == 0
    assert serve.notes()[:2] == [STARTED, "tells ''"]


@pytest.mark.parametrize(
    ("metric", "reason"), [(MODEL_DEATHS, "a process of other has died"), (WRONG_ANSWERS, "the answers of other are wrong")]
)
def test_triton_whose_model_has_died_or_is_wrong_is_restarted(serve: Serve, triton: Triton, metric: str, reason: str) -> None:
    broken = triton.process

    def story() -> Story:
        yield serve.shows("ready")
        worker = WorkerTable()
        for model in ("other", "tiny"):
            Counter(worker, metric, "Defects.", ["model"]).add(1, model)
        worker.close()
        yield lambda: triton.starts == 2
        yield serve.looked_again()
        stop()

    assert serve.run(story(), triton) == 0
    assert (broken.poll(), triton.starts) == (-signal.SIGKILL, 2)
    assert f"Triton does not work ({reason}); restarting it" in serve.lines
    assert serve.notes() == [STARTED, TOLD]
    assert triton.poll() is None  # whoever has started it ends it
    serve.sweep.assert_called_once_with()


def test_api_does_not_work_without_signs_of_life(serve: Serve, request: pytest.FixtureRequest) -> None:
    """Its workers may answer although their parent hangs. Once its model is ready, it is not asked for that again."""
    serve.write_api(begin="note(os.environ['NEREID_INTERNAL_BEATS_FD'])\nthreading.Event().wait()")
    process = ApiProcess(Settings(), serve.folder / "a.sock")
    request.addfinalizer(process.kill)
    process.spawn()
    wait_for(lambda: len(serve.notes("a")) == 2)
    with scripted(200, 503, 200, path=serve.folder / "a.sock") as server:
        for is_ready in (False, True, True, True, True):
            process.check()
            assert process.is_model_ready is is_ready
        os.eventfd_write(int(serve.notes("a")[1]), 1)
        for _ in range(5):
            process.check()
        with pytest.raises(CheckError, match="its main process does not respond") as caught:
            process.check()
        assert caught.value.is_final
    assert [request.split()[1] for request in server.asked] == [b"/livez", b"/readyz", b"/readyz"]
