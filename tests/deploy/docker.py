"""Docker with an engine of its own."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.host.processes import die_with_parent
from tests.processes import require_program, wait_for
from tests.support import ROOT

_STOP_SECONDS = 60


class Docker:
    """An engine, and programs that ask it."""

    def __init__(self, socket: Path) -> None:
        self._environ = {**os.environ, "DOCKER_HOST": f"unix://{socket}", "DOCKER_BUILDKIT": "0", "BUILDER": "docker"}

    def run(self, *command: str | Path, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a program that asks the engine."""
        return subprocess.run(command, cwd=ROOT, env=self._environ | variables, capture_output=True, text=True, check=False)

    def succeed(self, *command: str | Path, **variables: str) -> str:
        """Run a program that must succeed, and return its output."""
        done = self.run(*command, **variables)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-4000:]
        return done.stdout.strip()

    def __call__(self, *arguments: str | Path) -> str:
        """Run a command of `docker` that must succeed, and return its output."""
        return self.succeed("docker", *arguments)

    def inspect(self, name: str) -> dict[str, Any]:
        """Return what the engine knows of a container or an image."""
        (known,) = json.loads(self("inspect", name))
        return dict(known)

    def root(self, container: str) -> Path:
        """Return the root folder of a running container."""
        return Path(self.inspect(container)["GraphDriver"]["Data"]["MergedDir"])

    @contextmanager
    def running(self, *arguments: str) -> Iterator[str]:
        """Run a container as `docker run` does with these arguments, until the block ends; yields its ID."""
        container = self("run", "--detach", *arguments)
        try:
            yield container
        finally:
            self("rm", "--force", "--volumes", container)

    def stop(self, container: str) -> int:
        """Stop a container as it wishes, and return its exit code; that of one which did not stop in time is 137."""
        self("stop", f"--time={_STOP_SECONDS}", container)
        return int(self.inspect(container)["State"]["ExitCode"])


@contextmanager
def engine(folder: Path) -> Iterator[Docker]:
    """Run an engine with everything in one folder, which is removed in the end; the networks of this machine stay as they are."""
    if os.geteuid():
        pytest.skip("only root can run an engine for containers")
    require_program("docker", "docker.io")
    command = [
        require_program("dockerd", "docker.io"),
        f"--data-root={folder}/data",
        f"--exec-root={folder}/run",
        f"--pidfile={folder}/pid",
        f"--host=unix://{folder}/socket",
        "--storage-driver=overlay2",
        # Containers have this machine's network, or one that a test creates; ports are published by a proxy.
        "--bridge=none",
        "--iptables=false",
        "--ip6tables=false",
        "--ip-forward=false",
    ]
    docker, log = Docker(folder / "socket"), folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach only this process, which stops it
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
        )

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text(encoding="utf-8")[-4000:]
        return docker.run("docker", "info").returncode == 0

    try:
        wait_for(is_ready)
        yield docker
    finally:
        process.terminate()  # it ends its containers first
        process.wait()
        for network in (folder / "run" / "netns").glob("*"):  # that of this machine stays mounted there
            subprocess.run(["umount", network], check=True)
        subprocess.run(["rm", "-r", folder], check=True)  # much faster than Python: layers have many files
