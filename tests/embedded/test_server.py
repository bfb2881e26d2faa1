"""The Triton that comes along: started, stopped, and never left behind."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import onnx
import psutil
import pytest

from app import bundle
from app.config import Settings
from app.embedded import (
    EmbeddedError,
    Server,
    _first_inference,
    is_free,
    loadable,
)
from tests import layouts
from tests.conftest import ROOT, free_port

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SHM = Path("/dev/shm")  # noqa: S108 - where Triton puts its shared memory
MODEL = "six_columns"
STUB = "triton_python_backend_stub"


def test_a_port_is_free_until_someone_listens() -> None:
    """A listening socket takes the port, and gives it back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free("127.0.0.1", port)

    assert is_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["203.0.113.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    """Nobody can listen there, which is not the same as a port in use."""
    with pytest.raises(OSError, match=r"\w"):
        is_free(host, free_port())


def test_only_what_has_been_pulled_is_loaded(tmp_path: Path) -> None:
    """A model has a config, of either kind, and a numbered version with a file in it."""
    for path in (
        "both/config.pbtxt",
        "both/configs/embedded.pbtxt",
        "both/1/model.onnx",
        "production/config.pbtxt",
        "production/2/model.py",
        "embedded/configs/embedded.pbtxt",
        "embedded/10/model.onnx",
        "not_pulled/config.pbtxt",
        "no_config/1/model.onnx",
        "no_number/config.pbtxt",
        "no_number/latest/model.onnx",
        "no_folder",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "not_pulled" / "1").mkdir()

    assert loadable(tmp_path) == ["both", "embedded", "production"]
    assert loadable(tmp_path / "nowhere") == []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_until_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait for processes to end; one that nobody has collected yet has ended."""
    wait_for(lambda: all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes))


def test_a_child_ends_with_its_parent() -> None:
    """However the parent ends, what it started does not outlive it."""
    code = """
import subprocess, time
from app.embedded import die_with_parent
print(subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent).pid, flush=True)
time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()

    wait_until_gone([child])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Make a repository of one small model."""
    model, parameters = layouts.models()[MODEL]
    folder = tmp_path / "repository" / MODEL
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(layouts.config(MODEL, model, parameters), encoding="utf-8")
    return folder


@pytest.fixture
def own(tmp_path: Path, tiny: Path) -> Iterator[Settings]:
    """Give the test the installed server under a home and ports of its own; no shared memory may be left."""
    bundle.install(ROOT / ".triton")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("server", "python"):
        (home / name).symlink_to(ROOT / ".triton" / name)
    settings = Settings(
        model=MODEL,
        model_repository=str(tiny.parent),
        triton_home=str(home),
        triton_http_port=free_port(),
        triton_grpc_port=free_port(),
        triton_metrics_port=free_port(),
    )
    yield settings
    assert shared(settings) == []


@pytest.fixture
def stand_in(own: Settings) -> Settings:
    """Put a shell script, which the test writes, into the server's place."""
    server = Path(own.triton_home, "server")
    server.unlink()
    for folder in ("bin", "backends"):
        (server / "pytriton" / "tritonserver" / folder).mkdir(parents=True)
    return own


def script(settings: Settings, text: str) -> None:
    program = Path(settings.triton_home, "server", "pytriton", "tritonserver", "bin", "tritonserver")
    program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    program.chmod(0o755)


