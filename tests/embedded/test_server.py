"""The process of the embedded Triton: started, checked, stopped, and never left behind."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton, check_inference
from app.embedded.service import CheckError
from app.host.program import CommandError
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.blocking_client import BlockingClient
from tests.embedded.conftest import MODEL, SHM, imitate, parts, program_of, script, shared
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.processes import nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT, free_port


@pytest.fixture(params=["imitation", pytest.param("own", marks=pytest.mark.system)])
def either(request: pytest.FixtureRequest) -> Settings:
    """Run the test with the imitation and with Triton itself."""
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
def test_server_that_fails_on_a_busy_machine_is_started_again_once(
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
    assert capsys.readouterr().err.count(f"{said}; starting it again\n") == 2


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


def test_server_gets_the_backend_of_this_version_with_all_that_it_imports(stand_in: Settings) -> None:
    """They are copied at each start, so that older ones are not used any more."""
    backend = program_of(stand_in).parents[1] / "backends" / "onnxruntime"
    script(stand_in, "exit 3")
    for _ in range(2):
        with pytest.raises(CommandError):
            EmbeddedTriton(stand_in).start()
        for name, source in (("model.py", "embedded/onnx_model.py"), ("app/imaging/decode.py", "imaging/decode.py")):
            assert (backend / name).read_bytes() == (ROOT / "app" / source).read_bytes()
            (backend / name).write_text("old", encoding="utf-8")
    with pytest.raises(CommandError):
        EmbeddedTriton(stand_in).start()
    (backend / "triton_python_backend_utils.py").touch()
    program = "import model, app; from app.embedded import file_input; print(app.__file__, model.TritonPythonModel)"
    command, env = [sys.executable, "-c", program], {"PATH": os.environ["PATH"]}
    ran = subprocess.run(command, cwd=backend, env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith(str(backend / "app")), ran.stderr


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
async def fake() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((1, 2, 6), np.float32))
    async with serving(fake):
        yield fake
        fake.may_answer.set()


async def check(fake: FakeTriton, seconds: float = 10) -> None:
    await asyncio.to_thread(check_inference, BlockingClient(fake.url), "tiny", seconds)


@pytest.mark.parametrize(
    ("status", "said", "reason", "is_final"),
    [
        ("INTERNAL", "out of luck\nsomewhere", "inference of tiny failed: out of luck$", False),
        # The next check might reach another process of the same model.
        ("INTERNAL", "message: Stub process 'tiny_0_0' is not healthy.", "of tiny has died", True),
        ("UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size", "", False),
    ],
)
async def test_failed_inference_fails_the_check_unless_the_model_is_busy(
    fake: FakeTriton, status: str, said: str, reason: str, *, is_final: bool
) -> None:
    fake.refusal = grpc.StatusCode[status], said
    if not reason:
        await check(fake)
        return
    with pytest.raises(CheckError, match=reason) as caught:
        await check(fake)
    assert caught.value.is_final is is_final


async def test_empty_output_or_a_model_without_an_adapter_fails_the_check(fake: FakeTriton) -> None:
    """A backend that lost its shared memory answers without an error; the message names the empty tensor."""
    fake.answer = infer_response(output0=np.zeros((1, 0, 6), np.float32))
    with pytest.raises(CheckError, match="of tiny returned empty output0"):
        await check(fake)
    fake.config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512, 20, 20]}]}
    with pytest.raises(CheckError, match="features FP32"):
        await check(fake)
    assert len(fake.requests) == 1


async def test_slow_inference_or_a_missing_server_fails_the_check(fake: FakeTriton) -> None:
    """This version of Triton crashes when an inference is cancelled, also by the end of its deadline, so it goes on."""
    fake.may_answer.clear()
    with pytest.raises(CheckError, match="inference of tiny failed: Triton did not answer in time"):
        await check(fake, 0.2)
    fake.may_answer.set()
    await check(fake)
    assert fake.cancelled == 0
    with pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(BlockingClient(f"127.0.0.1:{free_port()}"), "tiny", 10)
