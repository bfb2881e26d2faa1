"""Work on a file that may be hostile, in a process without network and with limited memory and time."""

import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
from errno import EPERM
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TypeVar

import msgspec

from app.host import seccomp
from app.host.processes import die_with_parent
from app.host.program import CommandError, NotPossible, first_line

_SECONDS, _MEMORY_BYTES, _FILE_BYTES = 120.0, 4 << 30, 2 << 30
_ANSWER_BYTES = 1 << 24
_TOO_MUCH = f"needs more than {_MEMORY_BYTES >> 30} GiB"

T = TypeVar("T")


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    is_possible: bool = True


def run(work: Callable[[], T], kind: type[T]) -> T:
    """Run work in a child process; return its result, which msgspec can encode. Raises CommandError also if it crashes."""
    # NotPossible is also raised if this machine cannot keep a process from the network.
    with TemporaryFile() as file:
        child = multiprocessing.get_context("fork").Process(target=partial(_answer, work, file, os.getpid()))
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of a fork beside threads
            child.start()
        try:
            child.join(_SECONDS)
            if child.is_alive():
                raise CommandError(f"the check of the file takes more than {_SECONDS:g} s")
        finally:
            child.kill()
            child.join()
        file.seek(0)
        content = file.read(_ANSWER_BYTES)
    if child.exitcode or not content:
        ended = f" by {signal.Signals(-code).name}" if (code := child.exitcode or 0) < 0 else ""
        raise CommandError(f"the check of the file was ended{ended}: it crashes ONNX Runtime, or {_TOO_MUCH}")
    answer = msgspec.json.decode(content, type=_Answer)
    if answer.error:
        raise (CommandError if answer.is_possible else NotPossible)(answer.error)
    return msgspec.json.decode(answer.result, type=kind)


def _answer(work: Callable[[], T], file: IO[bytes], parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)
    warnings.simplefilter("ignore")  # Python's, about literals in the file's metadata
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    limits = {resource.RLIMIT_AS: _MEMORY_BYTES, resource.RLIMIT_FSIZE: _FILE_BYTES, resource.RLIMIT_CORE: 0}
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))
    try:
        seccomp.answer(["socket", "io_uring_setup", "ptrace", "process_vm_writev", "kill"], EPERM)
    except OSError as error:
        answer = _Answer(error=f"files cannot be checked apart on this machine: {error.strerror}", is_possible=False)
    else:
        answer = _attempt(work)
    file.write(msgspec.json.encode(answer))
    file.flush()


def _attempt(work: Callable[[], T]) -> _Answer:
    try:
        return _Answer(msgspec.Raw(msgspec.json.encode(work())))
    except CommandError as error:
        return _Answer(error=str(error), is_possible=not isinstance(error, NotPossible))
    except MemoryError:
        return _Answer(error=f"the check of the file {_TOO_MUCH}")
    except Exception as error:  # noqa: BLE001 - hostile files have surprised every library
        return _Answer(error=f"the file cannot be checked: {first_line(error)}")
