"""The command line: flags become settings, failures become one line and an exit code."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.__main__ import main
from app.api.admission import keys
from app.api.admission.keys import KeysError
from app.embedded.install import InstallError
from app.embedded.server import EmbeddedTritonError
from app.host.packages import PackageError
from app.host.ports import find_free
from app.host.processes import SUPERVISED
from app.server import Server
from app.settings import table
from app.settings.schema import PREFIX, Settings, SettingsError
from app.triton.credentials import CredentialsError
from app.zoo.download import DownloadError
from app.zoo.pull import PullError
from app.zoo.registry import PublishedModel, RegistryError
from tests.fakes import http
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import REPOSITORY, ROOT, free_port

VARIABLE = "WORKER_TABLE_FD"


@pytest.fixture(autouse=True)
def restored_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without settings, and take back what the command did to this process."""
    monkeypatch.setattr("app.telemetry.logging.configure", lambda *_: None)  # it keeps the stdout of the first test
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
    """Use a repository of the test's own, with the project's registry and no model, whoever has the ports of Triton."""
    monkeypatch.setattr("app.__main__.require_ports", lambda _: None)
    shutil.copy(REPOSITORY / "models.toml", tmp_path)
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    return tmp_path


@pytest.fixture
def pulled(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, PublishedModel, dict[str, Any]]]:
    seen: list[tuple[str, PublishedModel, dict[str, Any]]] = []

    def pull(name: str, entry: PublishedModel, into: Path, **options: Any) -> None:  # noqa: ANN401
        assert into == repository
        seen.append((name, entry, options))

    monkeypatch.setattr("app.__main__.pull", pull)
    return seen


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the embedded Triton is installed, started or given a model."""

    def never(*_: object, **__: object) -> None:
        pytest.fail("the embedded Triton was touched")

    for name in ("install", "EmbeddedTriton", "pull"):
        monkeypatch.setattr(f"app.__main__.{name}", never)


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


def test_flags_become_settings(reported: list[Settings]) -> None:
    """A flag sets the setting of its name, also for the processes that are started."""
    code = main(["doctor", "--model", "yolox_nano", "--triton", "gpu.example.org:8001"])

    assert code == 0
    (settings,) = reported
    assert settings.model == "yolox_nano"
    assert settings.triton_address == "gpu.example.org:8001"
    assert os.environ["NEREID_MODEL"] == "yolox_nano"
    assert os.environ["NEREID_TRITON_ENDPOINTS"] == "gpu.example.org:8001"


def test_flags_take_precedence_over_the_environment(reported: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_MODEL", "from_environment")
    monkeypatch.setenv("NEREID_TRITON_GRPC_PORT", "5001")
    main(["doctor", "--model", "typed"])

    assert reported[0].model == "typed"
    assert reported[0].triton_address == "127.0.0.1:5001"


def test_without_flags_the_environment_counts(reported: list[Settings]) -> None:
    main(["doctor"])

    assert reported == [Settings()]
    assert not [name for name in os.environ if name.startswith(PREFIX)]


@pytest.mark.parametrize(
    ("flags", "changed"),
    [([], {}), (["--json"], {"as_json": True}), (["--strict"], {"is_strict": True}), (["--no-burst"], {"with_burst": False})],
)
def test_options_of_the_doctor(monkeypatch: pytest.MonkeyPatch, flags: list[str], changed: dict[str, bool]) -> None:
    seen: list[dict[str, bool]] = []

    def run(_: Settings, **options: bool) -> int:
        seen.append(options)
        return 1

    monkeypatch.setattr("app.doctor.report.run", run)

    assert main(["doctor", *flags]) == 1
    assert seen == [{"as_json": False, "is_strict": False, "with_burst": True, **changed}]


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
        ["key"],
    ],
)
def test_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments that a command does not know are rejected with its usage and exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: nereid")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])

    assert caught.value.code == 0
    text = capsys.readouterr().out
    for command in ("serve", "api", "triton", "pull", "key", "doctor", "settings"):
        assert f"\n    {command} " in text


def test_unknown_setting_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEREID_PROT", "80")

    assert main(["settings"]) == 1
    assert one_line(capsys).startswith("NEREID_PROT is not a setting")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["api", "--port", "http"], "NEREID_PORT"),
        (["api", "--port", "0"], "NEREID_PORT"),
        (["serve", "--workers=-1"], "NEREID_WORKERS"),
        (["serve", "--instances", "many"], "NEREID_INSTANCES"),
        (["serve", "--triton", "a:1,a:1"], "NEREID_TRITON_ENDPOINTS"),
        (["serve", "--triton", "http://triton:8001"], "NEREID_TRITON_ENDPOINTS"),
        (["api", "--triton", "triton"], "NEREID_TRITON_ENDPOINTS"),
    ],
)
def test_invalid_value_is_one_line(arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert one_line(capsys).startswith(f"{name}: ")


def test_an_old_name_of_a_setting_is_a_warning(
    reported: list[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_TRITON_URLS", "triton:8001")

    assert main(["doctor"]) == 0
    assert reported[0].triton_address == "triton:8001"
    assert "warning: NEREID_TRITON_URLS is now NEREID_TRITON_ENDPOINTS" in capsys.readouterr().err


def test_settings_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the table of the README, with every setting in it."""
    assert main(["settings"]) == 0

    out, err = capsys.readouterr()
    assert out == table.render() + "\n"
    assert err == ""
    for name in Settings.__struct_fields__:
        assert f"`{PREFIX}{name.upper()}`" in out


