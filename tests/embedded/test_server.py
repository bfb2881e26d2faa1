"""The process of the embedded Triton: started, checked, stopped, never left behind, and closed to other users of the machine."""

import asyncio
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil
import pytest

from app.embedded.launch import command, shm_prefix
from app.embedded.server import EmbeddedTriton, check_inference
from app.embedded.service import CheckError
from app.errors import GatewayError, TritonUnavailable
from app.host.program import CommandError
from app.main import create_app
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.blocking_client import BlockingClient
from app.triton.client import TritonClient
from app.triton.control_key import HEADER
from app.triton.shared_memory import Arena
from tests.embedded.conftest import MODEL, SHM, imitate, parts, program_of, script, shared
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.model.configs import FILE, SIX_COLUMNS, config, table
from tests.processes import nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.support import finds, free_port, started, transport_in_use


@pytest.fixture(params=["imitation", pytest.param("own", marks=pytest.mark.system)])
def either(request: pytest.FixtureRequest) -> Settings:
    settings: Settings = request.getfixturevalue(request.param)
    return settings


def test_server_starts_works_and_leaves_nothing_whether_it_is_stopped_or_killed(either: Settings, server: EmbeddedTriton) -> None:
    before = parts()
    assert (server.poll(), server.pid) == (None, 0)
    for kill in (None, psutil.Process.kill):
        server.start()
        started = parts() - before
        assert len(started) >= 2
        assert server.pid in {process.pid for process in started}
        if kill is not None:
            kill(psutil.Process(server.pid))
            wait_for(lambda: server.poll() is not None)
        assert server.poll() == (None if kill is None else -signal.SIGKILL)
        assert shared(either)
        server.stop()
        server.stop()
        wait_until_gone(started)
        assert shared(either) == []
        assert (server.poll(), server.pid) == (None, 0)
        assert list(either.triton_folder.glob("*")) == []  # or it is gone, because of another run of the tests


def test_killed_server_keeps_its_place_and_works_again_until_its_socket_is_gone(
    imitation: Settings, server: EmbeddedTriton
) -> None:
    """No other user can listen there meanwhile; without the socket, workers that start later could not connect."""
    server.start()
    server.kill()
    assert list(imitation.triton_folder.iterdir()) == []
    server.start()
    server.check()
    (imitation.triton_folder / TRITON_SOCKET).unlink()
    with pytest.raises(CheckError, match=f"does not listen on {imitation.triton_folder / TRITON_SOCKET}"):
        server.check()


def test_start_removes_only_its_own_leftovers(stand_in: Settings, tmp_path: Path) -> None:
    """Any user can make a link to anything."""
    script(stand_in, "exit 3")
    prefix = shm_prefix(stand_in)
    ours, other, link = SHM / f"{prefix}stale", SHM / f"{prefix[:-1]}0_stale", SHM / f"{prefix}folder"
    ours.touch()
    other.touch()
    (folder := tmp_path / "folder").mkdir(mode=0o755)
    link.symlink_to(folder)
    try:
        with pytest.raises(CommandError):
            EmbeddedTriton(stand_in).start()
        assert [path.exists() for path in (ours, other, link)] == [False, True, True]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    finally:
        other.unlink()
        link.unlink()


SAYS = "E1122 07:10:52.590124 29056 model_lifecycle.cc:642] \"failed to load 'six_columns' version 1: Internal: out of luck\""


@pytest.mark.parametrize(
    ("version", "says", "reason"), [("1", SAYS, "Internal: out of luck"), ("none", "", "it is not in {repository}")]
)
def test_missing_default_model_is_an_error(stand_in: Settings, tiny: Path, version: str, says: str, reason: str) -> None:
    imitate(stand_in, is_ready=False, says=says)
    (tiny / "1").rename(tiny / version)
    server = EmbeddedTriton(stand_in)
    reason = reason.format(repository=tiny.parent)
    with pytest.raises(CommandError, match=f"^{MODEL} could not be loaded: {reason}; Triton's log is {server.log}$"):
        server.start()
    assert server.poll() is None


