"""The process of the embedded Triton: started, stopped, and never left behind."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import onnx
import psutil
import pytest

from app.embedded.install import install
from app.embedded.launch import loadable_models
from app.embedded.server import EmbeddedTriton, EmbeddedTritonError
from app.host.ports import find_free, is_free
from app.main import create_app
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena
from tests.embedded import attack
from tests.embedded.test_inference_check import CONFIG
from tests.fakes import models
from tests.processes import children, nothing_left_running, wait_for, wait_until_gone  # noqa: F401 - a fixture
from tests.support import ROOT, SCENE, finds, started, transport_in_use
from tests.support import json as json_of

SHM = Path("/dev/shm")  # noqa: S108 - where Triton puts its shared memory
MODEL = "six_columns"
STUB = "triton_python_backend_stub"
CONTROLS = "model-repository,shared-memory,trace,logging"
NOBODY = 65534
"""A user that owns nothing."""

Process = subprocess.Popen[bytes]


def test_only_pulled_models_are_loadable(tmp_path: Path) -> None:
    """A model has a config, of either kind, and a numbered version with a file in it; a config without any field is a no."""
    for path in (
        "both/config.pbtxt",
        "both/configs/embedded.pbtxt",
        "both/1/model.onnx",
        "production/config.pbtxt",
        "production/2/model.py",
        "embedded/configs/embedded.pbtxt",
        "embedded/10/model.onnx",
        "not_pulled/config.pbtxt",
        "not_embedded/config.pbtxt",
        "not_embedded/1/model.py",
        "no_config/1/model.onnx",
        "no_number/config.pbtxt",
        "no_number/latest/model.onnx",
        "no_folder",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('# of a test\nname: "m"', encoding="utf-8")
    (tmp_path / "not_pulled" / "1").mkdir()
    (tmp_path / "not_embedded" / "configs").mkdir()
    (tmp_path / "not_embedded" / "configs" / "embedded.pbtxt").write_text("# for another\n\n  # Triton\n", encoding="utf-8")

    assert loadable_models(tmp_path) == ["both", "embedded", "production"]
    assert loadable_models(tmp_path / "nowhere") == []


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
    """Give the test the installed server under a home and ports of its own; no shared memory may be left."""
    install(ROOT / ".triton")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("server", "python"):
        (home / name).symlink_to(ROOT / ".triton" / name)
    http, grpc, metrics = find_free(3)
    settings = Settings(
        model=MODEL,
        model_repository=str(tiny.parent),
        triton_home=str(home),
        triton_http_port=http,
        triton_grpc_port=grpc,
        triton_metrics_port=metrics,
    )
    yield settings
    assert shared(settings) == []


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
import json, os, signal, socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

plan = PLAN
def option(name):
    return next(argument for argument in sys.argv if name in argument).rpartition("=")[2]

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(plan["config"], plan["status"])
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.reply({"outputs": [{"name": "output0", "parameters": {"binary_data_size": plan["output_bytes"]}}]})
    def reply(self, content, status=200):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Inference-Header-Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *_):
        pass

print(plan["says"], flush=True)
with open("/dev/shm/" + option("shm-region-prefix-name") + "1", "w") as file:
    os.chmod(file.fileno(), 0o666)
is_child = os.fork() == 0
if is_child == plan["grpc_in_child"]:
    listening = socket.create_server(("127.0.0.1", int(option("--grpc-port"))))
if is_child:
    signal.pause()
HTTPServer(("127.0.0.1", int(option("--http-port"))), Handler).serve_forever()
"""


def imitate(stand_in: Settings, **otherwise: object) -> Settings:
    """Let the program behave like Triton, but for what a test wants otherwise."""
    usual = {"status": 200, "config": CONFIG, "output_bytes": 24, "says": "", "grpc_in_child": False}
    script(stand_in, IMITATION.replace("PLAN", repr(usual | otherwise)), f"{sys.executable} -IS")
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
    return list(SHM.glob(f"nereid_{settings.triton_grpc_port}_*"))


def parts() -> set[psutil.Process]:
    """Return the servers and stubs that this process has started."""
    return {child for child in children() if child.name().startswith("triton")}


@pytest.mark.parametrize("port", ["triton_http_port", "triton_grpc_port", "triton_metrics_port"])
def test_port_in_use_is_an_error(own: Settings, port: str) -> None:
    server = EmbeddedTriton(own)
    with socket.create_server(("127.0.0.1", getattr(own, port))), pytest.raises(EmbeddedTritonError) as caught:
        server.start()

    expected = f"port {getattr(own, port)} is in use; stop what uses it or choose another with NEREID_{port.upper()}"
    assert str(caught.value) == expected
    assert not server.log.exists()


