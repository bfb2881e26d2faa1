"""A real Triton that other users of the machine share it with: what they can reach, and what models of others may do."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

from app.embedded.launch import command
from app.embedded.server import EmbeddedTriton
from app.errors import GatewayError, TritonUnavailable
from app.main import create_app
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.client import TritonClient
from app.triton.control_key import HEADER
from app.triton.shared_memory import Arena
from tests.embedded.conftest import MODEL, SHM, shared
from tests.processes import nothing_left_running  # noqa: F401 - a fixture
from tests.support import finds, free_port, started, transport_in_use

pytestmark = pytest.mark.system


def test_paths_may_have_any_characters(own: Settings, tmp_path: Path) -> None:
    """Triton's Python backend starts its processes with a shell command, which would not find them there; nothing is left."""
    folder = tmp_path / "with a space & (more)"
    folder.mkdir()
    home, repository = (Path(path).rename(folder / Path(path).name) for path in (own.triton_home, own.model_repository))
    server = EmbeddedTriton(msgspec.structs.replace(own, triton_home=str(home), model_repository=str(repository)))
    server.start()
    server.stop()

    assert {path.name for path in home.iterdir()} == {"server", "python", server.log.name}


def tcp_listeners(server: EmbeddedTriton) -> list[tuple[str, int]]:
    """Return where the processes of a server listen on TCP."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections(kind="inet")]
    return [tuple(connection.laddr) for connection in connections if connection.status == psutil.CONN_LISTEN]


TRY_AS_NOBODY = """
import errno, json, os, pathlib, socket, sys
paths = json.load(sys.stdin)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
outcomes = []
for path in paths:
    for attempt in (socket.socket(socket.AF_UNIX).connect, pathlib.Path.read_bytes, os.listdir):
        try:
            attempt(pathlib.Path(path) if attempt is pathlib.Path.read_bytes else path)
            outcomes.append(f"{path} can be reached")
        except OSError as error:
            outcomes.append(errno.errorcode[error.errno])
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
async def test_another_user_reaches_nothing(own: Settings, server: EmbeddedTriton, arenas: list[Arena]) -> None:
    server.start()
    async with started(create_app(msgspec.structs.replace(own, log_level="error"))) as client:
        assert await finds(client)
        assert await transport_in_use(client) == "shm"
        folder = own.triton_folder
        paths = [folder, folder / TRITON_SOCKET, *shared(own), *(SHM / arena.name for arena in arenas)]
        command = [sys.executable, "-c", TRY_AS_NOBODY]
        tried = await asyncio.to_thread(
            subprocess.run, command, input=json.dumps([*map(str, paths)]).encode(), capture_output=True, check=True
        )
        listeners = tcp_listeners(server)

    assert len(paths) >= 4
    assert set(json.loads(tried.stdout)) <= {"EACCES", "ENOTDIR"}
    assert listeners == []


CONTROLS = (
    ("POST", f"/v2/repository/models/{MODEL}/unload"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/systemsharedmemory/region/intruder/register"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", f"/v2/models/{MODEL}/trace/setting"),
    ("POST", "/v2/logging"),
)
VALUES = (b"", b" \r\n ", b" \n", b" \r\n \n", b" %0A", b" \\n")
"""Ways to write a value that is, or may be taken for, a line feed."""


def ask(port: int, method: str, path: str, header: bytes = b"") -> str:
    """Return the answer of Triton's HTTP interface; nothing if it does not take it for a request."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        lines = [f"{method} {path} HTTP/1.1".encode(), b"Host: triton", b"Content-Length: 2", b"Connection: close", header]
        connection.sendall(b"\r\n".join(filter(None, lines)) + b"\r\n\r\n{}")
        with suppress(ConnectionError):
            return b"".join(iter(partial(connection.recv, 1 << 16), b"")).decode()
    return ""


def test_with_ports_others_can_run_models_and_control_nothing(own: Settings, request: pytest.FixtureRequest) -> None:
    first = free_port()
    server = EmbeddedTriton(msgspec.structs.replace(own, triton_ports=first))
    request.addfinalizer(server.stop)
    server.start()
    unkeyed = [ask(first, method, path) for method, path in CONTROLS]
    keyed = [ask(first, method, path, b"nereid:" + value) for method, path in CONTROLS for value in VALUES]

    assert {(address.removeprefix("::ffff:"), port) for address, port in tcp_listeners(server)} == {
        ("127.0.0.1", first),
        ("127.0.0.1", first + 1),
    }
    assert ask(first, "GET", f"/v2/models/{MODEL}/ready").startswith("HTTP/1.1 200")
    assert "nv_inference_count" in ask(first + 1, "GET", "/metrics")
    assert {answer.partition("\r\n")[0] for answer in unkeyed} == {"HTTP/1.1 403 Forbidden"}
    assert {answer.partition("\r\n")[0] for answer in keyed} <= {"HTTP/1.1 403 Forbidden", "HTTP/1.1 400 Bad Request", ""}
    server.check()


async def test_controls_are_refused_without_the_key_and_done_with_it(
    server: EmbeddedTriton, own: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restricted = f"--grpc-restricted-protocol=model-repository,shared-memory:{HEADER}=0123456789abcdef"
    monkeypatch.setattr("app.embedded.server.command", lambda *given: [*command(*given), restricted])
    for name, key in (("right", "0123456789abcdef"), ("wrong", "0" * 16)):
        (tmp_path / name).write_text(key)
    server.start()
    for path in (None, tmp_path / "wrong", tmp_path / "right"):
        client = TritonClient(own.triton_address, path)
        for control in (client.ask("RepositoryModelLoad", 5, model_name=MODEL), client.list_models(), client.list_regions()):
            if path == tmp_path / "right":
                await control
            else:
                with pytest.raises(GatewayError, match="does not allow the gateway to do this") as caught:
                    await control
                assert not isinstance(caught.value, TritonUnavailable)
        assert await client.is_ready(MODEL)
        await client.close()
