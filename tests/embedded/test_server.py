"""The process of the embedded Triton: started, stopped, and never left behind."""

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import onnx
import psutil
import pytest

from app.embedded.folder import TritonFolder, runs_elsewhere
from app.embedded.install import install
from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton
from app.embedded.service import CheckError
from app.host.program import CommandError
from app.main import create_app
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.shared_memory import Arena
from tests.fakes import models
from tests.processes import children, nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT, SCENE, finds, free_port, started, transport_in_use, triton_home
from tests.support import json as json_of

SHM = Path("/dev/shm")  # noqa: S108 - where Triton puts its shared memory
MODEL = "six_columns"
STUB = "triton_python_backend_stub"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository with one small model; the value is the model's folder."""
    model, parameters = models.models()[MODEL]
    folder = tmp_path / "repository" / MODEL
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(models.config(MODEL, model, parameters), encoding="utf-8")
    return folder


@pytest.fixture
def own(tmp_path: Path, tiny: Path) -> Iterator[Settings]:
    """Give the test the installed server under a home of its own; nothing may be left in /dev/shm."""
    install(ROOT / ".triton")
    (tmp_path / "home").mkdir()
    settings = Settings(model=MODEL, model_repository=str(tiny.parent), triton_home=triton_home(tmp_path / "home"))
    yield settings
    assert shared(settings) == []
    assert not settings.triton_folder.exists() or list(settings.triton_folder.iterdir()) == []


@pytest.fixture
def stand_in(own: Settings) -> Settings:
    """Replace the server's program by one that the test writes."""
    server = Path(own.triton_home, "server")
    server.unlink()
    for folder in ("bin", "backends"):
        (server / "pytriton" / "tritonserver" / folder).mkdir(parents=True)
    return own


def program_of(settings: Settings) -> Path:
    return Path(settings.triton_home, "server", "pytriton", "tritonserver", "bin", "tritonserver")


def script(settings: Settings, text: str, interpreter: str = "/bin/sh") -> None:
    program_of(settings).write_text(f"#!{interpreter}\n{text}\n", encoding="utf-8")
    program_of(settings).chmod(0o755)


# Answers like Triton; with a file in shared memory, and a process beside it.
IMITATION = """
import asyncio, os, signal, sys
plan = PLAN
def option(name):
    return next(argument for argument in sys.argv if name in argument).rpartition("=")[2]

print(plan["says"], flush=True)
with open("/dev/shm/" + option("shm-region-prefix-name") + "1", "w") as file:
    os.chmod(file.fileno(), 0o666)
if os.fork() == 0:
    signal.pause()
sys.path.insert(0, ROOT)
import numpy
from tests.fakes.triton import FakeTriton, infer_response, serving

async def main():
    fake = FakeTriton()
    fake.is_model_ready = plan["is_ready"]
    fake.answer = infer_response(output0=numpy.zeros((1, plan["rows"], 6), numpy.float32))
    async with serving(fake, address=option("--grpc-address") + ":" + option("--grpc-port")):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def imitate(stand_in: Settings, **otherwise: object) -> Settings:
    """Let the program behave like Triton, but for what a test wants otherwise."""
    plan = {"is_ready": True, "rows": 2, "says": ""} | otherwise
    script(stand_in, IMITATION.replace("PLAN", repr(plan)).replace("ROOT", repr(str(ROOT))), f"{sys.executable} -I")
    return stand_in


@pytest.fixture
def imitation(stand_in: Settings) -> Settings:
    """Put a program that behaves like Triton into its place; it is there at once."""
    return imitate(stand_in)


@pytest.fixture(params=["imitation", pytest.param("own", marks=pytest.mark.system)])
def either(request: pytest.FixtureRequest) -> Settings:
    """Run the test with the imitation and with Triton itself."""
    settings: Settings = request.getfixturevalue(request.param)
    return settings


@pytest.fixture
def server(own: Settings) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(own)
    yield server
    server.stop()


def shared(settings: Settings) -> list[Path]:
    return list(SHM.glob(f"{shm_prefix(settings)}*"))


def parts() -> set[psutil.Process]:
    return {child for child in children() if child.name().startswith("triton")}


@pytest.mark.parametrize("place", [0, 1])
def test_port_in_use_is_an_error(own: Settings, place: int) -> None:
    first = free_port()
    server = EmbeddedTriton(msgspec.structs.replace(own, triton_ports=first))
    with socket.create_server(("127.0.0.1", first + place)), pytest.raises(CommandError) as caught:
        server.start()

    assert (
        str(caught.value) == f"Triton cannot listen on port {first + place}: it is in use; choose others with NEREID_TRITON_PORTS"
    )
    assert not server.log.exists()


@pytest.mark.system
def test_paths_may_have_any_characters(own: Settings, tmp_path: Path) -> None:
    """Triton's Python backend starts its processes with a shell command, which would not find them there; nothing is left."""
    folder = tmp_path / "with a space & (more)"
    folder.mkdir()
    home, repository = (Path(path).rename(folder / Path(path).name) for path in (own.triton_home, own.model_repository))
    server = EmbeddedTriton(msgspec.structs.replace(own, triton_home=str(home), model_repository=str(repository)))
    server.start()
    server.stop()

    assert {path.name for path in home.iterdir()} == {"server", "python", server.log.name}


