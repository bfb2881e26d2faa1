"""Servers as child processes."""

import os
import sys
from pathlib import Path

import pytest

from app.host.ports import find_free, is_free
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT, environment_of, require_checkout, running

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
    """A server that cannot start is left out with the reason, not waited for."""
    command = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with (
        pytest.raises(ContestantError, match="exited with code 1: no such thing"),
        running(command, {}, find_free(1)[0], "/", tmp_path / "log"),
    ):
        pass


def test_a_server_that_fails_its_probe_is_reported(tmp_path: Path) -> None:
    """A status other than 200 and 503 is final."""
    (port,) = find_free(1)
    command = [sys.executable, "-c", SERVER, str(port), "404"]
    with pytest.raises(ContestantError, match="answered with status 404"), running(command, {}, port, "/", tmp_path / "log"):
        pass

    assert is_free("127.0.0.1", port)


def test_the_settings_of_this_process_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would change what is measured. The modules are those of the checkout."""
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
