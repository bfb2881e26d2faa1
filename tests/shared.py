"""Servers that the processes of a run share, because starting one takes as long as many tests that ask it."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


@contextmanager
def shared(folder: Path, serve: Callable[[], AbstractContextManager[str]]) -> Iterator[str]:
    """Let the first process that comes here serve for all, until the last one has left; all get the text that it yields.

    The folder is known to all of them.
    """
    served = folder / "served"
    with ExitStack() as stack:
        with one_process_at_a_time(folder):
            users = stack.enter_context((folder / "users").open("w"))
            if is_first := not served.exists():
                served.write_text(stack.enter_context(serve()), encoding="utf-8")
            text = served.read_text(encoding="utf-8")
            fcntl.flock(users, fcntl.LOCK_SH)
        yield text
        if is_first:
            with one_process_at_a_time(folder):
                served.unlink()
                fcntl.flock(users, fcntl.LOCK_EX)  # the others have left
