"""Work on a file that may be hostile, in a process without network and with limited memory and time."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from errno import EPERM
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import msgspec

from app.host import system_calls
from app.host.processes import die_with_parent
from app.host.program import CommandError, NotPossible, first_line

_SECONDS, _MEMORY_BYTES, _FILE_BYTES = 120.0, 4 << 30, 2 << 30
_ANSWER_BYTES = 1 << 24

T = TypeVar("T")


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    is_possible: bool = True


def run(work: Callable[[], T], kind: type[T]) -> T:
    """Run work in a child process; return its result, which msgspec can encode. Call it in a process with one thread.

    Raises:
        CommandError: As the work raises, or it takes too long or too much memory, or has crashed.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=partial(_answer, work, sender, os.getpid()))
    child.start()
    sender.close()
    try:
        if not receiver.poll(_SECONDS):
            raise CommandError(f"the check of the file takes more than {_SECONDS:g} s")
        answer = msgspec.json.decode(receiver.recv_bytes(_ANSWER_BYTES), type=_Answer)
        if answer.error:
            raise (CommandError if answer.is_possible else NotPossible)(answer.error)
        return msgspec.json.decode(answer.result, type=kind)
    except (EOFError, OSError, msgspec.DecodeError) as error:
        child.join(1)
        ended = f" by {signal.Signals(-code).name}" if (code := child.exitcode or 0) < 0 else ""
        limit = f"{_MEMORY_BYTES / 2**30:g} GiB"
        raise CommandError(
            f"the check of the file was ended{ended}: it crashes ONNX Runtime, or needs more than {limit}"
        ) from error
    finally:
        child.kill()
        child.join()


def _answer(work: Callable[[], T], sender: Connection, parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)
    limits = {resource.RLIMIT_AS: _MEMORY_BYTES, resource.RLIMIT_FSIZE: _FILE_BYTES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    system_calls.answer(["socket", "io_uring_setup"], EPERM)
    try:
        answer = _Answer(msgspec.Raw(msgspec.json.encode(work())))
    except CommandError as error:
        answer = _Answer(error=str(error), is_possible=not isinstance(error, NotPossible))
    except Exception as error:  # noqa: BLE001 - hostile files have surprised every library
        answer = _Answer(error=f"the file cannot be checked: {first_line(error)}")
    sender.send_bytes(msgspec.json.encode(answer))
