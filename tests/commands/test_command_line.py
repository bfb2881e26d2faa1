"""The command line: flags become settings, failures become one line and an exit code, and servers are started in order."""

import os
import resource
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from app import feature, healthcheck
from app.__main__ import main
from app.api.caller import keys
from app.embedded import detect
from app.features.cache.networks import CLEARED
from app.host.program import CommandError
from app.server import Server
from app.settings.schema import PREFIX, Settings
from tests.commands.conftest import one_line
from tests.fakes import http
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import TABLE_VARIABLE, free_port

Refusal = Callable[[str, dict[str, Any]], str]
PUBLISHED = "yolo11n", "yolo11n_file", "yolox_nano", "efficientnet_lite0", "ocr", "embedding", "faces"
ALL = "0.0.0.0"  # noqa: S104 - nobody listens
DATABASE = "postgresql://nereid@db/nereid"
UNREADABLE = Mock(side_effect=PermissionError(13, "Permission denied", "models"))


def test_flags_precede_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    doctor, expected = Mock(return_value=3), feature.settings_kind()(model="typed", triton_endpoints="gpu:8001", triton_ports=5001)
    monkeypatch.setattr("app.doctor.report.run", doctor)
    monkeypatch.setenv("NEREID_MODEL", "variable")
    monkeypatch.setenv("NEREID_TRITON_PORTS", "5001")
    assert main(["doctor", "--model", "typed", "--triton", "gpu:8001", "--json"]) == 3
    doctor.assert_called_once_with(expected, as_json=True, is_strict=False)
    assert feature.read_settings() == expected


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Refusal]:
    """Run a command with settings or, if their name has a dot, patches; return its one line, with names of what varies."""
    here = tmp_path / ("y" * 40)
    (here / "models").mkdir(parents=True)
    (here / "keys.toml").write_text("[camera-1]", encoding="utf-8")
    (here / "tls").mkdir()
    (here / "tls" / "ca.crt").write_text("-----BEGIN CERTIFICATE-----", encoding="utf-8")
    (here / "file").touch()
    monkeypatch.chdir(here)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    for name in ("preparation.install", "preparation._pull_apart", "zoo.pull.pull", "embedded.server.EmbeddedTriton.start"):
        monkeypatch.setattr(f"app.{name}", lambda *_, **__: pytest.fail("the embedded Triton was touched"))
    free = {"PORT": free_port()}
    with socket.create_server(("127.0.0.1", 0)) as server, http.listening_on(Path("used.sock")):
        used = str(server.getsockname()[1])
        own = " ".join(f"{os.getpid()} ({' '.join(psutil.Process().cmdline())})".split())  # an argument may be empty

        def run(command: str, given: dict[str, Any]) -> str:
            for name, value in {"MODEL_REPOSITORY": "models", "TRITON_HOME": "home", **free, **given}.items():
                if "." in name:
                    monkeypatch.setattr(name, value)
                else:
                    monkeypatch.setenv(PREFIX + name, used if value == "USED" else str(value))
            assert main(shlex.split(command)) in {1, os.EX_NOINPUT}
            line = one_line(capsys).replace(str(here), "HERE").replace(own, "OWN")
            return line.replace(used, "USED").replace(str(free["PORT"]), "FREE")

        yield run


