"""Locust is run with the options given, and what it measured is put side by side."""

import argparse
import json
import subprocess
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments import locust
from bench.experiments.locust import Entry, arguments, summary
from bench.experiments.service import Plan, reach
from bench.harness.environments import LOCUST
from tests.fakes.http import serving
from tests.support import IMAGES

ENTRIES = [
    Entry("/detect", 101, 0, {12: 50, 15: 49, 40: 1, 2000: 1}, 100.0, 110.0),
    Entry("/classify", 4, 3, {3: 4}, 100.0, 102.0),
]


def test_tasks_are_put_side_by_side() -> None:
    _, _, detect, classify = summary(ENTRIES).splitlines()

    assert detect.split() == ["/detect", "10.1", "15.0", "15.0", "15.0", "40.0", "0", "of", "101"]
    assert classify.split() == ["/classify", "2.00", *["3.00"] * 4, "3", "of", "4"]


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (1, 1)])
def test_failed_requests_make_the_command_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failures: int, code: int
) -> None:
    """So that a script notices them."""
    program = tmp_path / "python"
    entry = {"name": "/detect", "num_requests": 2, "num_failures": failures, "response_times": {"5": 2}}
    found = json.dumps([entry | {"start_time": 1.0, "last_request_timestamp": 2.0}])
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{found}\nEND\n", encoding="ascii")
    program.chmod(0o755)
    monkeypatch.setattr(LOCUST, "python", lambda: program)

    assert main(["locust", "--images", str(IMAGES / "coffee.jpg")]) == code
    assert f"{failures} of 2" in capsys.readouterr().out


@pytest.mark.skipif(not LOCUST.is_installed(), reason=LOCUST.missing)
def test_locust_accepts_the_file_and_the_options() -> None:
    done = run_locust("http://127.0.0.1:1")
    names = {entry["name"] for entry in json.loads(done.stdout)}

    assert names == {"/detect", "/classify"}
    assert b"POST /classify: [Errno 111] Connection refused" in done.stderr


@pytest.mark.skipif(not LOCUST.is_installed(), reason=LOCUST.missing)
def test_locust_does_not_follow_a_redirect() -> None:
    """It would take the load to a host for which nobody was asked."""

    class Redirecting(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(307)
            self.send_header("Location", "http://127.0.0.1:1")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with serving(Redirecting) as url:
        done = run_locust(url)
    errors = {line.partition(" x ")[2] for line in done.stderr.decode().splitlines()}

    assert errors == {"POST /detect: a redirect", "POST /classify: a redirect"}


def run_locust(url: str) -> "subprocess.CompletedProcess[bytes]":
    parser = argparse.ArgumentParser()
    locust.add_to(parser.add_subparsers())
    options = parser.parse_args(["locust", "--url", url, "--seconds", "60", "--clients", "2", "--requests", "100"])
    service = reach(options, url, Plan(2, 60))
    return subprocess.run([str(LOCUST.python()), *arguments(options, service, IMAGES)], capture_output=True, check=True)
