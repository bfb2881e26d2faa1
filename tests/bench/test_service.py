"""Load on a service that is deployed: TLS, the key, and what another host gets only after a question."""

import argparse
import io
import ssl
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from bench.__main__ import main
from bench.experiments import server_load, service
from bench.experiments.service import Plan, Service, reach
from bench.harness.errors import ContestantError
from bench.load.images import SAMPLE_FOLDER
from bench.report.records import load_record
from tests.fakes.http import serving
from tests.nginx import write_certificate

KEY = "bench.0123456789"
PLAN = Plan(connections=16, seconds=30)


class Gateway(BaseHTTPRequestHandler):
    """Answers each request as told, and keeps the keys that came with them."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet
    keys: ClassVar[set[str | None]] = set()
    status = 200
    header = "server-timing", "decode;dur=2, infer;dur=5, total;dur=9"
    answer = b'{"detections":[{"class_name":"cat"}]}'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.keys.add(self.headers["authorization"])
        self.send_response(self.status)
        self.send_header(*self.header)
        self.send_header("content-length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def tls(tmp_path: Path) -> ssl.SSLContext:
    """TLS with a certificate for 127.0.0.1, and `ca.crt` in the test's folder."""
    write_certificate(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    return context


@pytest.fixture(autouse=True)
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gateway]]:
    monkeypatch.setattr(server_load, "WARM_UP_SECONDS", 0.05)
    yield Gateway
    Gateway.keys.clear()


def command(url: str, *more: object) -> list[str]:
    image = SAMPLE_FOLDER / "chelsea.jpg"
    return ["full", "--url", url, "--image", str(image), "--clients", "2", "--requests", "20", *map(str, more)]


def options(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"key_file": None, "ca": None, "yes": False, "requests": None} | changes))


def test_service_with_tls_and_keys_is_measured(
    tls: ssl.SSLContext, tmp_path: Path, capsys: pytest.CaptureFixture[str], handler: type[Gateway]
) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n", encoding="ascii")
    file = tmp_path / "out.json"
    with serving(handler, tls) as url:
        assert main(command(url, "--key-file", tmp_path / "key", "--ca", tmp_path / "ca.crt", "--json", file)) == 0
    record, printed = load_record(file), capsys.readouterr().out

    assert handler.keys == {f"Bearer {KEY}"}
    assert record.runs[0].outcome.statuses == {"200": 20}
    assert record.server is not None
    assert f"{record.server.host} (127.0.0.1), this machine" in printed
    assert "decode 2.00, infer 5.00, total 9.00 ms" in printed
    assert "the answers do not name the model; name it with --model" in printed
    assert KEY not in printed + file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("status", "code", "elsewhere", "message"),
    [
        (200, "", False, "responses        200: 18, wrong: 2"),
        (503, "triton_unavailable", False, "503: 20 (triton_unavailable)"),
        (401, "unauthorized", True, "/detect accepts no request: 401: "),
        (429, "rate_limited", True, "429: 2 (rate_limited)"),  # both clients wait as long as they were told
        (308, "", False, "answers with a redirect (308)"),
    ],
)
def test_failed_requests_are_an_exit_code_and_told_by_status_and_code(  # noqa: PLR0913, PLR0917 - cases
    status: int,
    code: str,
    elsewhere: bool,  # noqa: FBT001 - a parameter
    message: str,
    handler: type[Gateway],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(handler, "status", status)
    monkeypatch.setattr(handler, "answer", b'{"code":"%b"}' % code.encode())
    monkeypatch.setattr(handler, "header", ("retry-after", "60"))
    if elsewhere:
        monkeypatch.setattr(service, "is_loopback", lambda _host: False)
    with serving(handler) as url:
        assert main(command(url, "--duration", "0.5", "--yes")) == 1

    printed = capsys.readouterr()
    assert message in printed.out + printed.err


@pytest.mark.parametrize(
    ("server", "scheme", "trusted", "message"),
    [
        (Gateway, "https", False, "the certificate of "),
        (Gateway, "http", True, "no TLS connection to https://"),
        (None, "http", True, "no server listens at "),
    ],
    ids=["unknown authority", "no TLS", "nobody"],
)
def test_server_that_cannot_be_measured_is_one_line(  # noqa: PLR0913, PLR0917 - cases
    server: type[Gateway] | None,
    scheme: str,
    trusted: bool,  # noqa: FBT001 - a parameter
    message: str,
    tls: ssl.SSLContext,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(server or Gateway, tls if scheme == "https" else None) as url:
        address = "http://127.0.0.1:1" if server is None else url.replace("http:", "https:")
        assert main(command(address, *(("--ca", tmp_path / "ca.crt") if trusted else ()))) == 1

    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert Gateway.keys == set()


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("one two", "one API key"), ("ä", "one API key")])
def test_key_file_without_a_key_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content, encoding="utf-8")

    with pytest.raises(ContestantError, match=message) as refused:
        reach(options(key_file=path), "http://127.0.0.1", PLAN)
    assert str(path) in str(refused.value)


def ask(monkeypatch: pytest.MonkeyPatch, answer: str) -> Service:
    """Ask at a terminal whether 192.0.2.1 may be loaded."""
    terminal = io.StringIO(f"{answer}\n")
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", terminal)
    return reach(options(requests=500), "https://192.0.2.1:8443/detect", PLAN)


def test_another_host_is_loaded_only_after_a_question(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reached = ask(monkeypatch, "y")

    expected = "Load 192.0.2.1:8443 (192.0.2.1) with TLS: up to 16 connections for 31 s, at most 600 requests? [y/N] "
    assert capsys.readouterr().err == expected
    assert (reached.is_elsewhere, reached.server.is_here, reached.requests) == (True, False, 500)
    with pytest.raises(ContestantError, match="nothing is sent"):
        ask(monkeypatch, "")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(ContestantError, match="without --yes"):
        reach(options(), "http://192.0.2.1", PLAN)


@pytest.mark.parametrize(
    ("plan", "limit"),
    [
        (Plan(connections=257, seconds=1), "at most 256 connections"),
        (Plan(connections=1, seconds=1, rate=1001), "at most 1,000 requests per second"),
        (Plan(connections=1, seconds=60, runs=10), "at most 600 seconds"),
    ],
)
def test_another_host_gets_no_more_than_the_limits(plan: Plan, limit: str) -> None:
    """The runs of a command share the requests, of which some are sent before."""
    with pytest.raises(ContestantError, match=limit):
        reach(options(yes=True), "http://192.0.2.1", plan)
    assert not reach(options(), "http://127.0.0.1", plan).is_elsewhere
    assert reach(options(yes=True, requests=90_000), "http://192.0.2.1", Plan(1, 1, runs=5)).requests == 19_980
