"""The command line: flags become settings, failures become one line and an exit code, and servers are started in order."""

import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from app.__main__ import main
from app.api.caller import keys
from app.host.processes import SUPERVISED
from app.host.program import CommandError
from app.server import Server
from app.settings import environment, table
from app.settings.schema import PREFIX, Settings, SettingsError
from app.triton.repository import CLEARED
from tests.fakes import http
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import ROOT, TABLE_VARIABLE, free_port
from tests.test_model_commands import one_line, repository, restored_process  # noqa: F401 - fixtures

Refusal = Callable[[str, dict[str, Any]], str]
PUBLISHED = "yolo11n", "yolo11n_file", "yolox_nano", "efficientnet_lite0", "ocr", "embedding", "faces"
ALL = "0.0.0.0"  # noqa: S104 - nobody listens
DATABASE = "postgresql://nereid@db/nereid"


def unreadable(*_: object) -> NoReturn:
    raise PermissionError(13, "Permission denied", "models")


Doctor = list[tuple[Settings, dict[str, bool]]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Collects what the doctor is asked to report."""
    seen: Doctor = []

    def run(settings: Settings, **options: bool) -> int:
        seen.append((settings, options))
        return 3

    monkeypatch.setattr("app.doctor.report.run", run)
    return seen


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("", {}, Settings()),
        ("--model yolox_nano --triton gpu:8001", {}, Settings(model="yolox_nano", triton_endpoints="gpu:8001")),
        ("--model typed --json", {"MODEL": "variable", "TRITON_PORTS": "5001"}, Settings(model="typed", triton_ports=5001)),
        ("--strict", {}, Settings()),
    ],
)
def test_flags_precede_variables(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, flags: str, variables: dict[str, str], expected: Settings
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)
    assert main(["doctor", *flags.split()]) == 3
    assert doctor == [(expected, {"as_json": "--json" in flags, "is_strict": "--strict" in flags})]
    assert environment.load() == expected


@pytest.mark.parametrize("line", ["", "doctor --port 80", "api --instances 2", "triton --triton a:1", "add", "models doors"])
def test_wrong_command_line_is_a_usage_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: nereid")


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
    for name in ("__main__.install", "__main__._pull_apart", "zoo.pull.pull", "embedded.server.EmbeddedTriton.start"):
        monkeypatch.setattr(f"app.{name}", lambda *_, **__: pytest.fail("the embedded Triton was touched"))
    free = {"PORT": free_port()}
    with socket.create_server(("127.0.0.1", 0)) as server, http.listening_on(Path("used.sock")):
        used = str(server.getsockname()[1])
        own = f"{os.getpid()} ({' '.join(psutil.Process().cmdline()).strip()})"

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
        ("api --port http | api --port 0", {}, "NEREID_PORT: ..."),
        ("serve --workers=-1", {}, "NEREID_WORKERS: ..."),
        ("serve --triton a:1,a:1 | api --triton triton", {}, "NEREID_TRITON_ENDPOINTS: ..."),
        ("key 'camera 1'", {}, "a key's id has 1 to 64 letters, digits, '_' or '-'"),
        ("pull yolo12n", {}, f"pull does not know yolo12n; it knows {', '.join(PUBLISHED)}"),
        ("pull yolo11n --floor 2", {}, "an option is not valid for YOLO11n, 80 classes of COCO, 640 x 640: ..."),
        ("pull ocr --sha256 0", {}, "--sha256 is for one model; ocr is ocr_detection, ocr_direction, ocr_recognition"),
        ("add nowhere.onnx", {}, "there is no file nowhere.onnx"),
        ("add file --sha256 0", {}, "file is not the expected file: ..."),
        ("add plates.toml --sha256 0", {}, "--sha256 is for a network; the file of a cascade has none"),
        ("add file --name 'my model'", {}, "'my model' is not a name of a model: ..."),
        ("add file --mean 1", {}, "an option is not valid: ..."),
        ("use doors | remove doors:1", {}, "there is no model doors in models; it has none that was added"),
        ("use doors", {"MODEL_REPOSITORY": "file"}, "file: File exists"),
        ("serve | api", {"PORT": "USED"}, "port USED is in use by process OWN; end it, or choose another with --port"),
        ("serve | api", {"HOST": "203.0.113.1"}, "cannot listen on 203.0.113.1:FREE: ..."),
        ("api", {"SOCKET": "used.sock"}, "socket HERE/used.sock is in use..."),
        ("api", {"SOCKET": "file/api.sock"}, "cannot listen on HERE/file/api.sock: Not a directory"),
        ("api", {"SOCKET": "x" * 70}, f"cannot listen on HERE/{'x' * 70}: AF_UNIX path too long"),
        ("serve --instances 2", {"SOCKET": "file/run"}, "cannot create file/run for the instances' sockets: ..."),
        (
            "serve --instances 2",
            {"SOCKET": "models", "os.access": lambda path, _: path != Path("models")},  # root may write everywhere
            "cannot create the instances' sockets in models: Permission denied",
        ),
        ("serve | triton", {"TRITON_PORTS": "USED"}, "Triton cannot listen on port USED: it is in use; choose others with ..."),
        (
            "triton",
            {"TRITON_PORTS": 80, "app.embedded.server.is_free": unreadable},
            "Triton cannot listen on port 80: Permission denied; choose others with NEREID_TRITON_PORTS",
        ),
        ("serve | triton", {"app.__main__.loadable_models": unreadable}, "NEREID_MODEL_REPOSITORY: models: Permission denied"),
        ("serve | api", {"API_KEYS_FILE": "keys.toml"}, "NEREID_API_KEYS_FILE: keys.toml: [camera-1]: expected sha256 (..."),
        (
            "serve --triton a:1 | api",
            {"TRITON_TLS_FOLDER": "tls"},
            "NEREID_TRITON_TLS_FOLDER: tls/ca.crt is not a certificate in ...",
        ),
        (
            "serve | api | cache clear",
            {"CACHE": "redis://host/0", "app.host.extras._is_installed": lambda module: module != "redis"},
            "NEREID_CACHE needs what is not installed: redis; pip install 'nereid-gateway[redis]'",
        ),
        (
            "serve --search | search",
            {"app.host.extras._is_installed": lambda module: module != "asyncpg"},
            "NEREID_SEARCH needs what is not installed: asyncpg; pip install 'nereid-gateway[search]'",
        ),
        ("api", {"TRACING": True}, "NEREID_TRACING: OpenTelemetry does not accept its own settings, OTEL_*: ValueError..."),
        ("search --triton a:1", {"SEARCH_FOLDERS": "/nope", "DATABASE_URL": DATABASE}, "NEREID_SEARCH_FOLDERS: ..."),
        ("healthcheck", {}, "http://127.0.0.1:FREE does not answer"),
        ("cache clear", {}, "there is no cache: NEREID_CACHE is empty"),
        (
            "cache clear",
            {"CACHE": "memory", "MODEL_REPOSITORY": "no"},
            f"no/{CLEARED}: No such file or directory; a restart of ...",
        ),
    ],
)
def test_wrong_setting_or_argument_is_one_line(refusal: Refusal, commands: str, given: dict[str, Any], expected: str) -> None:
    """`...` stands for the rest of the line."""
    for command in commands.split(" | "):
        line = refusal(command, given)
        assert line.startswith(expected[:-3]) if expected.endswith("...") else line == expected


@pytest.mark.parametrize(("supervised", "warnings"), [({}, 1), ({SUPERVISED: "1"}, 0)])
def test_stock_pillow_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], supervised: dict[str, str], warnings: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("PIL.__version__", "13.0.0")
    for name, value in {"NEREID_TRITON_HOME": "home", "NEREID_SOCKET": "missing/api.sock", **supervised}.items():
        monkeypatch.setenv(name, value)
    assert main(["api"]) == 1
    *lines, error = capsys.readouterr().err.splitlines()
    assert error.startswith(f"nereid: socket {tmp_path}/missing/api.sock is in use, or its folder does not exist")
    assert [line.startswith("nereid: warning: stock Pillow ") for line in lines] == [True] * warnings


def test_app_runs_as_a_module_and_loads_no_server_for_other_commands() -> None:
    shows = "import sys; from app.__main__ import main; main(); sys.exit(bool({'granian', 'grpc', 'litestar'} & {*sys.modules}))"
    good = subprocess.run([sys.executable, "-c", shows, "settings"], cwd=ROOT, capture_output=True, text=True, check=False)
    bad = subprocess.run([sys.executable, "-m", "app", "pull", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout, good.stderr) == (0, table.render() + "\n", "")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(
    ("happens", "code", "said"),
    [
        (SettingsError("nothing works,\n    whatever  is tried"), 1, "nereid: nothing works, whatever is tried\n"),
        (CommandError("out of luck"), 1, "nereid: out of luck\n"),
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 130, ""),
    ],
)
def test_no_failure_or_signal_leaves_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], happens: Exception | signal.Signals, code: int, said: str
) -> None:
    def run(_: Settings, **__: bool) -> int:
        if isinstance(happens, Exception):
            raise happens
        os.kill(os.getpid(), happens)
        return 5

    monkeypatch.setattr("app.doctor.report.run", run)
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
    """The server takes only addresses; a stale socket is no obstacle, and host and port do not matter with it."""
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
@pytest.mark.parametrize(("host", "has_keys", "warns"), [("127.0.0.2", False, False), (ALL, True, False), (ALL, False, True)])
def test_open_api_that_others_can_reach_is_a_warning(  # noqa: PLR0913, PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    host: str,
    has_keys: bool,  # noqa: FBT001
    warns: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setenv("NEREID_HOST", host)
    if has_keys:
        (tmp_path / "keys.toml").write_text(keys.create("camera-1")[1], encoding="utf-8")
        monkeypatch.setenv("NEREID_API_KEYS_FILE", str(tmp_path / "keys.toml"))
    port = free_port()
    assert main(["api", "--port", str(port)]) == 0
    said = f"nereid: warning: no API key is needed at 0.0.0.0:{port}, which is not loopback; set NEREID_API_KEYS_FILE\n"
    assert capsys.readouterr().err == said * warns


@pytest.mark.parametrize(
    ("line", "variables", "expected"),
    [
        ("serve", {}, {"search": "off", "port": 4603}),
        ("serve --search", {"SEARCH_FOLDERS": "/nope"}, {"search": "on", "port": 4603}),  # whoever detects does not wait for it
        ("search", {}, {"search": "alone", "port": 4605}),
        ("search", {"PORT": "4700"}, {"search": "alone", "port": 4700}),
        ("search --port 4701", {"PORT": "4700"}, {"search": "alone", "port": 4701}),
        ("serve --instances 3 --workers 2", {"SOCKET": "run"}, {"instances": 3, "workers": 2}),
    ],
)
def test_serve_with_another_triton_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, variables: dict[str, str], expected: dict[str, object]
) -> None:
    seen: list[Settings] = []

    def supervise(settings: Settings, triton: object, _: object) -> int:
        assert triton is None
        seen.append(settings)
        return 7

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.preflight.require_address", lambda _: None)
    monkeypatch.setattr("app.__main__.supervise", supervise)
    for name, value in ({"PORT": "", "SEARCH": "", "DATABASE_URL": DATABASE} | variables).items():
        monkeypatch.setenv(PREFIX + name, value)
    assert main([*line.split(), "--triton", "127.0.0.1:8001"]) == 7
    assert [{name: getattr(settings, name) for name in expected} for settings in seen] == [expected]
    assert (tmp_path / "run").is_dir() is ("SOCKET" in variables)


class Triton:
    """Takes the place of the embedded Triton: notes what is done to it and around it, and ends by itself."""

    log = Path("triton.log")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.failure: BaseException | None = None
        self.end: BaseException | int = -11
        monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: self)
        monkeypatch.setattr("app.__main__.install", lambda home: self.done.append(f"install {home}"))
        monkeypatch.setattr("app.__main__._pull_apart", lambda settings: self.done.append(f"pull {settings.model}"))
        monkeypatch.setenv("NEREID_TRITON_HOME", "/h")

    def claim(self) -> None:
        self.done.append("claim")

    def start(self) -> None:
        self.done.append("start")
        if self.failure:
            raise self.failure

    def poll(self) -> int:
        if isinstance(self.end, int):
            return self.end
        raise self.end

    def stop(self) -> None:
        self.done.append("stop")


@pytest.fixture
def triton(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Triton:  # noqa: F811 - a fixture
    assert repository.is_dir()
    return Triton(monkeypatch)


def test_triton_alone_is_prepared_and_stopped(triton: Triton, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["triton"]) == 1
    assert triton.done == ["claim", "install /h", "pull yolo11n", "start", "stop"]
    ready, ended = capsys.readouterr().err.splitlines()
    assert f"gRPC at {Settings(triton_home='/h').triton_address}; " in ready
    assert "code -11" in ended
    triton.end = KeyboardInterrupt()
    assert main(["triton"]) == 0
    triton.failure = CommandError("out of luck")
    capsys.readouterr()
    assert main(["triton"]) == 1
    assert one_line(capsys) == "out of luck"
    assert triton.done[-2:] == ["start", "stop"]


@pytest.mark.parametrize(("target", "pulled"), [("yolo11n:2", ["pull yolo11n"]), ("unheard-of", []), ("yolox_nano", [])])
def test_model_of_a_default_route_is_pulled_once(
    triton: Triton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, pulled: list[str]
) -> None:
    for path in ("yolox_nano/1/model.onnx", "yolox_nano/config.pbtxt", "routes.toml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(
            'name: "yolox_nano"' if "config" in path else f'[detector]\nto = "{target}"\n', encoding="utf-8"
        )
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(tmp_path / "routes.toml"))
    monkeypatch.setenv("NEREID_MODEL", "detector")
    main(["triton"])
    assert [each for each in triton.done if each.startswith("pull")] == pulled


def test_serve_starts_triton_and_watches_it(
    triton: Triton,
    repository: Path,  # noqa: F811 - a fixture
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def supervise(_: Settings, watched: object, __: object) -> NoReturn:
        assert watched is triton
        triton.done.append("supervise")
        raise CommandError("Triton cannot be run here")

    monkeypatch.setattr("app.__main__.supervise", supervise)
    assert main(["serve", "--port", str(free_port())]) == 1
    assert triton.done == ["claim", "install /h", "pull yolo11n", "start", "supervise", "stop"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ready, failed = capsys.readouterr().err.splitlines()
    assert ready == f"nereid: Triton is ready with the models in {repository}; its log is triton.log"
    assert failed == "nereid: Triton cannot be run here"
