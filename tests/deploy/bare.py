"""A machine that has nothing but a minimal Debian."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.programs import require_program

HOME = "/root"
"""The home of the machine's user."""
# Mounts end with the namespace, which ends with the program.
_ENTER = (
    'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --bind -o ro "$0/srv" "$0/mnt" && exec chroot "$0" "$@"'
)


class Bare(NamedTuple):
    """The root of a minimal Debian, whose `/srv` is also, read-only, in `/mnt`."""

    root: Path

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs something in it; the process that is started becomes that program."""
        return ["unshare", "--mount", "sh", "-c", _ENTER, str(self.root), *command]

    def run(self, *command: str, **settings: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*command), env=environ(settings), capture_output=True, text=True, check=False)


def environ(settings: Mapping[str, object]) -> dict[str, str]:
    """Return this machine's environment without Python's variables, plus settings."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": HOME} | {name: str(value) for name, value in settings.items()}


def make_bare(root: Path, *packages: str) -> Bare:
    """Make a machine with these packages of Debian 12."""
    if os.geteuid():
        pytest.skip("only root can make a machine's root folder")
    options = ["--variant=minbase", *([f"--include={','.join(packages)}"] if packages else [])]
    subprocess.run([require_program("debootstrap", "debootstrap"), *options, "bookworm", root], check=True)
    return Bare(root)
