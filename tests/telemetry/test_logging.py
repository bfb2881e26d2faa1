"""Structured logs on stdout and plain messages on stderr."""

import asyncio
import json
import logging as python_logging
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import structlog

from app.telemetry import logging
from tests.support import ROOT

pytestmark = pytest.mark.usefixtures("restored_logging")


def test_each_event_that_is_severe_enough_is_a_json_object_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure("info")
    logger = structlog.get_logger().bind(request_id="r1")
    logger.debug("detail")
    logger.info("request", status=200, text="two\nlines")
    logger.warning("slow", path="/\udcff")

    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    stamps = [first.pop("timestamp"), second.pop("timestamp")]
    assert first == {"event": "request", "level": "info", "request_id": "r1", "status": 200, "text": "two\nlines"}
    assert second == {"event": "slow", "level": "warning", "request_id": "r1", "path": "/\udcff"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", stamp) for stamp in stamps)


def test_a_line_that_cannot_be_written_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a closed stream, must not affect the caller, nor the event loop, which writes later."""

    async def log() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        structlog.get_logger().info("request", text="x" * 100_000)
        await asyncio.sleep(0)
        structlog.get_logger().warning("slow")

    failed: list[object] = []
    with Path("/dev/full").open("w", encoding="ascii") as full:
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, full)
        logging.configure("info")
        logging.say("worker 1 does not respond; replacing it")
        structlog.get_logger().info("request", text="x" * 100_000)
        asyncio.run(log())
        with suppress(OSError):
            full.close()
        asyncio.run(log())  # now it is closed
    assert not failed


def fail() -> None:
    secret = "the caller's " + "image"
    raise ValueError(len(secret))


def test_a_traceback_has_no_local_variables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        logging.configure("info")
        try:
            fail()
        except ValueError:
            structlog.get_logger().exception("failed")
        out = capsys.readouterr().out
        assert "in fail" in out
        assert "the caller's image" not in out
        assert out.startswith("{") is not is_terminal


def test_messages_of_a_library_are_part_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure("info")
    logging.forward("some.library", silent="some.library.headers")
    logger = python_logging.getLogger("some.library.part")
    logger.info("too much")
    python_logging.getLogger("some.library.headers").warning("cannot parse authorization: SECRET")
    logger.warning("retrying in %.1f s", 1.5)
    try:
        fail()
    except ValueError:
        logger.exception("given up")
    python_logging.getLogger("some.library").handlers = []

    out, err = capsys.readouterr()
    retrying, given_up = map(json.loads, out.splitlines())
    assert (retrying["event"], retrying["level"], retrying["logger"]) == ("retrying in 1.5 s", "warning", "some.library.part")
    assert given_up["exception"].endswith("ValueError: 18")
    assert err == ""


STALLED = """
import os, sys
import structlog
from app.telemetry import logging, streams
streams.never_wait()
logging.configure("info")
for number in range(5000):
    structlog.get_logger().info("request", text="x" * 400)
    logging.say("y" * 400)
os.write(int(sys.argv[1]), b"done")
sys.stdin.read()
"""
NEVER_WAIT = "streams.never_wait()"
ANOTHER_USER = """
def refuse(*_): raise PermissionError
os.open, opened = refuse, os.open
streams.never_wait()
os.open = opened
"""


@pytest.mark.parametrize("kind", ["pipe", "pipe of another user", "socket"])
def test_no_line_waits_for_its_reader_and_lost_ones_are_counted(kind: str) -> None:
    script = STALLED.replace(NEVER_WAIT, ANOTHER_USER) if kind == "pipe of another user" else STALLED
    streams = [tuple(end.detach() for end in socket.socketpair()) if kind == "socket" else os.pipe() for _ in range(2)]
    (out, to_out), (err, to_err) = streams
    said, say = os.pipe()
    command = [sys.executable, "-c", script, str(say)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=to_out, stderr=to_err, pass_fds=[say]) as process:
        for end in (to_out, to_err, say):
            os.close(end)
        assert os.read(said, 4) == b"done"
        os.close(said)
        for stream in (out, err):
            with open(stream, encoding="utf-8") as lines:  # noqa: PTH123 - a descriptor
                received = 0
                while not (lost := re.search(r"(\d+) lines were lost|were lost.*\"lines\":(\d+)", next(lines))):
                    received += 1
            assert received + int(lost[1] or lost[2]) == 5000
            assert received > 1000
        process.communicate()


def test_process_that_ends_waits_for_its_reader_and_a_fork_repeats_nothing() -> None:
    script = """
import os, sys
import structlog
from app.telemetry import logging, streams
streams._LAST_SECONDS = 60
streams.never_wait()
logging.configure("info")
for number in range(400):
    structlog.get_logger().info("request", number=number, text="x" * 400)
if os.fork() == 0:
    logging.configure("info")
structlog.get_logger().info("request", number=400 + os.getpid())
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(0.5)  # until the pipe is full
        numbers = [json.loads(line)["number"] for line in process.stdout or ()]

    assert (len(numbers), len({*numbers})) == (402, 402)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_each_line_is_one_write(*, is_terminal: bool) -> None:
    script = f"""
import sys
import structlog
from granian.log import LogLevels, configure_logging, logger
from app.telemetry import logging
logging.write_whole_lines()
sys.stdout.isatty = lambda: {is_terminal}
logging.configure("info")
configure_logging(LogLevels.info)
logging.say("a message")
structlog.get_logger().info("an event")
logger.error("a worker ended")
print("in", "parts")
print("in", "parts", file=sys.stderr)
1 / 0
"""
    read, write = os.pipe2(os.O_DIRECT)  # which keeps each write apart
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environ, stdout=write, stderr=write)
    os.close(write)
    writes = []
    while written := os.read(read, 4096):
        writes.append(written.decode())
    os.close(read)

    assert process.wait() == 1
    assert [text for text in writes if text.count("\n") != 1 or not text.endswith("\n")] == []
    assert [text for text in writes if "in parts" in text] == ["in parts\n"] * 2
    for text in ("nereid: a message\n", "[ERROR] a worker ended\n", "ZeroDivisionError: division by zero\n"):
        assert text in writes
    assert [text for text in writes if "an event" in text]
