"""`serve` as it runs on one machine: the embedded Triton and several instances of the API on unix sockets."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from app.host.http import get_status
from app.host.processes import end_group
from app.settings.schema import Settings
from bench.harness.ports import find_free
from bench.harness.processes import ROOT, environment_of
from bench.harness.triton import link_installation
from tests.faults.serving import wait_for_line
from tests.processes import PATIENCE_SECONDS, has_ended, wait_for

_STOP_SECONDS = 60.0


class Fleet(NamedTuple):
    process: psutil.Process
    folder: Path
    log: Path
    triton_address: str
    """Its gRPC endpoint."""
    size: int
    """Number of instances; 0: the API listens at `url` instead."""
    url: str

    @property
    def sockets(self) -> list[Path]:
        return sorted((self.folder / "run").glob("*.sock"))

    def family(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def instances(self) -> list[psutil.Process]:
        """Return the parents of the workers."""
        return [child for child in self._children(self.process) if child.name() not in {"tritonserver", "postgres"}]

    def workers(self) -> list[psutil.Process]:
        return [worker for instance in self.instances() for worker in self.workers_of(instance)]

    def workers_of(self, instance: psutil.Process) -> list[psutil.Process]:
        return self._children(instance)

    def triton(self) -> psutil.Process | None:
        return next((child for child in self._children(self.process) if child.name() == "tritonserver"), None)

    def database(self) -> psutil.Process | None:
        return next((child for child in self._children(self.process) if child.name() == "postgres"), None)

    def stubs(self, model: str) -> list[psutil.Process]:
        def runs_it(process: psutil.Process) -> bool:
            with suppress(psutil.NoSuchProcess):
                return any(f"/{model}/" in argument for argument in process.cmdline())
            return False

        triton = self.triton()
        return [] if triton is None else list(filter(runs_it, self._children(triton)))

    def is_ready(self) -> bool:
        """Return whether every instance is ready; NGINX is not asked."""
        sockets: list[Path | None] = [self.folder / "run" / f"nereid-{number + 1}.sock" for number in range(self.size)]
        return all(get_status(f"{self.url}/readyz", 5, socket) == 200 for socket in sockets or [None])

    def says(self, text: str) -> int:
        return self.log.read_text(encoding="utf-8", errors="replace").count(text)

    def log_of(self, request_id: str) -> dict[str, Any]:
        return wait_for_line(self.log, request_id)

    def _children(self, process: psutil.Process) -> list[psutil.Process]:
        try:
            return [child for child in process.children() if not has_ended(child)]
        except psutil.NoSuchProcess:
            return []


@contextmanager
def running_fleet(
    repository: Path,
    folder: Path,
    *,
    instances: int = 2,
    settings: Mapping[str, object] | None = None,
    wrapper: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Run `serve` until the block ends, in a folder for everything it writes, with instances of one worker each.

    The model repository must have the model `checksum` unless the settings, given by name, say otherwise.
    """
    home = folder / "triton"
    home.mkdir()
    link_installation(home)
    (port,) = find_free(1)
    wanted: dict[str, object] = {
        "port": port,
        "instances": instances,
        "workers": 1,
        "triton_home": home,
        "model": "checksum",
        "model_repository": repository,
        "log_level": "warning",
        **(settings or {}),
    }
    log = folder / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "app", "serve"],
            cwd=folder,
            env={**environment_of(ROOT), **{f"NEREID_{name.upper()}": str(value) for name, value in wanted.items()}},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address, url = Settings(triton_home=str(home)).triton_address, f"http://127.0.0.1:{port}"
    fleet = Fleet(psutil.Process(process.pid), folder, log, address, instances, url)
    try:
        wait_for(lambda: fleet.says("ready: ") > 0 or process.poll() is not None, PATIENCE_SECONDS)
        assert process.poll() is None, log.read_text()
        yield fleet
    finally:
        family = fleet.family() if process.poll() is None else []
        end_group(process, _STOP_SECONDS)
        for member in family:
            if not has_ended(member):
                os.kill(member.pid, 9)
