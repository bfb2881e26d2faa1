"""Who uses a running gateway, according to its metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

from app.doctor import callers
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics, render
from tests.support import free_port


@contextmanager
def gateway(status: int, body: bytes) -> Iterator[Settings]:
    """Answer each request in this way; yield settings with the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Settings(port=server.server_port)
        server.shutdown()
        thread.join()


def test_callers_are_listed_with_their_waits(table: WorkerTable) -> None:
    """An image waits for a thread and for a call."""
    metrics = Metrics(table, "1")
    for caller, images, seconds in (("many", 3, 0.1), ("few", 1, 0.5)):
        for _ in range(images):
            for stage in ("queue", "batch"):
                metrics.queue_seconds.observe(seconds, stage, caller)
    with gateway(200, render(metrics.collect(), "")[0]) as settings:
        (finding,) = callers.check(settings)

    expected = "2 callers so far: many 3 images, which waited 200 ms on average; few 1 image, which waited 1000 ms on average"
    assert (finding.code, finding.message) == ("callers", expected)


def test_metrics_that_need_a_key_are_named() -> None:
    with gateway(401, b"{}") as settings:
        (finding,) = callers.check(settings)

    assert "needs an API key with the scope health" in finding.message


def test_other_programs_and_closed_ports_have_no_callers() -> None:
    with gateway(200, b"hello") as settings:
        assert list(callers.check(settings)) == []
    assert list(callers.check(Settings(port=free_port()))) == []