def test_it_runs_as_a_module() -> None:
    """`python -m app` is the command line, and its exit code is that of the command."""
    run = [sys.executable, "-m", "app"]
    good = subprocess.run([*run, "settings"], cwd=ROOT, capture_output=True, text=True, check=False)
    bad = subprocess.run([*run, "pull", "nothing"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (good.returncode, good.stdout, good.stderr) == (0, table.render() + "\n", "")
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (1, "", 1)


@pytest.mark.usefixtures("repository")
def test_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "yolo12n"]) == 1
    assert "yolo12n is not in " in (line := one_line(capsys))
    assert line.endswith("which lists yolo11n, yolo11n_file, yolox_nano, efficientnet_lite0")


def test_repository_without_a_registry_lists_no_model(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "models.toml").unlink()

    assert main(["pull"]) == 1
    expected = f"{repository}/models.toml lists no model; run this in the project's folder or set NEREID_MODEL_REPOSITORY"
    assert one_line(capsys) == expected


def test_invalid_registry_is_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "models.toml").write_text("[yolo11n", encoding="utf-8")

    assert main(["pull"]) == 1
    assert one_line(capsys).startswith(f"{repository}/models.toml: ")


@pytest.mark.parametrize("command", ["serve", "api"])
@pytest.mark.parametrize("content", ["[yolo11n", "[yolo11n]\ntitle = 3", "[yolo11n]\nlicense = 'a misspelt field'"])
def test_no_api_starts_with_an_invalid_registry(
    repository: Path, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    """Its workers would all complain about it, and be started again; nothing is installed."""
    (repository / "models.toml").write_text(content, encoding="utf-8")

    assert main([command, "--port", str(free_port())]) == 1
    assert one_line(capsys).startswith(f"{repository}/models.toml: ")


def test_a_running_service_does_not_need_the_registry(
    repository: Path, served: list[Server], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An API that the supervisor starts again goes without it, because no request needs it."""
    (repository / "models.toml").write_text("[yolo11n", encoding="utf-8")
    monkeypatch.setenv(SUPERVISED, "1")

    assert main(["api", "--port", str(free_port()), "--triton", "127.0.0.1:1"]) == 0
    assert len(served) == 1
    assert capsys.readouterr().err == ""


def test_pull_passes_its_options_on(pulled: list[tuple[str, PublishedModel, dict[str, Any]]]) -> None:
    assert main(["pull", "yolox_nano", "--from", "/mirror", "--sha256", "ab"]) == 0

    ((name, entry, options),) = pulled
    assert (name, entry.recipe.square) == ("yolox_nano", 416)
    assert options == {"source": Path("/mirror"), "sha256": "ab"}


def test_pull_without_a_name_pulls_the_default_model(
    pulled: list[tuple[str, PublishedModel, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEREID_MODEL", "yolox_nano")

    assert main(["pull"]) == 0
    assert [name for name, _, _ in pulled] == ["yolox_nano"]


def test_failed_pull_ends_with_one_line(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "yolo11n", "--from", str(repository / "nowhere.onnx")]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"nereid: there is no file {repository}/nowhere.onnx"


@pytest.mark.parametrize("command", ["serve", "api"])
def test_port_in_use_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message has the port, who has it, and the flag that chooses another, and nothing is started."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert main([command, "--port", str(port)]) == 1

    own = " ".join(psutil.Process().cmdline()).strip()
    expected = f"port {port} is in use by process {os.getpid()} ({own}); end it, or choose another with --port"
    assert one_line(capsys) == expected


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("command", ["serve", "api", "triton"])
def test_ports_that_collide_are_one_line(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEREID_PORT", "4601")

    assert main([command]) == 1
    assert one_line(capsys) == "NEREID_PORT and NEREID_TRITON_GRPC_PORT are both 4601: each needs a port of its own"


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("command", ["serve", "triton"])
@pytest.mark.parametrize("name", ["NEREID_TRITON_HTTP_PORT", "NEREID_TRITON_GRPC_PORT", "NEREID_TRITON_METRICS_PORT"])
def test_port_of_triton_in_use_is_one_line(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for other, port in zip(("PORT", "TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT"), find_free(4), strict=True):
        monkeypatch.setenv(PREFIX + other, str(port))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv(name, str(port))
        assert main([command]) == 1

    assert one_line(capsys) == f"port {port} is in use; stop what uses it or choose another with {name}"


@pytest.mark.parametrize("command", ["serve", "api"])
def test_stock_pillow_is_an_error(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """If another package replaced pillow-simd by Pillow, the message says what to do."""
    monkeypatch.setattr("PIL.__version__", "12.1.1")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "", "", "", "x86_64")))

    assert main([command, "--port", str(free_port())]) == 1
    assert "run: rm -r .venv && ./just" in one_line(capsys)


@pytest.mark.parametrize("command", ["serve", "api"])
def test_tracing_without_opentelemetry_is_an_error(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEREID_TRACING", "true")
    monkeypatch.setattr("app.preflight.has_exporter", lambda: False)

    assert main([command, "--port", str(free_port())]) == 1
    assert one_line(capsys) == "NEREID_TRACING: OpenTelemetry is not installed; run: pip install '.[otel]'"


def test_settings_of_opentelemetry_that_it_does_not_accept_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise each worker would fail with a traceback."""
    monkeypatch.setenv("NEREID_TRACING", "true")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")

    assert main(["api"]) == 1
    assert one_line(capsys).startswith("NEREID_TRACING: OpenTelemetry does not accept its own settings, OTEL_*: ValueError")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """Collect the servers that would run; none of them does."""
    seen: list[Server] = []

    def serve(server: Server) -> None:
        seen.append(server)

    monkeypatch.setattr(Server, "serve", serve)
    return seen


def test_the_api_is_served_as_the_settings_say(served: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags and variables reach the server, which is still free to handle signals as it likes."""
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


def listening(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


@pytest.mark.usefixtures("served")
def test_socket_in_use_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "api.sock"
    monkeypatch.setenv("NEREID_SOCKET", str(path))
    with listening(path):
        assert main(["api"]) == 1
        assert one_line(capsys).startswith(f"socket {path} is in use")
        assert path.is_socket()


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("where", ["folder/api.sock", "file/api.sock", "x" * 70])
def test_socket_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    """Its folder does not exist or is none, or its path is too long for the kernel."""
    (tmp_path / "file").touch()
    deep = tmp_path / ("y" * 40)
    deep.mkdir()
    monkeypatch.chdir(deep if len(where) > 50 else tmp_path)
    monkeypatch.setenv("NEREID_SOCKET", where)

    assert main(["api"]) == 1
    assert where in one_line(capsys)


def test_stale_socket_is_no_obstacle(served: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that was killed has left it behind."""
    path = tmp_path / "api.sock"
    listening(path).close()
    monkeypatch.setenv("NEREID_SOCKET", str(path))

    assert main(["api"]) == 0
    assert not path.exists()
    assert served[0].bind_uds == path


@pytest.mark.usefixtures("reachable_triton")
def test_host_and_port_do_not_matter_with_a_socket(
    served: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port may be in use, the host unknown, and no key be needed."""
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
    """It is one line at the start, if the address is not loopback and no keys are needed."""
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


@pytest.mark.parametrize("command", ["serve", "api"])
def test_invalid_keys_are_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "keys.toml").write_text("[camera-1]", encoding="utf-8")
    monkeypatch.setenv("NEREID_API_KEYS_FILE", str(path))

    assert main([command, "--port", str(free_port())]) == 1
    assert one_line(capsys).startswith(f"{path}: [camera-1]: expected sha256 (")


@pytest.mark.parametrize("command", ["serve", "api"])
def test_invalid_certificate_is_one_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----", encoding="utf-8")
    monkeypatch.setenv("NEREID_TRITON_TLS", "true")
    monkeypatch.setenv("NEREID_TRITON_CA_FILE", str(path))

    assert main([command, "--triton", "triton:8001", "--port", str(free_port())]) == 1
    assert one_line(capsys) == f"{path} is not a certificate in PEM"


def test_key_prints_its_credential_and_its_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The credential is alone on stdout, and stderr is what the file of keys needs to accept it."""
    assert main(["key", "camera-1"]) == 0

    out, err = capsys.readouterr()
    (path := tmp_path / "keys.toml").write_text(err, encoding="utf-8")
    key = keys.ApiKeys(path).find(out.removesuffix("\n").encode())
    assert key is not None
    assert key.id == "camera-1"
    assert out.partition(".")[2].strip() not in err


def test_key_with_an_invalid_id_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "camera 1"]) == 1
    assert one_line(capsys) == "a key's id has 1 to 64 letters, digits, '_' or '-'"


@pytest.mark.usefixtures("untouched")
def test_serve_with_another_triton_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a Triton is named, nothing is installed or pulled, and no Triton is started or watched."""
    seen: list[tuple[str, object]] = []

    def supervise(settings: Settings, triton: object) -> int:
        seen.append((settings.triton_address, triton))
        return 7

    monkeypatch.setattr("app.__main__.supervise", supervise)

    assert main(["serve", "--triton", "127.0.0.1:8001", "--port", str(free_port())]) == 7
    assert seen == [("127.0.0.1:8001", None)]


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    seen: list[Settings] = []

    def supervise(settings: Settings, _: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("app.__main__.supervise", supervise)
    return seen


@pytest.mark.usefixtures("served", "supervised")
@pytest.mark.parametrize("command", ["serve", "api"])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1:{port}", "Connection refused"),
        ("[::1]:{port}", ""),
        ("no-such-host.invalid:{port}", ""),
        ("no..host:{port}", "encoding with 'idna' codec failed"),
    ],
)
def test_a_triton_that_cannot_be_reached_is_a_warning(
    command: str, address: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The API runs all the same, because Triton may start later."""
    address = address.format(port=free_port())

    assert main([command, "--triton", address, "--port", str(free_port())]) == 0
    line = one_line(capsys)
    assert line.startswith(f"warning: Triton cannot be reached at {address}: {reason}")
    assert line.endswith("; until it can, requests are answered with 503")


@pytest.mark.usefixtures("served", "supervised", "reachable_triton")
@pytest.mark.parametrize("command", ["serve", "api"])
def test_a_triton_that_can_be_reached_is_no_warning(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--port", str(free_port())]) == 0
    assert capsys.readouterr().err == ""


def test_serve_runs_as_many_instances_as_it_is_told(
    supervised: list[Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a folder for their sockets; none of them listens on the port, where a proxy in front of them may listen."""
    monkeypatch.setenv("NEREID_SOCKET_FOLDER", str(tmp_path / "var" / "run"))
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = str(proxy.getsockname()[1])
        assert main(["serve", "--triton", "127.0.0.1:8001", "--instances", "3", "--workers", "2", "--port", port]) == 0

    assert [(settings.instances, settings.workers) for settings in supervised] == [(3, 2)]
    assert (tmp_path / "var" / "run").is_dir()


def test_folder_of_sockets_that_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)  # a path may have no more than 80 characters
    monkeypatch.setenv("NEREID_SOCKET_FOLDER", "file/run")

    assert main(["serve", "--triton", "127.0.0.1:8001", "--instances", "2", "--port", str(free_port())]) == 1
    assert "file/run" in one_line(capsys)


def test_folder_of_sockets_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)  # root may write everywhere
    monkeypatch.setenv("NEREID_SOCKET_FOLDER", str(tmp_path))

    assert main(["serve", "--triton", "127.0.0.1:8001", "--instances", "2"]) == 1
    assert one_line(capsys) == f"cannot create the instances' sockets in {tmp_path}: Permission denied"


@pytest.mark.parametrize("command", ["serve", "triton"])
def test_repository_that_cannot_be_read_is_one_line(
    command: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(repository))

    monkeypatch.setattr("app.__main__.loadable_models", refuse)  # root may read everything
    monkeypatch.setenv("NEREID_PORT", str(free_port()))

    assert main([command]) == 1
    assert one_line(capsys) == f"NEREID_MODEL_REPOSITORY: {repository}: Permission denied"


class Triton:
    """Takes the place of the embedded Triton: notes what is done to it, and ends by itself."""

    log = Path("triton.log")

    def __init__(self, done: list[str], failure: BaseException | None = None) -> None:
        self.done, self.failure = done, failure

    def start(self) -> None:
        self.done.append("start")
        if self.failure:
            raise self.failure

    def poll(self) -> int:
        return -11

    def stop(self) -> None:
        self.done.append("stop")


def test_triton_alone_is_prepared_and_stopped(
    pulled: list[tuple[str, PublishedModel, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is installed and its model pulled before it starts; if it ends by itself, that is a failure."""
    done: list[str] = []
    monkeypatch.setattr("app.__main__.install", lambda home: done.append(f"install {home}"))
    monkeypatch.setattr("app.__main__.EmbeddedTriton", lambda _: Triton(done))
    monkeypatch.setenv("NEREID_TRITON_HOME", "/somewhere")

    assert main(["triton"]) == 1
    assert done == ["install /somewhere", "start", "stop"]
    assert [name for name, _, _ in pulled] == ["yolo11n"]
    ready, ended = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:4601" in ready
    assert "code -11" in ended


def test_pulled_model_is_not_pulled_again(
    repository: Path, pulled: list[tuple[str, PublishedModel, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(REPOSITORY / "yolo11n" / "configs", repository / "yolo11n" / "configs")
    (repository / "yolo11n" / "1").mkdir()
    (repository / "yolo11n" / "1" / "model.onnx").touch()
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.__main__.EmbeddedTriton", lambda _: Triton([]))
    main(["triton"])

    assert pulled == []


@pytest.mark.usefixtures("pulled")
def test_triton_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.__main__.EmbeddedTriton", lambda _: Triton([], EmbeddedTritonError("port 4600 is in use")))

    assert main(["triton"]) == 1
    assert one_line(capsys) == "port 4600 is in use"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """The exit code says that the command was interrupted, by Ctrl-C or by SIGTERM."""

    def stopped(_: Settings, **__: bool) -> int:
        os.kill(os.getpid(), number)
        return 5

    monkeypatch.setattr("app.doctor.report.run", stopped)

    assert main(["doctor"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "failure",
    [
        SettingsError,
        KeysError,
        CredentialsError,
        RegistryError,
        PackageError,
        InstallError,
        EmbeddedTritonError,
        DownloadError,
        PullError,
    ],
)
def test_every_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: type[Exception]
) -> None:
    """An error for the user has no traceback, and line breaks in its message become spaces."""

    def fail(_: Settings, **__: bool) -> int:
        raise failure("nothing works,\n    whatever  is tried")

    monkeypatch.setattr("app.doctor.report.run", fail)

    assert main(["doctor"]) == 1
    assert one_line(capsys) == "nothing works, whatever is tried"


@pytest.mark.usefixtures("pulled")
def test_serve_starts_triton_and_watches_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded Triton is prepared and started before the API, and stopped whatever happens."""
    done: list[str] = []
    triton = Triton(done)

    def supervise(_: Settings, watched: object) -> int:
        assert watched is triton
        done.append("supervise")
        raise EmbeddedTritonError("Triton cannot be run here")

    monkeypatch.setattr("app.__main__.install", lambda _: done.append("install"))
    monkeypatch.setattr("app.__main__.EmbeddedTriton", lambda _: triton)
    monkeypatch.setattr("app.__main__.supervise", supervise)

    assert main(["serve", "--port", str(free_port())]) == 1
    assert done == ["install", "start", "supervise", "stop"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ready, failed = capsys.readouterr().err.splitlines()
    assert ready == "nereid: Triton is ready; its log is triton.log"
    assert failed == "nereid: Triton cannot be run here"


@pytest.mark.usefixtures("pulled")
def test_triton_alone_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Running(Triton):
        def poll(self) -> int:
            raise KeyboardInterrupt

    monkeypatch.setattr("app.__main__.install", lambda _: None)
    monkeypatch.setattr("app.__main__.EmbeddedTriton", lambda _: Running(done))

    assert main(["triton"]) == 0
    assert done == ["start", "stop"]


def test_address_of_another_machine_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NEREID_HOST", "203.0.113.1")

    assert main(["api", "--port", "8080"]) == 1
    assert one_line(capsys).startswith("cannot listen on 203.0.113.1:8080: ")


def test_server_is_not_imported_for_other_commands() -> None:
    """Granian and gRPC are loaded only by the commands that need them."""
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
