"""NGINX in front of a gateway, with everything it writes in one folder."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.host.ports import find_free
from bench.harness.processes import running

_PROGRAM = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
_TEMPLATE = Path(__file__).with_suffix(".conf")

NEEDS_NGINX = pytest.mark.skipif(_PROGRAM is None, reason="nginx is not installed; on Debian: apt-get install nginx-light")
"""Marks a test that runs NGINX."""


@contextmanager
def proxying(servers: Sequence[str], folder: Path) -> Iterator[str]:
    """Run NGINX in front of instances of the gateway until the block ends; return its URL.

    Args:
        servers: `host:port` of each, or `unix:` and the path of its socket.
        folder: Gets everything that NGINX writes.
    """
    assert _PROGRAM
    (port,) = find_free(1)
    values = {"FOLDER": folder, "PORT": port, "SERVERS": " ".join(f"server {server} max_fails=0;" for server in servers)}
    text = _TEMPLATE.read_text(encoding="utf-8")
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    config = folder / "nginx.conf"
    config.write_text(text, encoding="utf-8")
    command = [_PROGRAM, "-p", str(folder), "-e", str(folder / "error.log"), "-c", str(config)]
    with running(command, {}, port, "/readyz", folder / "nginx.log") as server:
        yield server.url
