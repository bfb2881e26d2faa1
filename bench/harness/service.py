"""A separate `serve`: the API and the embedded Triton, with their own ports, logs and models."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from app.host.ports import find_free
from app.settings.schema import PREFIX
from bench.harness.processes import running
from bench.harness.triton import link_installation

_READY_SECONDS = 120.0
"""Triton starts first."""


class Service(NamedTuple):
    """A running `serve`."""

    url: str
    process: psutil.Process
    targets: dict[str, str]
    """Addresses of the metrics for Prometheus: `host:port` by job."""

    def triton(self) -> psutil.Process | None:
        """Return its Triton; None if it is not running."""
        running = (child for child in self.process.children() if child.status() != psutil.STATUS_ZOMBIE)
        return next((child for child in running if child.name() == "tritonserver"), None)


@contextmanager
def running_service(repository: Path, folder: Path, settings: Mapping[str, object]) -> Iterator[Service]:
    """Run `serve` until the block ends.

    Args:
        repository: Its model repository.
        folder: Folder for its logs and the home of its Triton.
        settings: Settings by name, including `model`.

    Raises:
        ContestantError: It does not start.
        InstallError, PackageError: Triton cannot be installed.
    """
    home = folder / "triton"
    home.mkdir()
    link_installation(home)
    port, http, grpc, metrics = find_free(4)
    given = {
        "port": port,
        "triton_home": home,
        "triton_http_port": http,
        "triton_grpc_port": grpc,
        "triton_metrics_port": metrics,
        "model_repository": repository,
        "log_format": "json",
        **settings,
    }
    environment = {f"{PREFIX}{name.upper()}": str(value) for name, value in given.items()}
    command, log = [sys.executable, "-m", "app", "serve"], folder / "serve.log"
    with running(command, environment, port, "/readyz", log, ready_seconds=_READY_SECONDS) as server:
        targets = {"nereid": f"127.0.0.1:{port}", "triton": f"127.0.0.1:{metrics}"}
        yield Service(server.url, server.process, targets)