def test_server_starts_answers_and_stops(either: Settings, server: EmbeddedTriton) -> None:
    before = parts()
    assert (server.poll(), server.pid) == (None, 0)
    server.start()
    started = parts() - before
    memory = shared(either)
    code, pid = server.poll(), server.pid
    server.stop()
    server.stop()

    assert code is None
    assert len(started) >= 2
    assert pid in {process.pid for process in started}
    assert memory
    wait_until_gone(started)
    assert shared(either) == []
    assert (server.poll(), server.pid) == (None, 0)
    assert list(either.triton_folder.glob("*")) == []  # or it is gone, because of another run of the tests


def tcp_listeners(server: EmbeddedTriton) -> list[tuple[str, int]]:
    """Return where the processes of a server listen on TCP."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    connections = [connection for process in processes for connection in process.net_connections(kind="inet")]
    return [tuple(connection.laddr) for connection in connections if connection.status == psutil.CONN_LISTEN]


def test_killed_server_leaves_nothing_once_it_is_stopped(either: Settings, server: EmbeddedTriton) -> None:
    before = parts()
    server.start()
    started = parts() - before
    psutil.Process(server.pid).kill()
    wait_for(lambda: server.poll() is not None)
    code, left = server.poll(), shared(either)
    server.stop()

    assert code == -signal.SIGKILL
    assert left
    assert shared(either) == []
    wait_until_gone(started)
    server.start()
    assert server.poll() is None


@pytest.mark.system
def test_killed_stub_leaves_nothing_once_the_server_is_stopped(own: Settings, server: EmbeddedTriton) -> None:
    before = parts()
    server.start()
    stubs = [process for process in parts() - before if process.name().startswith(STUB[:15])]
    for stub in stubs:
        stub.kill()
    wait_until_gone(stubs)
    left = shared(own)
    server.stop()

    assert stubs
    assert left
    assert shared(own) == []


def test_leftovers_of_other_servers_are_kept(stand_in: Settings) -> None:
    script(stand_in, "exit 3")
    ours, other = SHM / f"{shm_prefix(stand_in)}stale", SHM / f"{shm_prefix(stand_in)[:-1]}0_stale"
    ours.touch()
    other.touch()
    try:
        with pytest.raises(CommandError):
            EmbeddedTriton(stand_in).start()
        assert not ours.exists()
        assert other.exists()
    finally:
        other.unlink()


@pytest.mark.system
@pytest.mark.parametrize(
    ("file", "data", "reason"),
    [
        pytest.param("1/model.onnx", b"not ONNX at all", "Internal: InvalidProtobuf: ", id="model"),
        pytest.param(
            "config.pbtxt", b'name: "six_columns" max_batch_size {', "failed to read text proto from {tiny}/config.", id="config"
        ),
        pytest.param(
            "config.pbtxt",
            b'name: "six_columns" backend: "no_such"',
            "Invalid argument: unable to find backend library",
            id="backend",
        ),
    ],
)
def test_model_that_cannot_be_loaded_is_an_error(server: EmbeddedTriton, tiny: Path, file: str, data: bytes, reason: str) -> None:
    (tiny / file).write_bytes(data)

    with pytest.raises(CommandError) as caught:
        server.start()
    assert str(caught.value).startswith(f"{MODEL} could not be loaded: {reason.format(tiny=tiny)}")
    assert str(caught.value).endswith(f"; Triton's log is {server.log}")
    assert "\n" not in str(caught.value)
    assert server.log.stat().st_size > 0
    assert server.poll() is None


SAYS = "E1122 07:10:52.590124 29056 model_lifecycle.cc:642] \"failed to load 'six_columns' version 1: Internal: out of luck\""


@pytest.mark.parametrize(
    ("version", "says", "reason"),
    [("1", SAYS, "Internal: out of luck"), ("1", "", "Triton does not tell why"), ("none", "", "it is not in {repository}")],
)
def test_missing_default_model_is_an_error(stand_in: Settings, tiny: Path, version: str, says: str, reason: str) -> None:
    imitate(stand_in, is_ready=False, says=says)
    (tiny / "1").rename(tiny / version)
    server = EmbeddedTriton(stand_in)

    with pytest.raises(CommandError) as caught:
        server.start()
    reason = reason.format(repository=tiny.parent)
    assert str(caught.value) == f"{MODEL} could not be loaded: {reason}; Triton's log is {server.log}"
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


@pytest.mark.system
async def test_other_models_that_cannot_be_loaded_are_a_warning(
    own: Settings, server: EmbeddedTriton, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file, data in (("bad_model", "1/model.onnx", b"not ONNX"), ("bad_config", "config.pbtxt", b'name: "bad_config" {')):
        shutil.copytree(tiny, tiny.with_name(name))
        config = (tiny / "config.pbtxt").read_text(encoding="utf-8").replace(MODEL, name)
        (tiny.with_name(name) / "config.pbtxt").write_text(config, encoding="utf-8")
        (tiny.with_name(name) / file).write_bytes(data)
    server.start()
    first, second = sorted(capsys.readouterr().err.splitlines())
    async with started(create_app(msgspec.structs.replace(own, log_level="error"))) as client:
        assert await finds(client)
        answers = {name: await client.post(f"/predict/{name}", content=SCENE) for name in ("bad_model", "bad_config", "nothing")}
        listed = {model["name"]: model for model in json_of(await client.get("/models"))["models"]}

    expected = "nereid: warning: bad_config could not be loaded: failed to read text proto from "
    assert first.startswith(f"{expected}{tiny.parent}/bad_config/config.pbtxt (")
    assert second.startswith("nereid: warning: bad_model could not be loaded: Internal: InvalidProtobuf: ")
    assert {name: (answer.status_code, answer.json()["code"]) for name, answer in answers.items()} == {
        "bad_model": (503, "model_not_ready"),
        "bad_config": (503, "model_not_ready"),
        "nothing": (404, "unknown_model"),
    }
    assert {name: model["state"] for name, model in listed.items() if model["state"] != "not_pulled"} == {
        MODEL: "ready",
        "bad_config": "invalid",
        "bad_model": "not_ready",
    }


def test_server_that_ends_at_once_is_an_error(stand_in: Settings) -> None:
    script(stand_in, "echo out of luck; echo really >&2; exit 3")
    server = EmbeddedTriton(stand_in)

    with pytest.raises(CommandError, match=f"exited with code 3 while it started; its log is {server.log}"):
        server.start()
    assert server.log.read_text(encoding="utf-8") == "out of luck\nreally\n"
    assert server.poll() is None


def test_server_that_aborts_is_started_again_once(imitation: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    program = program_of(imitation)
    working, aborted = program.rename(program.with_name("working")), program.with_name("aborted")
    script(imitation, f'[ -e {aborted} ] && exec {working} "$@"; touch {aborted}; kill -ABRT $$')
    server = EmbeddedTriton(imitation)
    server.start()
    server.stop()
    script(imitation, "kill -ABRT $$")
    with pytest.raises(CommandError, match="exited with code -6 while it started"):
        server.start()

    assert capsys.readouterr().err.count("Triton has aborted while it started; starting it again\n") == 2


def test_server_whose_process_of_a_model_was_silent_is_started_again_once(
    stand_in: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, a process of a model may give no sign of life for a second."""
    says = SAYS.replace("out of luck", "Stub process 'six_columns_0_0' is not healthy")
    program = program_of(imitate(stand_in, is_ready=False, says=says))
    silent, started = program.rename(program.with_name("silent")), program.with_name("started")
    working = program_of(imitate(stand_in)).rename(program.with_name("working"))
    script(stand_in, f'[ -e {started} ] && exec {working} "$@"; touch {started}; exec {silent} "$@"')
    server = EmbeddedTriton(stand_in)
    server.start()
    server.stop()
    script(stand_in, f'exec {silent} "$@"')
    with pytest.raises(CommandError, match="six_columns could not be loaded: Internal: Stub process"):
        server.start()

    assert capsys.readouterr().err.count("a process of six_columns was silent while Triton started; starting it again\n") == 2


