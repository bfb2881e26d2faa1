"""A real Redis that a test starts, stops, and starts again."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from app.host.processes import die_with_parent
from tests.processes import require_program, wait_for


class RedisServer:
    """A server on a Unix socket, which keeps nothing on disk."""

    def __init__(self, folder: Path, *options: str) -> None:
        """Prepare a server with its socket in `folder`, whose path must be short, and more options of its command line."""
        program = require_program("redis-server", "redis-server")
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._command: Sequence[str] = [
            *(program, "--unixsocket", str(self.socket), "--dir", str(folder), "--save", ""),
            *(options if "--port" in options else ("--port", "0", *options)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
        )
        wait_for(self._takes_connections)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def _takes_connections(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self.socket)) == 0


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
