"""Servers as child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.host.ports import is_free
from bench.harness.errors import ContestantError
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, environment_of, require_checkout, running, wait_for_answer
from tests.fakes.http import scripted

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = os.getcwd().encode()
        self.send_response(int(sys.argv[2]))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_runs_until_the_block_ends(tmp_path: Path) -> None:
    (port,) = find_free(1)
    command = [sys.executable, "-c", SERVER, str(port), "200"]
    with running(command, {}, port, "/", tmp_path / "log", tmp_path) as server:
        assert server.url == f"http://127.0.0.1:{port}"
        assert Path(server.process.cwd()) == tmp_path
        assert not is_free("127.0.0.1", port)

    assert is_free("127.0.0.1", port)
    assert not server.process.is_running()


def test_a_server_that_ends_at_once_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with (
        pytest.raises(ContestantError, match="exited with code 1: no such thing"),
        running(command, {}, find_free(1)[0], "/", tmp_path / "log"),
    ):
        pass


def test_a_server_that_fails_its_probe_is_reported(tmp_path: Path) -> None:
    (port,) = find_free(1)
    command = [sys.executable, "-c", SERVER, str(port), "404"]
    with pytest.raises(ContestantError, match="answered with status 404"), running(command, {}, port, "/", tmp_path / "log"):
        pass

    assert is_free("127.0.0.1", port)


def test_the_settings_of_this_process_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would change what is measured."""
    monkeypatch.setenv("NEREID_WORKERS", "7")
    environment = environment_of(Path("/other"))

    assert "NEREID_WORKERS" not in environment
    assert environment["PYTHONPATH"] == "/other"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_checkout_is_recognised_and_the_one_file_where_it_will_do(tmp_path: Path) -> None:
    (file := tmp_path / "nereid").touch(0o755)
    (tmp_path / "text").touch(0o644)

    assert require_checkout(ROOT) == ROOT
    assert require_checkout(file, or_file=True) == file
    for other, or_file in ((file, False), (tmp_path / "text", True)):
        with pytest.raises(ContestantError, match="is not a checkout of this project"):
            require_checkout(other, or_file=or_file)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        *(([status], 1) for status in (200, 204, 400, 404, 500)),
        ([503, 400, 503, 404], 4),  # those to retry are not final
        *(([said, 200], 2) for said in (b"", b"220 mail.example.org ESMTP\r\n", b"HTTP/1.1 twohundred OK\r\n\r\n")),
        ([None, 200], 2),  # given up after a second
    ],
)
def test_a_server_is_asked_until_an_answer_is_final(answers: list[int | bytes | None], asked: int) -> None:
    with scripted(*answers) as server, subprocess.Popen(["sleep", "60"]) as sleeper:
        assert wait_for_answer(server.url, sleeper, 60, retry={503, 400} if asked > 2 else ()) == answers[-1]
        assert len(server.asked) == asked
        sleeper.kill()


@pytest.mark.parametrize("ends", [True, False])
def test_waiting_ends_with_the_process_or_the_time(ends: bool) -> None:  # noqa: FBT001
    with scripted(*[503] * 1000) as server, subprocess.Popen(["true" if ends else "sleep", "60"]) as process:
        assert wait_for_answer(server.url, process, 60 if ends else 0.3, retry={503}) is None
        process.kill()