@pytest.mark.parametrize(
    ("commands", "given", "expected"),
    [
        ("settings", {"PROT": "80"}, "NEREID_PROT is not a setting; did you mean NEREID_PORT? `nereid settings` lists them all"),
        ("api --port 0", {}, "NEREID_PORT: ..."),
        ("api --workers 257", {}, "NEREID_WORKERS: ..."),
        ("pull yolo12n", {}, f"pull does not know yolo12n; it knows {', '.join(PUBLISHED)}"),
        ("pull ocr --sha256 0", {}, "--sha256 is for one model; ocr is ocr_detection, ocr_direction, ocr_recognition"),
        ("add file --mean 1", {}, "an option is not valid: ..."),
        ("use doors | remove doors:1", {}, "there is no model doors in models; it has none that was added"),
        ("serve | api", {"PORT": "USED"}, "port USED is in use by process OWN; end it, or choose another with --port"),
        ("serve | api", {"HOST": "203.0.113.1"}, "cannot listen on 203.0.113.1:FREE: ..."),
        ("api", {"SOCKET": "used.sock"}, "socket HERE/used.sock is in use..."),
        ("serve --instances 2", {"SOCKET": "file/run"}, "cannot create file/run for the instances' sockets: ..."),
        ("serve | triton", {"TRITON_PORTS": "USED"}, "Triton cannot listen on port USED: it is in use; choose others with ..."),
        ("serve | triton", {"app.preparation.loadable_models": UNREADABLE}, "NEREID_MODEL_REPOSITORY: models: Permission denied"),
        ("serve | api", {"API_KEYS_FILE": "keys.toml"}, "NEREID_API_KEYS_FILE: keys.toml: [camera-1]: expected sha256 (..."),
        ("serve --triton a:1 | api", {"TRITON_TLS_FOLDER": "tls"}, "NEREID_TRITON_TLS_FOLDER: tls/ca.crt is not a certificate ..."),
        (
            "serve | api | cache clear",
            {"CACHE": "redis://host/0", "app.host.extras._is_installed": lambda module: module != "redis"},
            "NEREID_CACHE needs what is not installed: redis; pip install 'nereid-gateway[redis]'",
        ),
        ("api", {"TRACING": True}, "NEREID_TRACING: OpenTelemetry does not accept its own settings, OTEL_*: ValueError..."),
        ("search --triton a:1", {"SEARCH_FOLDERS": "/nope", "DATABASE_URL": DATABASE}, "NEREID_SEARCH_FOLDERS: ..."),
        ("healthcheck", {}, "http://127.0.0.1:FREE does not answer"),
        ("cache clear", {"CACHE": "memory", "MODEL_REPOSITORY": "no"}, f"no/{CLEARED}: No such file or directory; a restart ..."),
    ],
)
def test_wrong_setting_or_argument_is_one_line(refusal: Refusal, commands: str, given: dict[str, Any], expected: str) -> None:
    """`...` stands for the rest of the line."""
    for command in commands.split(" | "):
        line = refusal(command, given)
        assert line.startswith(expected[:-3]) if expected.endswith("...") else line == expected


def test_no_failure_or_signal_leaves_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for effect, code, said in (
        (CommandError("out  of\n luck"), 1, "nereid: out of luck\n"),
        (lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM), 130, ""),
    ):
        monkeypatch.setattr("app.doctor.report.run", Mock(side_effect=effect))
        assert main(["doctor"]) == code
        assert capsys.readouterr() == ("", said)


Served = list[tuple[Server, bool, int]]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Collects the servers that would run, and what their workers would inherit."""
    seen: Served = []

    def serve(server: Server) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        seen.append((server, os.get_inheritable(int(os.environ[TABLE_VARIABLE])), hard - soft))

    monkeypatch.setattr(Server, "serve", serve)
    monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", "127.0.0.1:8001")
    return seen


def test_api_is_served_as_the_settings_say(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes only addresses; a stale socket is no obstacle, and host and port do not matter with it.

    Its workers inherit the table, and the limit of open files, which is then as high as it may be.
    """
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    port, path = free_port(), tmp_path / "api.sock"
    monkeypatch.setenv("NEREID_HOST", "localhost")
    assert main(["api", "--port", str(port), "--workers", "3"]) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.setenv("NEREID_SOCKET", str(path))
    monkeypatch.setenv("NEREID_HOST", "no-such-host.invalid")
    http.listening_on(path).close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["api", "--port", str(other.getsockname()[1])]) == 0
    assert not path.exists()
    (first, *inherited), (second, *_) = served
    assert first.bind_addr in {"127.0.0.1", "::1"}
    assert (first.bind_port, first.bind_uds, first.workers, second.bind_uds) == (port, None, 3, path)
    assert inherited == [True, 0]