@pytest.fixture
def server(own: Settings) -> Iterator[Server]:
    server = Server(own)
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Demand of every test that none of its processes outlives it."""
    before = set(psutil.Process().children(recursive=True))
    yield
    wait_until_gone(set(psutil.Process().children(recursive=True)) - before)


def shared(settings: Settings) -> list[Path]:
    return list(SHM.glob(f"nereid_{settings.triton_grpc_port}_*"))


def parts() -> list[psutil.Process]:
    """The servers and stubs that this test started."""
    return [child for child in psutil.Process().children(recursive=True) if child.name().startswith("triton")]


@pytest.mark.parametrize("port", ["triton_http_port", "triton_grpc_port", "triton_metrics_port"])
def test_a_port_in_use_is_named(own: Settings, port: str) -> None:
    """Nothing is started, and the message says which setting to change."""
    server = Server(own)
    with socket.create_server(("127.0.0.1", getattr(own, port))), pytest.raises(EmbeddedError) as caught:
        server.start()

    assert f"port {getattr(own, port)} is in use" in str(caught.value)
    assert "NEREID_TRITON_*_PORT" in str(caught.value)
    assert not server.log.exists()


def test_it_starts_answers_and_stops(own: Settings, server: Server) -> None:
    """After the start it runs and has answered; after the stop nothing of it is left, and stopping again is no error."""
    before = set(parts())
    assert server.poll() is None
    server.start()
    started = set(parts()) - before
    memory = shared(own)
    code = server.poll()
    server.stop()
    server.stop()

    assert code is None
    assert len(started) >= 2
    assert memory
    wait_until_gone(started)
    assert shared(own) == []
    assert server.poll() is None
    assert "successfully loaded 'six_columns'" in server.log.read_text(encoding="utf-8")
    assert all(is_free("127.0.0.1", port) for port in (own.triton_http_port, own.triton_grpc_port, own.triton_metrics_port))


@pytest.mark.usefixtures("triton")
def test_it_listens_on_loopback_only(settings: Settings) -> None:
    """No port of it is open to the network."""
    listening = [
        connection.laddr
        for process in parts()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert {settings.triton_http_port, settings.triton_grpc_port, settings.triton_metrics_port} <= {port for _, port in listening}
    assert {address.removeprefix("::ffff:") for address, _ in listening} == {"127.0.0.1"}


def test_a_killed_server_leaves_nothing_once_it_is_stopped(own: Settings, server: Server) -> None:
    """Its end is seen with its code; its stubs and their shared memory go with it, and it can be started again."""
    before = set(parts())
    server.start()
    started = set(parts()) - before
    (main,) = [process for process in started if process.name() == "tritonserver"]
    main.kill()
    wait_for(lambda: server.poll() is not None)
    code, left = server.poll(), shared(own)
    server.stop()

    assert code == -signal.SIGKILL
    assert left
    assert shared(own) == []
    wait_until_gone(started)
    server.start()
    assert server.poll() is None


def test_a_killed_stub_leaves_nothing_once_it_is_stopped(own: Settings, server: Server) -> None:
    """The shared memory of a stub that could not give it back is swept at the end."""
    before = set(parts())
    server.start()
    stubs = [process for process in set(parts()) - before if process.name().startswith(STUB[:15])]
    for stub in stubs:
        stub.kill()
    wait_until_gone(stubs)
    left = shared(own)
    server.stop()

    assert stubs
    assert left
    assert shared(own) == []


def test_stale_files_of_other_ports_are_not_ours(stand_in: Settings) -> None:
    """Only what bears the server's own port number is swept before a start."""
    script(stand_in, "exit 3")
    port = stand_in.triton_grpc_port
    ours, other = SHM / f"nereid_{port}_stale", SHM / f"nereid_{port}0_stale"
    ours.touch()
    other.touch()
    try:
        with pytest.raises(EmbeddedError):
            Server(stand_in).start()
        assert not ours.exists()
        assert other.exists()
    finally:
        other.unlink()