@pytest.mark.system
def test_paths_may_have_any_characters(own: Settings, tmp_path: Path) -> None:
    """Triton's Python backend starts its processes with a shell command, which would not find them there; nothing is left."""
    folder = tmp_path / "with a space & (more)"
    folder.mkdir()
    home, repository = (Path(path).rename(folder / Path(path).name) for path in (own.triton_home, own.model_repository))
    server = EmbeddedTriton(msgspec.structs.replace(own, triton_home=str(home), model_repository=str(repository)))
    before = set(SHM.glob("nereid-links-*"))
    server.start()
    during = set(SHM.glob("nereid-links-*"))
    server.stop()

    assert len(during - before) == 1
    assert set(SHM.glob("nereid-links-*")) == before
    assert {path.name for path in home.iterdir()} == {"server", "python", server.log.name}


def test_server_starts_answers_and_stops(either: Settings, server: EmbeddedTriton) -> None:
    """After the start it has answered; after the stop nothing of it is left, and it may be stopped again."""
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
    assert all(is_free("127.0.0.1", port) for port in (either.triton_http_port, either.triton_grpc_port))


@pytest.mark.usefixtures("triton")
def test_server_listens_on_loopback_only(settings: Settings) -> None:
    listening = [
        connection.laddr
        for process in parts()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert {settings.triton_http_port, settings.triton_grpc_port, settings.triton_metrics_port} <= {port for _, port in listening}
    assert {address.removeprefix("::ffff:") for address, _ in listening} == {"127.0.0.1"}


def test_killed_server_leaves_nothing_once_it_is_stopped(either: Settings, server: EmbeddedTriton) -> None:
    """Its exit code tells of its end; its stubs and their shared memory are removed, and it can be started again."""
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
    """The shared memory of a stub that could not remove it is removed at the end."""
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


def test_leftovers_of_other_ports_are_kept(stand_in: Settings) -> None:
    """Only files with the server's own port number are removed before a start."""
    script(stand_in, "exit 3")
    port = stand_in.triton_grpc_port
    ours, other = SHM / f"nereid_{port}_stale", SHM / f"nereid_{port}0_stale"
    ours.touch()
    other.touch()
    try:
        with pytest.raises(EmbeddedTritonError):
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
    """The message names the model, the reason and the log, which has Triton's own messages; the server is ended."""
    (tiny / file).write_bytes(data)

    with pytest.raises(EmbeddedTritonError) as caught:
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
    imitate(stand_in, status=400, says=says)
    (tiny / "1").rename(tiny / version)
    server = EmbeddedTriton(stand_in)

    with pytest.raises(EmbeddedTritonError) as caught:
        server.start()
    reason = reason.format(repository=tiny.parent)
    assert str(caught.value) == f"{MODEL} could not be loaded: {reason}; Triton's log is {server.log}"
    assert server.poll() is None


def test_another_model_that_cannot_be_loaded_is_a_warning(
    stand_in: Settings, server: EmbeddedTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton works, and its log says why the model failed."""
    imitate(stand_in, says=SAYS.replace(MODEL, "other"))
    server.start()

    assert capsys.readouterr().err == "nereid: warning: other could not be loaded: Internal: out of luck\n"


@pytest.mark.system
async def test_other_models_that_cannot_be_loaded_are_a_warning(
    own: Settings, server: EmbeddedTriton, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each, with the reason; requests for them are 503, and the default model works."""
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
    assert {name: model["state"] for name, model in listed.items()} == {
        MODEL: "ready",
        "bad_config": "not_ready",
        "bad_model": "not_ready",
    }


def test_server_that_ends_at_once_is_an_error(stand_in: Settings) -> None:
    """The message has its exit code and its log, and the log has its output."""
    script(stand_in, "echo out of luck; echo really >&2; exit 3")
    server = EmbeddedTriton(stand_in)

    with pytest.raises(EmbeddedTritonError, match=f"exited with code 3 while it started; its log is {server.log}"):
        server.start()
    assert server.log.read_text(encoding="utf-8") == "out of luck\nreally\n"
    assert server.poll() is None


def test_log_of_the_last_start_is_kept(stand_in: Settings) -> None:
    server = EmbeddedTriton(stand_in)
    for text in ("first", "second", "third"):
        script(stand_in, f"echo {text}; exit 3")
        with pytest.raises(EmbeddedTritonError):
            server.start()

    assert server.log.read_text(encoding="utf-8") == "third\n"
    assert server.log.with_name(f"{server.log.name}.1").read_text(encoding="utf-8") == "second\n"


def test_server_that_cannot_be_run_is_an_error(stand_in: Settings) -> None:
    program_of(stand_in).write_bytes(b"\x7fELF for another machine")
    program_of(stand_in).chmod(0o755)

    with pytest.raises(EmbeddedTritonError, match="Triton cannot be run here"):
        EmbeddedTriton(stand_in).start()
    assert not list(Path(stand_in.triton_home).glob("links-*"))  # it was given them already


def test_server_that_never_becomes_ready_is_killed(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for endlessly, and neither it nor what it started can ignore the stop."""
    monkeypatch.setattr("app.embedded.server._READY_SECONDS", 0.5)
    monkeypatch.setattr("app.embedded.server._STOP_SECONDS", 0.1)
    script(stand_in, "trap '' TERM; sleep 60 & sleep 60")
    server = EmbeddedTriton(stand_in)

    with pytest.raises(EmbeddedTritonError, match=rf"was not ready after \d+ s; .*{server.log}"):
        server.start()
    assert server.poll() is None


def test_interrupted_start_ends_the_server(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []

    def interrupt(_: str, process: Process, __: float) -> int:
        seen.append(process.poll())
        raise KeyboardInterrupt

    script(stand_in, "exec sleep 60")
    monkeypatch.setattr("app.embedded.server.wait_for_answer", interrupt)
    server = EmbeddedTriton(stand_in)

    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert seen == [None]
    assert server.poll() is None


def test_failed_check_after_the_start_ends_the_server(stand_in: Settings) -> None:
    """A server that is ready but whose model does not answer as it must is not a success."""
    server = EmbeddedTriton(imitate(stand_in, output_bytes=0))

    with pytest.raises(EmbeddedTritonError, match=f"the inference of {MODEL} returned empty output0"):
        server.start()
    assert server.poll() is None
    assert not key_file(stand_in).exists()


def test_server_gets_its_libraries_its_python_and_its_models(stand_in: Settings) -> None:
    """Its own folders come first in the environment, and only models that have been pulled are loaded."""
    show_models = 'for argument; do case $argument in --model-repository=*) ls "${argument#*=}";; esac; done'
    script(stand_in, f'echo "$LD_LIBRARY_PATH"; echo "$PATH"; {show_models}; printf "%s|" "$@"; exit 3')
    (Path(stand_in.model_repository) / "not_pulled").mkdir()
    server = EmbeddedTriton(stand_in)
    with pytest.raises(EmbeddedTritonError):
        server.start()
    libraries, path, found, text = server.log.read_text(encoding="utf-8").split("\n", maxsplit=3)
    arguments = text.split("|")

    folder = f"{stand_in.triton_home}/links-{stand_in.triton_grpc_port}"
    assert libraries.startswith(f"{folder}/server/nvidia_pytriton.libs")
    assert path.startswith(f"{folder}/python/bin:")
    assert found == MODEL
    assert "--model-control-mode=none" in arguments
    assert f"--grpc-port={stand_in.triton_grpc_port}" in arguments


def test_server_gets_the_backend_of_this_version(stand_in: Settings) -> None:
    """The backend and the modules that it imports are copied at each start, so that older ones are not used any more."""
    backend = program_of(stand_in).parents[1] / "backends" / "onnxruntime"
    own = {"model.py": "embedded/onnx_model.py", "app/imaging/decode.py": "imaging/decode.py", "app/errors.py": "errors.py"}
    script(stand_in, "exit 3")
    for _ in range(2):
        with pytest.raises(EmbeddedTritonError):
            EmbeddedTriton(stand_in).start()
        for name, source in own.items():
            assert (backend / name).read_bytes() == (ROOT / "app" / source).read_bytes()
            (backend / name).write_text("old", encoding="utf-8")


def test_backend_has_all_modules_that_it_imports(stand_in: Settings) -> None:
    """Nothing of the application is needed besides what is copied; Triton's own module is not needed for that."""
    backend = program_of(stand_in).parents[1] / "backends" / "onnxruntime"
    script(stand_in, "exit 3")
    with pytest.raises(EmbeddedTritonError):
        EmbeddedTriton(stand_in).start()
    (backend / "triton_python_backend_utils.py").touch()
    program = "import model, app; from app.embedded import file_input; print(app.__file__, model.TritonPythonModel)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=backend, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )

    assert ran.stdout.startswith(str(backend / "app")), ran.stderr


def key_file(settings: Settings) -> Path:
    path = settings.control_key_path
    assert path is not None
    return path


def test_each_server_has_a_key_that_only_this_user_can_read(either: Settings, server: EmbeddedTriton) -> None:
    """Another one at each start; what Triton and its models have in shared memory is not for others, either."""
    path = key_file(either)
    seen = []
    for _ in range(2):
        server.start()
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o600, os.getuid())
        assert {stat.S_IMODE(file.stat().st_mode) for file in shared(either)} == {0o600}
        seen.append(path.read_text(encoding="ascii"))
        server.stop()

    assert all(re.fullmatch("[0-9a-f]{64}", key) for key in seen)
    assert seen[0] != seen[1]


def test_several_servers_can_share_a_key(imitation: Settings) -> None:
    server = EmbeddedTriton(imitation, "shared")
    for _ in range(2):
        server.start()
        assert key_file(imitation).read_text(encoding="ascii") == "shared"
        server.stop()


def test_no_key_is_known_before_the_server_is_ready(stand_in: Settings) -> None:
    """Else the gateway would tell it to whoever listens on the port meanwhile."""
    script(stand_in, "exit 3")
    key_file(stand_in).write_text("old", encoding="ascii")
    with pytest.raises(EmbeddedTritonError):
        EmbeddedTriton(stand_in).start()

    assert not key_file(stand_in).exists()


def test_no_key_is_known_while_somebody_else_has_the_port(stand_in: Settings) -> None:
    """The server is ready then, but not where the gateway would look for it."""
    imitate(stand_in, grpc_in_child=True)
    with pytest.raises(EmbeddedTritonError, match=f"another program listens on port {stand_in.triton_grpc_port}"):
        EmbeddedTriton(stand_in).start()

    assert not key_file(stand_in).exists()


@pytest.mark.parametrize("kind", ["old", "readable", "link"])
def test_a_key_file_that_is_there_already_is_replaced(
    imitation: Settings, server: EmbeddedTriton, tmp_path: Path, kind: str
) -> None:
    """Nobody who could read the old one can read the new one, and where a link points, nothing is written."""
    path, other = key_file(imitation), tmp_path / "other"
    for file in (path, other):
        file.write_text("old", encoding="ascii")
    if kind == "readable":
        path.chmod(0o666)
    if kind == "link":
        path.unlink()
        path.symlink_to(other)
    with path.open(encoding="ascii") as before:
        server.start()
        assert before.read() == "old"

    assert not path.is_symlink()
    assert (stat.S_IMODE(path.stat().st_mode), len(path.read_text(encoding="ascii"))) == (0o600, 64)
    assert other.read_text(encoding="ascii") == "old"


def test_without_room_for_log_and_key_there_is_a_warning(
    imitation: Settings, server: EmbeddedTriton, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is named, once; the key follows as soon as it can be written."""
    log, key = server.log.with_suffix(".log.1"), key_file(imitation).with_suffix(".new")
    server.log.touch()
    for file in (log, key):
        (file / "in the way").mkdir(parents=True)
    server.start()
    server.check()
    log_warning, key_warning = capsys.readouterr().err.splitlines()

    assert log_warning.startswith(f"nereid: warning: {server.log} cannot be written: ")
    assert key_warning.startswith(f"nereid: warning: {key_file(imitation)} cannot be written: ")
    shutil.rmtree(key)
    server.check()
    assert key_file(imitation).exists()


def test_links_with_the_name_of_a_file_of_triton_are_left_alone(
    imitation: Settings, server: EmbeddedTriton, tmp_path: Path
) -> None:
    """Any user can make one, to anything."""
    (folder := tmp_path / "folder").mkdir(mode=0o755)
    links = {SHM / f"nereid_{imitation.triton_grpc_port}_{target.name}": target for target in (folder, tmp_path / "nowhere")}
    for link, target in links.items():
        link.symlink_to(target)
    try:
        server.start()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
        assert key_file(imitation).exists()
    finally:
        server.stop()
        for link in links:
            link.unlink()


@pytest.mark.parametrize("error", [PermissionError("ptrace is not permitted"), subprocess.SubprocessError("in preexec_fn")])
def test_without_a_private_argument_there_is_no_key(
    stand_in: Settings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: Exception
) -> None:
    """Nobody can use the controls then, and the one who starts the server is told what that costs."""

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("app.host.private_argument.start", refuse)
    script(stand_in, 'printf "%s|" "$@"; exit 3')
    key_file(stand_in).write_text("old", encoding="ascii")
    server = EmbeddedTriton(stand_in)
    with pytest.raises(EmbeddedTritonError, match="exited with code 3"):
        server.start()

    arguments = server.log.read_text(encoding="utf-8").split("|")
    assert f"--grpc-restricted-protocol={CONTROLS}:nereid=\n" in arguments
    assert f"--http-restricted-api={CONTROLS}:nereid=\n" in arguments
    assert not key_file(stand_in).exists()
    assert "shared memory with Triton is not available" in capfd.readouterr().err


@pytest.mark.system
async def test_without_a_key_images_travel_inline(own: Settings, server: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "ptrace is not permitted")

    monkeypatch.setattr("app.host.private_argument.start", refuse)
    server.start()
    async with started(create_app(msgspec.structs.replace(own, log_level="error"))) as client:
        assert await finds(client)
        assert await transport_in_use(client) == "inline"


def try_attack(
    settings: Settings, marker: Path, *, key: str = "", region: str = "none", users: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Let another process try everything that `attack` knows, as this user and then as others.

    Returns:
        For each user: what became of it, and the secrets that were found.
    """
    folder = os.open(settings.triton_home, os.O_RDONLY)
    plan = {
        "http_port": settings.triton_http_port,
        "grpc_port": settings.triton_grpc_port,
        "marker": str(marker),
        "victim": MODEL,
        "region": region,
        "key": key,
        "users": users,
        "folder": folder,
    }
    command = [sys.executable, "-m", "tests.embedded.attack"]
    try:
        answers = subprocess.run(
            command, cwd=ROOT, input=json.dumps(plan).encode(), stdout=subprocess.PIPE, pass_fds=[folder], check=True
        ).stdout
    finally:
        os.close(folder)
    return list(json.loads(answers))


def successes(answer: dict[str, Any]) -> dict[str, str]:
    """Count the attempts that were not refused."""
    outcomes = answer["outcomes"]
    assert len(outcomes) > 150
    return {name: outcome for name, outcome in outcomes.items() if outcome != attack.REFUSED}


async def test_nobody_without_the_key_controls_the_server(
    settings: Settings, triton: EmbeddedTriton, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    """No code is loaded, no model unloaded, no memory mapped or unmapped, over HTTP or gRPC; the gateway's images go on."""
    assert triton.poll() is None
    assert await finds(client)
    owner = TritonClient(settings.triton_address, settings.control_key_path)
    arena = Arena(4096)
    await owner.register(arena)
    states, regions = await owner.list_models(), await owner.list_regions()
    (answer,) = await asyncio.to_thread(try_attack, settings, tmp_path / "marker", region=arena.region)

    assert successes(answer) == {}
    assert not (tmp_path / "marker").exists()
    assert await owner.list_models() == states
    assert attack.MODEL not in states
    assert states[MODEL].is_ready
    left = await owner.list_regions()
    assert arena.region in left
    assert left.keys() <= regions.keys()  # the gateway itself may have given up what it has not used for long
    assert await finds(client)
    assert await transport_in_use(client) == "shm"
    await owner.unregister(arena.region)
    await owner.close()
    arena.close()


@pytest.mark.system
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
async def test_another_user_neither_finds_the_key_nor_controls_the_server(
    own: Settings, server: EmbeddedTriton, arenas: list[Arena], tmp_path: Path
) -> None:
    """He sees command lines, and files in /dev/shm and in Triton's folder, but neither the key nor the name of a region."""
    server.start()
    key = key_file(own).read_text(encoding="ascii")
    async with started(create_app(msgspec.structs.replace(own, log_level="error"))) as client:
        assert await finds(client)
        (arena,) = arenas
        answers = await asyncio.to_thread(try_attack, own, tmp_path / "marker", region=arena.region, users=[NOBODY])
        assert await finds(client)
        assert await transport_in_use(client) == "shm"

    found_by_root, found_by_nobody = (answer["secrets"] for answer in answers)
    assert not [secret for secret in found_by_nobody if key in secret or secret in arena.region]
    assert key in found_by_root
    assert [successes(answer) for answer in answers] == [{}, {}]
    assert not (tmp_path / "marker").exists()
    assert key not in server.log.read_text(encoding="utf-8")


@pytest.mark.system
def test_the_key_is_all_that_the_attack_needs(own: Settings, server: EmbeddedTriton, tmp_path: Path) -> None:
    """The refusals mean something: with the key, memory can be mapped, but not over HTTP, and nothing is loaded."""
    server.start()
    (answer,) = try_attack(own, tmp_path / "marker", key=key_file(own).read_text(encoding="ascii"))

    assert not (tmp_path / "marker").exists()
    outcomes = answer["outcomes"]
    assert {name for name, outcome in outcomes.items() if outcome == attack.REFUSED} >= {
        name for name in outcomes if not name.startswith("gRPC")
    }
    assert all("answered" in outcomes[name] for name in outcomes if name.startswith("gRPC") and "Status" in name)
