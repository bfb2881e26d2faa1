"""Structured logs on stdout, plain messages for the user on stderr."""

import asyncio
import io
import json
import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TextIO, cast

import msgspec
import structlog

from app.telemetry.streams import finish_at_end

_PIPE_BYTES = 4096
"""A pipe keeps the bytes of a write together up to this size (PIPE_BUF)."""


def configure(level: str) -> None:
    """Configure structlog for this process: text for people on a terminal, JSON lines elsewhere."""
    finish_at_end()
    to_console = sys.stdout.isatty()
    renderers: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
        if to_console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)]
    )
    # Tracebacks never include local variables, which contain images and other request data.
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        # Whole lines per write, because the workers share the stream.
        logger_factory=(
            structlog.WriteLoggerFactory(cast("TextIO", _Lossy(sys.stdout)))
            if to_console
            else structlog.BytesLoggerFactory(cast("BinaryIO", _PerIteration(sys.stdout.buffer)))
        ),
        cache_logger_on_first_use=True,
    )


def forward(library: str, *, silent: str) -> None:
    """Forward a library's messages from Python's `logging` to the structured log; by default they go to stderr as plain text.

    The logger `silent` is disabled, because its messages may contain secrets.
    """
    logger = logging.getLogger(library)
    logger.handlers, logger.propagate = [_Forwarder()], False
    logger.setLevel(logging.WARNING)
    logging.getLogger(silent).disabled = True


class _Forwarder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


class _Lossy:
    """A stream that ignores write errors, so that a full disk, or a stream that is closed, does not affect the program."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: a signal's handler logs while a line is written
            self._stream.write(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError, RuntimeError):
            self._stream.flush()


class _PerIteration:
    """A stream like `_Lossy` that writes the lines of one iteration of the event loop together, and other lines immediately."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: deque[bytes] = deque()

    def write(self, line: bytes) -> None:
        self._lines.append(line)

    def flush(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._write_lines()
        else:
            if len(self._lines) == 1:
                loop.call_soon(self._write_lines)

    def _write_lines(self) -> None:
        block = b""
        with suppress(IndexError):  # another thread may write the last line
            while self._lines:
                line = self._lines.popleft()
                if len(block) + len(line) > _PIPE_BYTES:
                    self._write(block)
                    block = b""
                block += line
        self._write(block)

    def _write(self, block: bytes) -> None:
        with suppress(OSError, ValueError, RuntimeError):
            self._stream.write(block)
            self._stream.flush()


def _to_json(event: Any, default: Callable[[Any], Any]) -> bytes:  # noqa: ANN401 - an event is a dict of any values
    try:
        return msgspec.json.encode(event, enc_hook=default)
    except UnicodeEncodeError:  # a lone surrogate, from bytes that are not UTF-8
        return json.dumps(event, default=default).encode("ascii")


def write_whole_lines() -> None:
    """Make stdout and stderr of this process and its forks write whole lines, because several processes share them.

    With PYTHONUNBUFFERED, which containers set, Python writes the parts of a line separately.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def say(message: str) -> None:
    """Print a message for the user; one that cannot be written is lost, because what follows matters more."""
    with suppress(OSError, RuntimeError):  # RuntimeError: a signal's handler says it while another message is written
        sys.stderr.write(f"nereid: {message}\n")
        sys.stderr.flush()