def test_log_of_the_last_start_is_kept(stand_in: Settings) -> None:
    server = EmbeddedTriton(stand_in)
    for text in ("first", "second", "third"):
        script(stand_in, f"echo {text}; exit 3")
        with pytest.raises(CommandError):
            server.start()

    assert server.log.read_text(encoding="utf-8") == "third\n"
    assert server.log.with_name(f"{server.log.name}.1").read_text(encoding="utf-8") == "second\n"


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


@pytest.mark.system
def test_full_disk_of_the_log_does_not_stop_the_server(server: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("ab") as full:
        monkeypatch.setattr("app.embedded.log_file.LogFile.open", lambda _: full)
        server.start()
    server.check()

    assert server.poll() is None


@pytest.mark.parametrize("begin", [EmbeddedTriton.spawn, EmbeddedTriton.start])
def test_server_that_cannot_be_run_is_an_error(stand_in: Settings, begin: Callable[[EmbeddedTriton], None]) -> None:
    program_of(stand_in).write_bytes(b"\x7fELF for another machine")
    program_of(stand_in).chmod(0o755)
    server = EmbeddedTriton(stand_in)

    with pytest.raises(CommandError, match="Triton cannot be run here"):
        begin(server)
    assert not runs_elsewhere(TritonFolder(stand_in))
    server.claim()
    with pytest.raises(CommandError, match="Triton cannot be run here"):
        server.spawn()  # again, by its supervisor
    assert runs_elsewhere(TritonFolder(stand_in))
    server.stop()


def test_server_that_never_becomes_ready_is_killed(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.embedded.server._READY_SECONDS", 0.5)
    monkeypatch.setattr("app.embedded.server._STOP_SECONDS", 0.1)
    script(stand_in, "trap '' TERM; sleep 60 & sleep 60")
    server = EmbeddedTriton(stand_in)

    with pytest.raises(CommandError, match=rf"was not ready after \d+ s; .*{server.log}"):
        server.start()
    assert server.poll() is None


def test_interrupted_start_ends_the_server(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def interrupt(*_: object) -> bool:
        seen.append(triton.poll())
        raise KeyboardInterrupt

    script(stand_in, "exec sleep 60")
    monkeypatch.setattr("app.triton.blocking_client.BlockingClient.is_ready", interrupt)
    triton = EmbeddedTriton(stand_in)

    with pytest.raises(KeyboardInterrupt):
        triton.start()
    assert seen == [None]
    assert triton.poll() is None


def test_failed_check_after_the_start_ends_the_server(stand_in: Settings) -> None:
    server = EmbeddedTriton(imitate(stand_in, rows=0))

    with pytest.raises(CommandError, match=f"the inference of {MODEL} returned empty output0"):
        server.start()
    assert server.poll() is None


@pytest.mark.parametrize("has_ports", [False, True])
def test_server_gets_its_libraries_its_python_and_its_models(stand_in: Settings, *, has_ports: bool) -> None:
    show_models = 'for argument; do case $argument in --model-repository=*) ls "${argument#*=}";; esac; done'
    script(stand_in, f'echo "$LD_LIBRARY_PATH"; echo "$PATH"; {show_models}; printf "%s|" "$@"; exit 3')
    (Path(stand_in.model_repository) / "not_pulled").mkdir()
    server = EmbeddedTriton(msgspec.structs.replace(stand_in, triton_ports=has_ports and free_port()))
    with pytest.raises(CommandError):
        server.start()
    libraries, path, found, text = server.log.read_text(encoding="utf-8").split("\n", maxsplit=3)
    arguments = text.split("|")

    folder = stand_in.triton_folder
    assert libraries.startswith(f"{folder}/server/nvidia_pytriton.libs")
    assert path.startswith(f"{folder}/python/bin:")
    assert found == MODEL
    assert ("--model-control-mode=explicit" in arguments) is ("--load-model=*" in arguments) is not has_ports
    assert ("--model-control-mode=none" in arguments) is has_ports


def test_only_default_models_are_loaded_if_the_others_are_on_demand(stand_in: Settings) -> None:
    script(stand_in, 'printf "%s|" "$@"; exit 3')
    loaded = []
    for model in (MODEL, "absent"):
        server = EmbeddedTriton(
            msgspec.structs.replace(stand_in, loaded_models=2, model=model, task_models=f"classification={MODEL}")
        )
        with pytest.raises(CommandError):
            server.start()
        arguments = server.log.read_text(encoding="utf-8").split("|")
        loaded.append([argument for argument in arguments if "load-model" in argument])

    assert loaded == [[f"--load-model={MODEL}"]] * 2


def test_server_gets_the_backend_of_this_version(stand_in: Settings) -> None:
    """The backend and the modules that it imports are copied at each start, so that older ones are not used any more."""
    backend = program_of(stand_in).parents[1] / "backends" / "onnxruntime"
    own = {"model.py": "embedded/onnx_model.py", "app/imaging/decode.py": "imaging/decode.py", "app/errors.py": "errors.py"}
    script(stand_in, "exit 3")
    for _ in range(2):
        with pytest.raises(CommandError):
            EmbeddedTriton(stand_in).start()
        for name, source in own.items():
            assert (backend / name).read_bytes() == (ROOT / "app" / source).read_bytes()
            (backend / name).write_text("old", encoding="utf-8")


def test_backend_has_all_modules_that_it_imports(stand_in: Settings) -> None:
    backend = program_of(stand_in).parents[1] / "backends" / "onnxruntime"
    script(stand_in, "exit 3")
    with pytest.raises(CommandError):
        EmbeddedTriton(stand_in).start()
    (backend / "triton_python_backend_utils.py").touch()
    program = "import model, app; from app.embedded import file_input; print(app.__file__, model.TritonPythonModel)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=backend, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )

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


def test_without_room_for_the_log_there_is_a_warning(
    imitation: Settings, server: EmbeddedTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imitation.triton_home
    server.log.touch()
    (server.log.with_suffix(".log.1") / "in the way").mkdir(parents=True)
    server.start()

    assert capsys.readouterr().err.startswith(f"nereid: warning: {server.log} cannot be written: ")


def test_links_with_the_name_of_a_file_of_triton_are_left_alone(
    imitation: Settings, server: EmbeddedTriton, tmp_path: Path
) -> None:
    """Any user can make one, to anything."""
    (folder := tmp_path / "folder").mkdir(mode=0o755)
    links = {SHM / f"{shm_prefix(imitation)}{target.name}": target for target in (folder, tmp_path / "nowhere")}
    for link, target in links.items():
        link.symlink_to(target)
    try:
        server.start()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    finally:
        server.stop()
        for link in links:
            link.unlink()


def test_a_server_whose_socket_is_gone_does_not_work(imitation: Settings, server: EmbeddedTriton) -> None:
    """Workers that start later could not connect."""
    server.start()
    server.check()
    socket_file = imitation.triton_folder / TRITON_SOCKET
    socket_file.unlink()

    with pytest.raises(CheckError, match=f"does not listen on {socket_file}"):
        server.check()


def test_a_killed_server_keeps_its_place(imitation: Settings, server: EmbeddedTriton) -> None:
    """Until it is started again: no other user can listen there meanwhile."""
    server.start()
    server.kill()
    assert list(imitation.triton_folder.iterdir()) == []
    server.start()
    server.check()


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


@pytest.mark.system
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
    ("POST", "/v2/repository/models/intruder/load"),
    ("POST", f"/v2/repository/models/{MODEL}/unload"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/systemsharedmemory/region/intruder/register"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/unregister"),
    ("GET", "/v2/cudasharedmemory/status"),
    ("POST", "/v2/cudasharedmemory/unregister"),
    ("POST", "/v2/trace/setting"),
    ("POST", f"/v2/models/{MODEL}/trace/setting"),
    ("POST", "/v2/logging"),
)
VALUES = (b"", b" \r\n ", b" \n", b"\r\n\t", b" \r\n \n", b" %0A", b" \\n", b" 0")
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
