"""A minimal Debian in a folder, in which packages are installed and programs run without a container engine."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SUITES = {"bookworm": "3.11", "trixie": "3.13"}
"""The supported releases of Debian, 12 and 13, and the version of Python of each."""
HOME = "/root"
"""Of the only user in a root."""

# Mounts end with the namespace, which ends with the program.
_ENTER = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" "$@"'
_APT = ("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "Dpkg::Use-Pty=0")


class DebianRoot(NamedTuple):
    """The root folder of a Debian."""

    folder: Path

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs something in it; the process that is started becomes that program."""
        return ["unshare", "--mount", "sh", "-c", _ENTER, str(self.folder), *command]

    def run(self, *command: str, **variables: object) -> "subprocess.CompletedProcess[str]":
        """Run something in it, with its usual environment and these variables."""
        return subprocess.run(self.command(*command), env=environment(variables), capture_output=True, text=True, check=False)

    def succeed(self, *command: str) -> None:
        """Run something in it that must succeed.

        Raises:
            SystemExit: It failed; the message is its last output.
        """
        if (done := self.run(*command)).returncode:
            sys.exit(f"{' '.join(command)} failed in {self.folder}:\n{(done.stdout + done.stderr)[-4000:]}")

    def install(self, *packages: str) -> None:
        """Install packages of Debian, without those that they only recommend."""
        self.succeed(*_APT, "update")
        self.succeed(*_APT, "install", "--yes", "--no-install-recommends", *packages)


def environment(variables: Mapping[str, object]) -> dict[str, str]:
    """Return the environment of a program in a root: without Python's variables, plus these."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": HOME} | {name: str(value) for name, value in variables.items()}


def make(suite: str, cache: Path, folder: Path) -> DebianRoot:
    """Make a root of its own in a new folder.

    Args:
        suite: Name of the release of Debian.
        cache: Folder with a root of each release, from which others are copied; what is missing is made by debootstrap.
        folder: The new root.
    """
    if not (original := cache / suite).exists():
        shutil.rmtree(unfinished := cache / f"{suite}.unfinished", ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        log = cache / f"{suite}.log"
        with log.open("wb") as output:
            command = ["debootstrap", "--variant=minbase", suite, str(unfinished)]
            if subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode:
                sys.exit(f"debootstrap failed; its output is in {log}")
        # With the updates since this release, because a library of it may become part of a wheel.
        sources = unfinished / "etc" / "apt" / "sources.list"
        mirror = sources.read_text(encoding="ascii").split()[1]
        lines = (
            (mirror, suite),
            (mirror, f"{suite}-updates"),
            (f"{mirror.rpartition('/debian')[0]}/debian-security", f"{suite}-security"),
        )
        sources.write_text("".join(f"deb {url} {name} main\n" for url, name in lines), encoding="ascii")
        unfinished.rename(original)
    subprocess.run(["cp", "--archive", "--reflink=auto", original, folder], check=True)
    return DebianRoot(folder)


def write_pip_settings(root: Path) -> None:
    """Write the files by which pip in another root reaches the index that this machine's pip uses."""
    lines = ["[global]"]
    for option in ("index-url", "cert"):
        asked = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}")
        value = value or subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if value and option == "cert":
            (certificates := root / "run" / "ca.crt").parent.mkdir(parents=True, exist_ok=True)
            certificates.write_bytes(Path(value).read_bytes())
            value = "/run/ca.crt"
        if value:
            lines.append(f"{option} = {value}")
    (settings := root / "etc" / "pip.conf").parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("\n".join(lines), encoding="utf-8")
