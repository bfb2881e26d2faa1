"""Load on a service that is deployed: TLS, the key, and what another host gets only after a question."""

import argparse
import io
import ssl
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from bench.__main__ import main
from bench.experiments import server_load
from bench.experiments.service import Plan, Service, reach
from bench.harness.errors import ContestantError
from bench.load.images import SAMPLE_FOLDER
from bench.report.records import load_record
from tests.fakes.http import serving
from tests.nginx import write_certificate

KEY = "bench.0123456789"


class Gateway(BaseHTTPRequestHandler):
    """Answers each request as told, and keeps the keys that came with them."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    keys: ClassVar[set[str | None]] = set()
    answer = b'{"detections":[{"class_name":"cat"}]}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.keys.add(self.headers["authorization"])
        self.send_response(200)
        self.send_header("server-timing", "decode;dur=2, infer;dur=5, total;dur=9")
        self.send_header("content-length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None: ...


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"key_file": None, "ca": None, "yes": False, "requests": None} | changes))


def test_service_with_tls_and_keys_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_load, "WARM_UP_SECONDS", 0.05)
    write_certificate(tmp_path, "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    (tmp_path / "key").write_text(f"{KEY}\n", encoding="ascii")
    file, image = tmp_path / "out.json", SAMPLE_FOLDER / "chelsea.jpg"
    with serving(Gateway, tls) as url:
        command = ["full", "--url", url, "--image", str(image), "--clients", "2", "--requests", "20"]
        assert main(command) == 1
        assert "the certificate of " in capsys.readouterr().err
        assert Gateway.keys == set()
        assert main([*command, "--key-file", f"{tmp_path}/key", "--ca", f"{tmp_path}/ca.crt", "--json", str(file)]) == 0
    record, printed = load_record(file), capsys.readouterr().out

    assert Gateway.keys == {f"Bearer {KEY}"}
    assert record.runs[0].outcome.statuses == {"200": 20}
    assert record.server is not None
    assert f"{record.server.host} (127.0.0.1), this machine" in printed
    assert "decode 2.00, infer 5.00, total 9.00 ms" in printed
    assert KEY not in printed + file.read_text(encoding="utf-8")


def ask(monkeypatch: pytest.MonkeyPatch, answer: str) -> Service:
    """Ask at a terminal whether 192.0.2.1 may be loaded."""
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    return reach(options(requests=500), "https://192.0.2.1:8443/detect", Plan(connections=16, seconds=30))


def test_another_host_is_loaded_only_after_a_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reached = ask(monkeypatch, "y")

    expected = "Load 192.0.2.1:8443 (192.0.2.1) with TLS: up to 16 connections for 31 s, at most 600 requests? [y/N] "
    assert capsys.readouterr().err == expected
    assert (reached.is_elsewhere, reached.server.is_here, reached.requests) == (True, False, 500)
    with pytest.raises(ContestantError, match="nothing is sent"):
        ask(monkeypatch, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ContestantError, match="without --yes"):
        reach(options(), "http://192.0.2.1", Plan(connections=1, seconds=1))
    with pytest.raises(ContestantError, match="at most 256 connections"):
        reach(options(yes=True), "http://192.0.2.1", Plan(connections=257, seconds=1))
