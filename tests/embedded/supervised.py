"""Stand-ins for the API and Triton, and `supervise` with them."""

import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.embedded.supervisor import supervise
from app.settings.schema import Settings
from tests.support import free_port

# Stands in for `python -m app api`: notes what happens to it, and answers 200, or 503 while there is a file of the path's name.
API = """#!{python} -IS
import os, signal, socket, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import TCPServer

folder = Path({folder!r})
path = os.environ.get("NEREID_SOCKET")
name = Path(path).stem + " " if path else ""
def note(text):
    with (folder / "notes").open("a") as file:
        file.write(name + text + "\\n")
def wait_until(holds):
    while not holds():
        time.sleep(0.02)

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

signal.signal(signal.SIGHUP, lambda *_: note("told to renew its workers"))
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
"""What happens while `supervise` runs: it goes on after each condition when that holds."""


class Triton(EmbeddedTriton):
    """Runs a stand-in for Triton's program, which need not answer anything."""

    def __init__(self, settings: Settings, first: str) -> None:
        """Start it as `serve` does before it runs the API; at its first start, it also runs a command of the shell."""
        super().__init__(settings)
        self._starts = Path(settings.triton_home, "starts")
        program = Path(settings.triton_home, "server", "pytriton", "tritonserver", "bin", "tritonserver")
        for folder in ("bin", "backends"):
            (program.parents[1] / folder).mkdir(parents=True)
        script = f"echo >> {self._starts}\n[ $(wc -l < {self._starts}) = 1 ] && {first}\nexec sleep 60"
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)
        self.spawn()

    def starts(self) -> int:
        return len(self._starts.read_text(encoding="utf-8")) if self._starts.exists() else 0

    def check(self) -> None: ...


class Serve(io.StringIO):
    """`supervise` with the stand-in in the place of Python, which would run the API; also the terminal."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.folder, self.may_end = folder, folder / "may end"
        self.settings = Settings(port=free_port(), triton_home=str(folder))
        self.looks = self.swept = 0
        self.story: Story = iter(())
        self._holds: Condition = bool
        self.write_api()
        patch.setattr(sys, "executable", str(folder / "api"))
        patch.setattr("app.telemetry.logging.sys", SimpleNamespace(stderr=self))
        patch.setattr("app.triton.shared_memory.sweep", self._sweep)
        patch.setattr("app.embedded.supervisor.time", SimpleNamespace(sleep=self._look, monotonic=time.monotonic))
        patch.setattr("app.host.signals._SAME_SECONDS", 60)  # a busy machine may be late with the second of two signals
        for name in ("_STARTING_CHECK", "_RECHECK", "_FIRST_DELAY", "_MEMORY"):
            patch.setattr(f"app.embedded.service.{name}_SECONDS", 0.02)

    def _sweep(self) -> None:
        self.swept += 1

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

    def ends_late(self) -> str:
        return f"wait_until(lambda: os.path.exists({str(self.may_end)!r})); note('drained'); os._exit(3)"

    def notes(self, instance: str = "") -> list[str]:
        notes = self.folder / "notes"
        lines = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else []
        return [line.removeprefix(f"{instance} ") for line in lines if line.startswith(instance)]

    def noted(self, *notes: str) -> Condition:
        return lambda: set(notes) <= set(self.notes())

    @property
    def lines(self) -> list[str]:
        return [line.removeprefix("nereid: ") for line in self.getvalue().splitlines()]

    def shows(self, text: str) -> Condition:
        return lambda: any(line.startswith(text) for line in self.lines)

    def looked_again(self) -> Condition:
        before = self.looks
        return lambda: self.looks > before + 10