def test_another_model_that_cannot_be_loaded_is_a_warning(
    stand_in: Settings, server: EmbeddedTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    (exported := Path(stand_in.model_repository, "exported")).mkdir()
    (exported / "best.onnx").touch()
    imitate(stand_in, says=SAYS.replace(MODEL, "other"))
    server.start()

    exported_warning, warning = capsys.readouterr().err.splitlines()
    assert exported_warning.startswith(f"nereid: warning: exported could not be loaded: {exported} has no config.pbtxt; ")
    assert warning == "nereid: warning: other could not be loaded: Internal: out of luck"


@pytest.mark.parametrize(
    ("is_silent", "said", "error"),
    [
        (False, "Triton has aborted while it started", "exited with code -6 while it started"),
        (True, f"a process of {MODEL} was silent while Triton started", f"{MODEL} could not be loaded: Internal: Stub process"),
    ],
    ids=["aborts", "silent"],
)
def test_server_that_fails_on_a_busy_machine_is_started_again(
    stand_in: Settings, capsys: pytest.CaptureFixture[str], *, is_silent: bool, said: str, error: str
) -> None:
    """A process of a model may give no sign of life for a second."""
    says = SAYS.replace("out of luck", f"Stub process '{MODEL}_0_0' is not healthy")
    program = program_of(imitate(stand_in, is_ready=False, says=says))
    silent, started = program.rename(program.with_name("silent")), program.with_name("started")
    working = program_of(imitate(stand_in)).rename(program.with_name("working"))
    fails = f'exec {silent} "$@"' if is_silent else "kill -ABRT $$"
    script(stand_in, f'[ -e {started} ] && exec {working} "$@"; touch {started}; {fails}')
    server = EmbeddedTriton(stand_in)
    server.start()
    server.stop()
    script(stand_in, fails)
    with pytest.raises(CommandError, match=error):
        server.start()
    assert capsys.readouterr().err.count(f"{said}; starting it again\n") == 1 + 3


def test_log_stays_short_while_the_server_runs(stand_in: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.embedded.log_file._MAX_BYTES", 1000)
    script(stand_in, f"head -c 2000 /dev/zero; until [ -e {tmp_path}/go ]; do sleep 0.05; done; echo after; exec sleep 60")
    server = EmbeddedTriton(stand_in)
    previous = server.log.with_name(f"{server.log.name}.1")
    try:
        server.spawn()
        wait_for(lambda: server.poll() is None and previous.is_file() and server.log.stat().st_size == 0)
        (tmp_path / "go").touch()
        wait_for(lambda: server.log.read_bytes() == b"after\n")
    finally:
        server.stop()
    assert previous.read_bytes() == bytes(2000)


def test_server_that_never_becomes_ready_is_killed(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.embedded.server._READY_SECONDS", 0.5)
    monkeypatch.setattr("app.embedded.server._STOP_SECONDS", 0.1)
    script(stand_in, "trap '' TERM; sleep 60 & sleep 60")
    server = EmbeddedTriton(stand_in)
    with pytest.raises(CommandError, match=rf"was not ready after \d+ s; .*{server.log}"):
        server.start()
    assert server.poll() is None


def test_shared_memory_is_private(either: Settings, server: EmbeddedTriton) -> None:
    """What Triton and its models have there is never for others: who opens it once can read it for ever."""
    modes: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            for file in shared(either):
                with suppress(FileNotFoundError):
                    modes.add(stat.S_IMODE(file.stat().st_mode))

    watching = threading.Thread(target=watch)
    watching.start()
    for _ in range(2):
        server.start()
        server.stop()
    is_over.set()
    watching.join()
    assert modes == {0o600}


@pytest.fixture
def fake(fake_triton: tuple[FakeTriton, TritonClient]) -> FakeTriton:
    return fake_triton[0].find_nothing()


async def check(fake: FakeTriton, seconds: float = 10) -> None:
    await asyncio.to_thread(check_inference, BlockingClient(fake.url), "tiny", seconds)


DIED = "message: Stub process 'tiny_0_0' is not healthy."
TAKES_FILES = config(SIX_COLUMNS, table(1, name="decoded", data_type="TYPE_INT32"), image=FILE, square="32")


@pytest.mark.parametrize(
    ("model", "status", "said", "reason"),
    [
        (CONFIG, "INTERNAL", "out of luck\nsomewhere", "inference of tiny failed: out of luck$"),
        # The next check might reach another process of the same model.
        (CONFIG, "INTERNAL", DIED, "of tiny has died"),
        (TAKES_FILES, "INTERNAL", DIED, "of tiny has died"),
        (CONFIG, "UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size", ""),
    ],
)
async def test_failed_inference_fails_the_check_unless_the_model_is_busy(
    fake: FakeTriton, model: dict[str, Any], status: str, said: str, reason: str
) -> None:
    fake.config = model
    fake.refusal = grpc.StatusCode[status], said
    if not reason:
        await check(fake)
        return
    with pytest.raises(CheckError, match=reason) as caught:
        await check(fake)
    assert caught.value.is_final is (said == DIED)


async def test_empty_output_or_a_model_without_an_adapter_fails_the_check(fake: FakeTriton) -> None:
    """A backend that lost its shared memory answers without an error; the message names the empty tensor."""
    fake.answer = infer_response(output0=np.zeros((1, 0, 6), np.float32))
    with pytest.raises(CheckError, match="of tiny returned empty output0"):
        await check(fake)
    fake.config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512, 20, 20]}]}
    with pytest.raises(CheckError, match="features FP32"):
        await check(fake)
    assert len(fake.requests) == 1


def tcp_listeners(server: EmbeddedTriton) -> list[tuple[str, int]]:
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
@pytest.mark.system
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


@pytest.mark.system
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


@pytest.mark.system
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
