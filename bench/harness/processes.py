"""Servers as child processes: start them, wait for them, and stop them with their children."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar, cast

import msgspec
import psutil

from app.host.http import get_status
from app.host.processes import die_with_parent, end_group
from app.settings.schema import PREFIX, Settings
from bench.harness.errors import ContestantError

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
"""This checkout."""

_READY_SECONDS = 120.0  # a fresh copy compiles its modules first
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
_OK, _NOT_READY = 200, 503


class Running(NamedTuple):
    """A running server."""

    url: str
    process: psutil.Process
    """The started process, which may have children."""
    start_seconds: float
    """Time until it was ready."""


@contextmanager
def running(  # noqa: PLR0913, PLR0917 - the parts of a server
    command: Sequence[str],
    environment: Mapping[str, str],
    port: int,
    probe: str,
    log: Path,
    checkout: Path = ROOT,
    *,
    ready_seconds: float = _READY_SECONDS,
) -> Iterator[Running]:
    """Run a server until the block ends.

    Args:
        command: Its command line.
        environment: Variables added to the environment of this process, without its settings of Nereid.
        port: The port it listens on, on loopback.
        probe: A path that returns 200 when it is ready, 503 before.
        log: File for its output, whose end is in the ContestantError if the server does not become ready.
        checkout: The checkout of this project that it runs from.
        ready_seconds: Maximum time until it is ready.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            cwd=checkout,
            env={**environment_of(checkout), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C must reach only the parent, which stops it
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
        )
    url = f"http://127.0.0.1:{port}"
    try:
        status = wait_for_answer(f"{url}{probe}", child, ready_seconds, retry=(_NOT_READY,))
        if status != _OK:
            raise ContestantError(f"{_describe(status, child)}: {_last_lines(log)}")
        yield Running(url, psutil.Process(child.pid), time.monotonic() - began)
    finally:
        end_group(child, _STOP_SECONDS)


@contextmanager
def calling(function: Callable[..., T], *arguments: object) -> Iterator[Callable[[], T]]:
    """Call a function in a new process, which has started when the block begins; yield what waits for its result.

    The process ends with the block, and does not get Ctrl-C, which only its parent handles. An exception of the function is raised
    by what waits.
    """
    with subprocess.Popen(
        [sys.executable, "-c", f"from {__name__} import answer; answer()"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
    ) as child:
        questions, answers = cast("BinaryIO", child.stdin), cast("BinaryIO", child.stdout)

        def wait() -> T:
            try:
                result, error = pickle.load(answers)  # noqa: S301 - of our own process
            except EOFError:
                raise ContestantError(f"no result; the process has ended with code {child.wait()}") from None
            if error:
                raise error
            return cast("T", result)

        try:
            pickle.dump((function, arguments), questions)
            questions.close()
            answers.read(1)
            yield wait
        finally:
            child.kill()


def answer() -> None:
    """Be the process of `calling`: what the function prints goes to stderr."""
    output, sys.stdout = sys.stdout, sys.stderr
    function, arguments = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our own parent
    output.buffer.write(b".")
    output.flush()
    result, problem = None, None
    try:
        result = function(*arguments)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        problem = error
    pickle.dump((result, problem), output.buffer)
    output.flush()


def wait_for_answer(
    url: str, process: "subprocess.Popen[bytes]", seconds: float = float("inf"), retry: Collection[int] = ()
) -> int | None:
    """Poll a server until it responds with another status than those of `retry`; return None if it ended or the time is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        status = get_status(url, 1)
        if status is not None and status not in retry:
            return status
        time.sleep(_POLL_SECONDS)
    return None


def environment_of(checkout: Path) -> dict[str, str]:
    """Return this process's environment for a program of a checkout: with the checkout's modules, without settings of Nereid."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return inherited | {"PYTHONPATH": str(checkout)}


def variables(settings: Settings) -> dict[str, str]:
    """Return these settings as environment variables."""
    usual = type(settings)()
    given = {name: value for name, value in msgspec.structs.asdict(settings).items() if value != getattr(usual, name)}
    return {f"{PREFIX}{name.upper()}": str(value) for name, value in given.items()}


def require_checkout(folder: Path) -> Path:
    """Return the absolute path of a checkout of this project, or of the one-file program; others are a ContestantError."""
    folder = folder.resolve()
    if os.access(folder, os.X_OK) and folder.is_file():
        return folder
    if not (folder / "app" / "__main__.py").is_file():
        raise ContestantError(f"{folder} is not a checkout of this project: it has no app/__main__.py")
    return folder


def _describe(status: int | None, child: "subprocess.Popen[bytes]") -> str:
    if status is not None:
        return f"answered with status {status}"
    return "was not ready in time" if child.poll() is None else f"exited with code {child.poll()}"


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-3:]
    return " | ".join(lines) or "it printed nothing"
