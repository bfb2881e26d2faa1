"""A burst of load on one server."""

import sys
from pathlib import Path

import msgspec
import pytest

from bench.harness.burst import Burst, measure_burst, measure_peak
from bench.harness.lineup import DEFAULT, Lineup
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples

pytestmark = pytest.mark.usefixtures("short_bursts")

FRAGILE = """
import os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "17")
        self.end_headers()
        self.wfile.write(b'{"detections":[]}')

    def do_POST(self):
        if threading.active_count() > 20:
            os._exit(1)
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

class Server(ThreadingHTTPServer):
    request_queue_size = 128

Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
"""A server that ends when it has many clients."""


def test_the_peak_is_that_of_the_best_number_of_clients(fixtures: Triton, tmp_path: Path) -> None:
    lineup = Lineup(fixtures, 1, tmp_path)
    run = measure_peak(lineup, lineup.contestant(DEFAULT, "null"), unlabelled_samples(SAMPLE_FOLDER), 0.5)

    assert run.clients in {1, 4}
    assert run.load == "peak"
    assert run.overload
    assert run.overload.peak == run.overload.offered == run.outcome.goodput > 0
    assert run.figures["peak/s"] > 0


def test_a_burst_tells_of_the_time_before_and_after_it(fixtures: Triton, tmp_path: Path) -> None:
    lineup = Lineup(fixtures, 2, tmp_path)
    contestant = lineup.contestant(DEFAULT, "null")
    run = measure_burst(lineup, contestant, unlabelled_samples(SAMPLE_FOLDER), Burst("crowd", clients=8), 0.5, 10.0)

    assert run.overload
    assert run.overload.before_ms
    assert run.overload.after_ms
    assert [len(worker.seconds) > 1 for worker in run.overload.memory] == [True, True]
    assert {"gateway", "triton", "stubs", "client"} == set(run.cpu_ms)
    assert run.triton
    assert {"recovery", "goodput", "resident MiB peak"} <= set(run.figures)


def test_a_server_that_does_not_survive_has_not_recovered(fixtures: Triton, tmp_path: Path) -> None:
    """This is a result, not a failure of the measurement."""
    lineup = Lineup(fixtures, 1, tmp_path)
    contestant = lineup.contestant(DEFAULT, "null")
    contestant = msgspec.structs.replace(contestant, command=[sys.executable, "-c", FRAGILE, str(contestant.port)])
    run = measure_burst(lineup, contestant, unlabelled_samples(SAMPLE_FOLDER), Burst("crowd", clients=60), 0.5, 10.0)

    assert run.overload
    assert run.overload.before_ms
    assert run.overload.after_ms is None
    assert run.outcome.statuses["error"] > 0
    assert "recovery" not in run.figures
