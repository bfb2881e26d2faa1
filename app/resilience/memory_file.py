"""Memory files that the first parent process creates, and all of its children inherit."""

import os
from collections.abc import Callable


def share(variable: str, create: Callable[[], int]) -> int:
    """Return the descriptor of the inherited file, or of a new one; it must be passed on to other programs."""
    if not os.environ.get(variable):
        descriptor = create()
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        os.environ[variable] = str(descriptor)
    return int(os.environ[variable])


def reopen(variable: str, create: Callable[[], int]) -> int:
    """Open the inherited file, or a new one. Locks belong to an open file: with one descriptor, all workers would share them."""
    inherited = os.environ.get(variable)
    return os.open(f"/proc/self/fd/{inherited}", os.O_RDWR) if inherited else create()