@pytest.mark.parametrize(
    ("file", "data"),
    [
        pytest.param("1/model.onnx", b"no ONNX at all", id="model"),
        pytest.param("config.pbtxt", b'name: "six_columns" max_batch_size {', id="config"),
        pytest.param("config.pbtxt", b'name: "six_columns" backend: "tensorrt_plan"', id="backend"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_told(server: Server, tiny: Path, file: str, data: bytes) -> None:
    """The message names the model and the log, which has Triton's own words; the server is ended."""
    (tiny / file).write_bytes(data)

    with pytest.raises(EmbeddedError) as caught:
        server.start()
    assert MODEL in str(caught.value)
    assert str(server.log) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert server.log.stat().st_size > 0
    assert server.poll() is None


def test_a_default_model_that_is_not_there_is_told(server: Server, tiny: Path) -> None:
    """A Triton that has other models, or none, is not enough."""
    tiny.rename(tiny.with_name("other"))
    shutil.rmtree(tiny.with_name("other") / "1")

    with pytest.raises(EmbeddedError, match=f"{MODEL} could not be loaded; .*{server.log}"):
        server.start()


def test_a_server_that_ends_at_once_is_told(stand_in: Settings) -> None:
    """Its code and its log are named, and the log has what it said."""
    script(stand_in, "echo out of luck; exit 3")
    server = Server(stand_in)

    with pytest.raises(EmbeddedError, match=f"ended with code 3 while it started; its log is {server.log}"):
        server.start()
    assert server.log.read_text(encoding="utf-8") == "out of luck\n"


def test_a_server_that_cannot_be_run_is_told(stand_in: Settings) -> None:
    """A program of another machine's kind is an error of ours."""
    program = Path(stand_in.triton_home, "server", "pytriton", "tritonserver", "bin", "tritonserver")
    program.write_bytes(b"\x7fELF for another machine")
    program.chmod(0o755)

    with pytest.raises(EmbeddedError):
        Server(stand_in).start()


def test_a_server_that_never_gets_ready_is_ended_by_force(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end, and neither it nor what it started may ignore the stop."""
    monkeypatch.setattr("app.embedded._READY_SECONDS", 1.0)
    monkeypatch.setattr("app.embedded._STOP_SECONDS", 0.2)
    script(stand_in, "trap '' TERM; sleep 60 & sleep 60")
    server = Server(stand_in)

    with pytest.raises(EmbeddedError, match=f"was not ready after 1 s; .*{server.log}"):
        server.start()
    assert server.poll() is None


def test_an_interrupted_start_is_undone(stand_in: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while Triton starts ends it."""

    def interrupt(_: Server) -> None:
        raise KeyboardInterrupt

    script(stand_in, "exec sleep 60")
    monkeypatch.setattr(Server, "_wait", interrupt)
    server = Server(stand_in)

    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.poll() is None


def test_the_server_gets_its_libraries_its_python_and_its_models(stand_in: Settings) -> None:
    """Its own folders come first in the environment, and only what has been pulled is loaded."""
    script(stand_in, 'echo "$LD_LIBRARY_PATH"; echo "$PATH"; echo "$@"; exit 3')
    (Path(stand_in.model_repository) / "not_pulled").mkdir()
    server = Server(stand_in)
    with pytest.raises(EmbeddedError):
        server.start()
    libraries, path, arguments = server.log.read_text(encoding="utf-8").splitlines()

    assert libraries.startswith(f"{stand_in.triton_home}/server/nvidia_pytriton.libs")
    assert path.startswith(f"{stand_in.triton_home}/python/bin:")
    assert f"--load-model={MODEL}" in arguments.split()
    assert "not_pulled" not in arguments
    assert f"--grpc-port={stand_in.triton_grpc_port}" in arguments.split()


class Asked(NamedTuple):
    """What the stand-in for Triton's HTTP endpoint was asked."""

    question: dict[str, Any]
    data: bytes


CONFIG = {
    "name": "tiny",
    "max_batch_size": 4,
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
    "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [300, 6]}],
}


@contextmanager
def triton_like(config: dict[str, Any], output_bytes: int, status: int = 200) -> Iterator[tuple[int, list[Asked]]]:
    """Answer like Triton's HTTP endpoint does, an output of so many bytes; its port and what it was asked."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps(config).encode(), b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            length = int(self.headers["Inference-Header-Content-Length"])
            asked.append(Asked(json.loads(body[:length]), body[length:]))
            output = {"name": "output0", "parameters": {"binary_data_size": output_bytes}}
            self.reply(status, json.dumps({"outputs": [output]}).encode(), bytes(output_bytes))

        def reply(self, code: int, header: bytes, data: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(header) + len(data)))
            self.send_header("Inference-Header-Content-Length", str(len(header)))
            self.end_headers()
            self.wfile.write(header + data)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield http.server_port, asked
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [("UINT8", [32, 48, 3], 1), ("FP32", [3, 32, 48], 4), ("FP16", [3, 32, 48], 2)],
)
def test_the_first_inference_is_a_blank_picture_of_the_models_kind(kind: str, dims: list[int], size: int) -> None:
    """Shape, type and number of bytes are those that the model's config asks for."""
    config = {**CONFIG, "input": [{"name": "image", "data_type": f"TYPE_{kind}", "dims": dims}]}
    with triton_like(config, 24) as (port, asked):
        _first_inference(port, "tiny")
    ((question, data),) = asked

    (tensor,) = question["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("image", kind, [1, *dims])
    assert tensor["parameters"]["binary_data_size"] == len(data) == 32 * 48 * 3 * size
    assert not any(data)


def test_an_empty_output_is_no_start() -> None:
    """A backend that lost its shared memory answers without an error; the missing tensor is named."""
    with triton_like(CONFIG, 0) as (port, _), pytest.raises(EmbeddedError, match="of tiny returned empty output0"):
        _first_inference(port, "tiny")


def test_a_failing_first_inference_is_no_start() -> None:
    """Triton's refusal is told with the model's name."""
    with triton_like(CONFIG, 24, status=500) as (port, _), pytest.raises(EmbeddedError, match="inference of tiny failed") as caught:
        _first_inference(port, "tiny")

    assert "500" in str(caught.value)


def test_a_model_of_no_known_layout_is_no_start() -> None:
    """A default model that the gateway cannot use is told at once, with its tensors."""
    config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512]}]}
    with triton_like(config, 24) as (port, asked), pytest.raises(EmbeddedError, match="features FP32"):
        _first_inference(port, "tiny")

    assert asked == []


def test_a_model_that_takes_files_is_not_asked() -> None:
    """What such a model makes of a blank picture says nothing."""
    parameters = {"square": {"string_value": "640"}}
    file = {"name": "file", "data_type": "TYPE_STRING", "dims": [1]}
    with triton_like({**CONFIG, "input": [file], "parameters": parameters}, 24) as (port, asked):
        _first_inference(port, "tiny")

    assert asked == []


def test_no_answer_is_no_start() -> None:
    """A server that is gone by then is told like one that fails."""
    with pytest.raises(EmbeddedError, match="inference of tiny failed"):
        _first_inference(free_port(), "tiny")
