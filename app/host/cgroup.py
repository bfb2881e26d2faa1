"""Limits of this process's control group, and of the groups around it."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def limits(controller: str, *files: str) -> Iterator[list[int]]:
    """Yield the numbers in files of each group around this process; the controller has its name of version 1, such as `cpu`."""
    for folder in _folders(controller):
        with suppress(OSError, ValueError):  # not there, or "max"
            if numbers := [int(number) for file in files for number in (folder / file).read_text(encoding="ascii").split()]:
                yield numbers


def _folders(controller: str) -> Iterator[Path]:
    # Of version 2 and of version 1. A container sees its own group as the root.
    yield from (_GROUPS, _GROUPS / controller)
    with suppress(OSError):
        for line in os.fsdecode(_OWN_GROUPS.read_bytes()).splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") or not controllers:  # version 2 has no names
                root = _GROUPS / controller if controllers else _GROUPS
                own = root / path.lstrip("/")
                yield from (own, *(parent for parent in own.parents if root in parent.parents))
