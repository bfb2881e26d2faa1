"""The load driver on real sockets: nothing is lost, hidden or sent twice, however a server behaves; and a deployed service."""

import argparse
import asyncio
import io
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from bench.__main__ import main
from bench.experiments import server_load
from bench.experiments.service import Plan, Service, reach
from bench.harness.errors import ContestantError
from bench.load.driver import Driver
from bench.load.images import SAMPLE_FOLDER, Sample
from bench.load.target import local_target
from bench.report.records import load_record
from tests.bench.test_statistics import CAT
from tests.fakes.http import response
from tests.nginx import write_certificate

SAMPLE = Sample("chelsea", b"\xff\xd8image", frozenset({"cat"}))

Reply = bytes | Callable[[int], Awaitable[bytes | None]] | None
"""The answer to each request, or what returns it for the number of a request; None closes the connection without an answer."""


class FakeServer:
    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[bytes] = []
        """Head and body of each."""
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
                self.requests.append(head + await reader.readexactly(length))
                answer = await self.reply(len(self.requests) - 1) if callable(self.reply) else self.reply
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(reply: Reply, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeServer]:
    fake = FakeServer(reply)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, ssl=tls)
    fake.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        await server.wait_closed()


async def test_clients_keep_their_connections_and_every_answer_is_counted() -> None:
    async with serving(response(CAT, "200 OK", "Server-Timing: decode;dur=1.5, total;dur=4", "x-more: 1")) as server:
        outcome = await Driver(f"{server.url}/detect", [SAMPLE], 30).closed(4, requests=200)

    assert outcome.requests == len(server.requests) == outcome.correct == outcome.histogram.total_count == 200
    assert server.connections == 4
    assert outcome.stages == {"decode": 1.5, "total": 4.0}
    assert outcome.rate == pytest.approx(200 / outcome.seconds)


async def test_samples_are_sent_in_turn_with_path_query_key_and_type() -> None:
    bodies = [SAMPLE.body, b"\x89PNG\r\n\r\n", b"--edge\r\n\r\nform\r\n--edge--", b'{"a":1}']
    async with serving(response(CAT)) as server:
        target = local_target(f"{server.url}/predict/m?confidence=0.4")._replace(key="id.secret")
        await Driver(target, [Sample("", body, None) for body in bodies], 30).closed(1, requests=5)

    assert [request.partition(b"\r\n\r\n")[2] for request in server.requests] == [*bodies, SAMPLE.body]
    assert all(request.startswith(b"POST /predict/m?confidence=0.4 HTTP/1.1\r\n") for request in server.requests)
    assert all(b"Authorization: Bearer id.secret\r\n" in request for request in server.requests)
    types = [b"image/jpeg", b"application/octet-stream", b"multipart/form-data; boundary=edge", b"application/json"]
    assert [request.partition(b"Content-Type: ")[2].partition(b"\r\n")[0] for request in server.requests[:4]] == types


@pytest.mark.parametrize(("connections", "at_once"), [(3, 3), (100, 40)])
async def test_requests_are_sent_when_due_as_far_as_there_are_connections(connections: int, at_once: int) -> None:
    everyone = asyncio.Event()

    async def reply(number: int) -> bytes:
        if number == at_once - 1:
            everyone.set()
        await everyone.wait()
        return response(CAT)

    async with serving(reply) as server:
        outcome = await Driver(server.url, [SAMPLE], 0.2).constant(200, connections)

    assert outcome.statuses == {"200": 40}
    assert server.connections == at_once


@pytest.mark.faults
async def test_requests_that_a_stall_delays_count_from_when_they_were_due() -> None:
    stalled, loop = asyncio.Event(), asyncio.get_running_loop()

    async def reply(number: int) -> bytes:
        if number == 10:
            loop.call_later(0.5, stalled.set)
        if number >= 10:
            await stalled.wait()
        return response(CAT)

    async with serving(reply) as server:
        outcome = await Driver(server.url, [SAMPLE], 1).constant(100, 2)

    assert outcome.requests == outcome.correct == 100
    assert outcome.percentile(80) > 250  # half of the 50 that are due during the stall


@pytest.mark.parametrize(
    ("answer", "requests", "statuses"),
    [
        (response(CAT, "200 OK", "Connection: close"), 6, {"200": 6}),
        (None, 2, {"error": 2}),
        (b"SSH-2.0\r\ncontent-length: 1\r\n\r\nx", 2, {"error": 2}),
        (response(b'{"code":"gateway_full"}', "429 Too Many Requests"), 3, {"429": 3}),
    ],
    ids=["closed", "broken", "no HTTP", "rejected"],
)
async def test_connections_that_end_are_replaced(answer: bytes | None, requests: int, statuses: dict[str, int]) -> None:
    async with serving(answer) as server:
        outcome = await Driver(server.url, [SAMPLE], 30).closed(1, requests=requests)

    assert outcome.statuses == statuses
    assert outcome.codes == ({"429": ["gateway_full"]} if "429" in statuses else {})
    assert server.connections == (1 if "429" in statuses else requests)


async def test_request_without_an_answer_has_the_latency_of_the_whole_patience() -> None:
    never = asyncio.Event()

    async def reply(_: int) -> None:
        await never.wait()

    async with serving(reply) as server:
        closed = await Driver(server.url, [SAMPLE], 30, patience=0.1).closed(1, requests=1)
        constant = await Driver(server.url, [SAMPLE], 0.2, patience=0.2).constant(200, 2)
        never.set()

    assert (closed.statuses, constant.statuses) == ({"error": 1}, {"error": 40})
    assert closed.max >= 99


@pytest.mark.parametrize("url", ["http://10.0.0.1", "http://127.0.0.1.example.com", "https://127.0.0.1", "detect"])
def test_load_for_another_host_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"only be sent to this machine|does not start with"):
        Driver(url, [SAMPLE], 1)


KEY = "bench.0123456789"


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
    reply = response(CAT, "200 OK", "Server-Timing: decode;dur=2, infer;dur=5, total;dur=9")
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(serving(reply, tls)) as server:
        command = ["full", "--url", server.url, "--image", str(image), "--clients", "2", "--requests", "20"]
        assert main(command) == 1
        assert "the certificate of " in capsys.readouterr().err
        assert server.requests == []
        assert main([*command, "--key-file", f"{tmp_path}/key", "--ca", f"{tmp_path}/ca.crt", "--json", str(file)]) == 0
    record, printed = load_record(file), capsys.readouterr().out

    assert all(f"Authorization: Bearer {KEY}\r\n".encode() in request for request in server.requests)
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
