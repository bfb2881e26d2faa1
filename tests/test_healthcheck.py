"""The health check of a container: its answer, its exit code, and what it loads."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread

import pytest

from app import entry, healthcheck
from app.settings.schema import PREFIX, Settings
from tests.fakes import http
from tests.support import ROOT, free_port


class Live(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...

    def address_string(self) -> str:
        return ""


@contextmanager
def living_on(path: Path) -> Iterator[None]:
    with ThreadingUnixStreamServer(str(path), Live) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_an_api_lives_whether_or_not_it_is_ready() -> None:
    with http.serving(Live) as url:
        assert healthcheck.failure(Settings(port=int(url.rpartition(":")[2]))) == ""


def test_an_api_that_does_not_answer_has_failed() -> None:
    port = free_port()

    assert healthcheck.failure(Settings(port=port)) == f"http://127.0.0.1:{port} does not answer"


def test_an_api_that_answers_something_else_has_failed() -> None:
    """Another program may listen on the port."""
    with http.answering(b"", 404) as url:
        assert healthcheck.failure(Settings(port=int(url.rpartition(":")[2]))) == f"{url} answers 404"


def test_all_instances_must_live(tmp_path: Path) -> None:
    settings = Settings(instances=2, socket=str(tmp_path))
    first, second = tmp_path / "nereid-1.sock", tmp_path / "nereid-2.sock"
    with living_on(first):
        assert healthcheck.failure(settings) == f"{second} does not answer"
        with living_on(second):
            assert healthcheck.failure(settings) == ""


def test_a_socket_that_accepts_nothing_has_failed(tmp_path: Path) -> None:
    """A crash leaves such a socket behind."""
    path = tmp_path / "nereid.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))

    assert healthcheck.failure(Settings(socket=str(path))) == f"{path} does not answer"


def run(**variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the check as the program `nereid` does, and let it print what it has loaded."""
    code = (
        "import sys; from app.entry import main; result = main();"
        "print(*{'app.__main__', 'numpy', 'structlog', 'httpx', 'PIL', 'granian'} & set(sys.modules)); sys.exit(result)"
    )
    environ = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, "-c", code, "healthcheck"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def test_the_program_exits_with_0_or_1_and_loads_almost_nothing() -> None:
    """A container runs it every few seconds."""
    with http.serving(Live) as url:
        port = url.rpartition(":")[2]
        alive = run(NEREID_PORT=port)
    dead = run(NEREID_PORT=port)

    assert (alive.returncode, alive.stdout, alive.stderr) == (0, "\n", "")
    assert (dead.returncode, dead.stdout, dead.stderr) == (1, "\n", f"{url} does not answer\n")


def test_invalid_settings_fail_the_check() -> None:
    done = run(NEREID_PORT="no number")

    assert done.returncode == 1
    assert done.stderr.startswith("NEREID_PORT: ")


def test_other_commands_go_to_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nereid", "--help"])

    with pytest.raises(SystemExit):
        entry.main()
    assert "healthcheck" in capsys.readouterr().out
