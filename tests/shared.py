"""Servers that the processes of a run share, because starting one takes as long as many tests that ask it."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

_USED = ExitStack()
"""What this process uses until the run has ended."""


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield folder


def share(folder: Path, serve: Callable[[], AbstractContextManager[str]]) -> str:
    """Let the first process that comes here serve for all until `leave`; all get the text that it yields.

    The folder is known to all of them. If the first process dies, which ends its servers, the next one that comes serves.
    """
    with one_process_at_a_time(folder):
        server, users = (_USED.enter_context((folder / name).open("a+", encoding="utf-8")) for name in ("server", "users"))
        try:
            fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = (folder / "text").read_text(encoding="utf-8")
        else:
            text = _USED.enter_context(serve())
            (folder / "text").write_text(text, encoding="utf-8")
            _USED.callback(fcntl.flock, users, fcntl.LOCK_EX)  # when the others have left
        fcntl.flock(users, fcntl.LOCK_SH)
    return text


def leave() -> None:
    """End what this process serves, once the others have left, too. No limit of a test holds here."""
    _USED.close()