@pytest.mark.usefixtures("served")
def test_open_api_that_others_can_reach_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys.toml").write_text(keys.create("camera-1")[1], encoding="utf-8")
    port = free_port()
    said = f"nereid: warning: no API key is needed at 0.0.0.0:{port}, which is not loopback; set NEREID_API_KEYS_FILE\n"
    for host, keys_file, warning in (("127.0.0.2", "", ""), (ALL, tmp_path / "keys.toml", ""), (ALL, "", said)):
        monkeypatch.setenv("NEREID_HOST", host)
        monkeypatch.setenv("NEREID_API_KEYS_FILE", str(keys_file))
        assert main(["api", "--port", str(port)]) == 0
        assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("line", "variables", "expected"),
    [
        ("serve", {}, {"search": "off", "port": 4603}),
        ("serve --search", {"SEARCH_FOLDERS": "/nope"}, {"search": "on", "port": 4603}),  # whoever detects does not wait for it
        ("search --port 4701", {"PORT": "4700"}, {"search": "alone", "port": 4701}),
        ("serve --instances 3 --workers 2", {"SOCKET": "run"}, {"instances": 3, "workers": 2}),
    ],
)
def test_serve_with_another_triton_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, variables: dict[str, str], expected: dict[str, object]
) -> None:
    supervise = Mock(return_value=7)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.preflight.require_address", lambda _: None)
    monkeypatch.setattr("app.__main__.supervise", supervise)
    for name, value in ({"PORT": "", "SEARCH": "", "DATABASE_URL": DATABASE} | variables).items():
        monkeypatch.setenv(PREFIX + name, value)
    assert main([*line.split(), "--triton", "127.0.0.1:8001"]) == 7
    settings, started, _ = supervise.call_args.args
    assert started is None
    assert {name: getattr(settings, name) for name in expected} == expected
    assert (tmp_path / "run").is_dir() is ("SOCKET" in variables)


@pytest.fixture
def triton(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Takes the place of the embedded Triton and of what is done around it, and ends by itself."""
    assert repository.is_dir()
    triton = Mock(log=Path("triton.log"), **{"poll.return_value": -11})
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: triton)
    for name, method in (
        ("preparation.install", "install"),
        ("preparation._pull_apart", "pull"),
        ("__main__.supervise", "supervise"),
    ):
        monkeypatch.setattr(f"app.{name}", getattr(triton, method))
    monkeypatch.setenv("NEREID_TRITON_HOME", "/h")
    return triton


def done(triton: Mock) -> list[str]:
    return [name for name, _, _ in triton.method_calls if name != "poll"]


def test_triton_alone_is_prepared_and_stopped(triton: Mock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triton"]) == 1
    assert done(triton) == ["claim", "install", "pull", "start", "stop"]
    triton.install.assert_called_once_with(Path("/h"), for_gpu=False)
    assert triton.pull.call_args.args[0].model == "yolo11n"
    ready, ended = capsys.readouterr().err.splitlines()
    assert f"gRPC at {Settings(triton_home='/h').triton_address}; " in ready
    assert "code -11" in ended
    triton.poll.side_effect = KeyboardInterrupt
    assert main(["triton"]) == 0


def test_model_of_a_default_route_is_pulled(triton: Mock, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "routes.toml").write_text('[detector]\nto = "yolo11n:2"\n', encoding="utf-8")
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(repository / "routes.toml"))
    monkeypatch.setenv("NEREID_MODEL", "detector")
    main(["triton"])
    assert [call.args[0].model for call in triton.pull.mock_calls] == ["yolo11n"]


def test_all_instances_must_live_and_answer_200(tmp_path: Path) -> None:
    """Whether or not they are ready; a crash leaves a socket behind that accepts nothing."""
    settings = Settings(instances=2, socket=str(tmp_path))
    first, second = settings.sockets
    assert second
    http.listening_on(second).close()
    with http.scripted(200, 200, 404, path=first) as server:
        assert healthcheck.failure(settings) == f"{second} does not answer"
        second.unlink()
        with http.scripted(path=second):
            assert healthcheck.failure(settings) == ""
        assert healthcheck.failure(settings) == f"{first} answers 404"
    assert server.asked[0].startswith(b"GET /livez ")


def test_detect_runs_nothing_from_a_folder_of_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton and its models are programs, which somebody may have put between the pictures."""
    (tmp_path / "model_repository").mkdir()
    (tmp_path / "a.jpg").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("NEREID_TRITON_HOME", "/triton")
    code = "import os; print(os.environ['NEREID_MODEL_REPOSITORY'], os.environ['NEREID_TRITON_HOME'])"
    monkeypatch.setattr("app.host.program.command", lambda *_: [sys.executable, "-c", code])

    with pytest.raises(CommandError, match="the gateway did not start: /data/nereid/model_repository /triton"):
        detect.run(Settings(), ["a.jpg"])


def test_interrupt_while_the_gateway_starts_ends_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    before = set(psutil.Process().children())
    monkeypatch.setattr("app.host.program.command", lambda *_: [sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr("app.host.http.get_status", Mock(side_effect=KeyboardInterrupt))

    assert detect.run(Settings(), [str(tmp_path)]) == 130
    assert set(psutil.Process().children()) == before
