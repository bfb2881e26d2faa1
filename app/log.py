"""Structured logs on stdout for machines, plain words on stderr for the person at the terminal."""

import json
import logging
import sys
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import structlog


def configure(level: str, form: Literal["auto", "json", "console"]) -> None:
    """Set structlog up for this process. `auto` is for people on a terminal and JSON lines elsewhere."""
    to_console = form == "console" or (form == "auto" and sys.stdout.isatty())
    tail: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if to_console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_line)]
    )
    # Tracebacks never show local variables: they hold pictures and whatever else callers sent.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *tail,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # One write a line: workers share the stream.
        logger_factory=structlog.WriteLoggerFactory() if to_console else structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )


def _line(event: Any, default: Callable[[Any], Any]) -> bytes:  # noqa: ANN401 - whatever was logged
    try:
        return msgspec.json.encode(event, enc_hook=default)
    except UnicodeEncodeError:  # a lone surrogate, from bytes that were no UTF-8
        return json.dumps(event, default=default).encode("ascii")


def say(text: str) -> None:
    """Tell the person at the terminal what is being done."""
    print(f"nereid: {text}", file=sys.stderr, flush=True)
