"""What the logs look like, and what gets into them."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Literal

import pytest
import structlog

from app import log


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Leave the rest of the session its own logging."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each event is a line of its own with level, time in UTC and everything bound to it."""
    log.configure("info", "json")

    logger = structlog.get_logger().bind(request_id="r1")
    logger.info("request", status=200, text="two\nlines")
    logger.warning("slow")

    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    stamps = [first.pop("timestamp"), second.pop("timestamp")]
    assert first == {"event": "request", "level": "info", "request_id": "r1", "status": 200, "text": "two\nlines"}
    assert second == {"event": "slow", "level": "warning", "request_id": "r1"}
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", stamp) for stamp in stamps)


def test_text_that_is_no_unicode_is_logged_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A lone surrogate, which is what Python makes of bytes that it cannot read."""
    log.configure("info", "json")
    structlog.get_logger().info("request", path="/\udcff")

    assert json.loads(capsys.readouterr().out)["path"] == "/\udcff"


@pytest.mark.parametrize(
    ("level", "logged"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_less_severe_events_are_dropped(capsys: pytest.CaptureFixture[str], level: str, logged: list[str]) -> None:
    """The level is the least severe that is written."""
    log.configure(level, "json")

    for name in ("debug", "info", "warning", "error"):
        getattr(structlog.get_logger(), name)(name)

    assert [json.loads(line)["level"] for line in capsys.readouterr().out.splitlines()] == logged


def fail() -> None:
    secret = "the caller's " + "picture"
    raise ValueError(len(secret))


@pytest.mark.parametrize("form", ["json", "console"])
def test_traceback_has_no_local_variables(capsys: pytest.CaptureFixture[str], form: Literal["json", "console"]) -> None:
    """An exception is logged with where it happened, without what was in memory there."""
    log.configure("info", form)

    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("failed")

    out = capsys.readouterr().out
    assert "ValueError: 20" in out
    assert "in fail" in out
    assert "the caller's picture" not in out


def test_traceback_is_within_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A JSON line stays one line, with the traceback as a member."""
    log.configure("info", "json")

    try:
        fail()
    except ValueError:
        structlog.get_logger().exception("failed")

    (line,) = capsys.readouterr().out.splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"]) == ("failed", "error")
    assert event["exception"].endswith("ValueError: 20")


@pytest.mark.parametrize(
    ("form", "terminal", "is_json"),
    [
        ("json", True, True),
        ("json", False, True),
        ("console", True, False),
        ("console", False, False),
        ("auto", True, False),
        ("auto", False, True),
    ],
)
def test_form_follows_the_terminal_only_on_auto(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    form: Literal["auto", "json", "console"],
    *,
    terminal: bool,
    is_json: bool,
) -> None:
    """`auto` is for people on a terminal and JSON elsewhere; the other two are what they say."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    log.configure("info", form)

    structlog.get_logger().info("ready", port=4603)

    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("{") is is_json
    assert "ready" in line


def test_words_for_people_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """`say` leaves stdout to the logs."""
    log.say("downloading")

    assert tuple(capsys.readouterr()) == ("", "nereid: downloading\n")
