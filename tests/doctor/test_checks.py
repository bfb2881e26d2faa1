"""What is said of settings and their files, of this machine and its limits, of a config, and of what runs already."""

import asyncio
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from PIL import features

from app import healthcheck
from app.api.caller import keys
from app.doctor import batching, consistency, database, gateway, limits, machine
from app.doctor.finding import Finding, Severity
from app.feature import settings_kind
from app.host import cores, memory
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES
from app.settings.schema import Settings
from app.triton import shared_memory
from app.triton.shared_memory import MAX_ARENA_BYTES
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding, run_command
from tests.fakes.http import answering, scripted
from tests.fakes.triton import FakeTriton, serving
from tests.faults.serving import running_gateway
from tests.postgres import Server
from tests.processes import obeying_modes
from tests.support import IMAGES, free_port

EVERYWHERE: dict[str, Any] = {"host": "0.0.0.0"}  # noqa: S104 - nobody listens
ELSEWHERE = {"triton_endpoints": "127.0.0.1:8001"}
MIB = 2**20
FILE = "models/m/config.pbtxt"
POLICY = {"default_timeout_microseconds": "600000000", "allow_timeout_override": True, "max_queue_size": 64}


@pytest.mark.parametrize(
    ("settings", "code", "severity", "says"),
    [
        ({}, "api_keys", OK, ["which only this machine can reach"]),
        (EVERYWHERE, "api_keys", WARNING, ["0.0.0.0:4603", "NEREID_API_KEYS_FILE"]),
        ({**EVERYWHERE, "socket": "run/a.sock"}, "api_keys", OK, ["unix sockets"]),
        ({**EVERYWHERE, "api_keys_file": "{}/keys.toml"}, "api_keys", OK, [": camera"]),
        ({"api_keys_file": "{}/invalid.toml"}, "api_keys", FAILURE, ["API_KEYS_FILE: ", "camera", "nereid key NAME"]),
        ({"timeout_seconds": 30, "max_timeout_seconds": 20}, "timeouts", WARNING, ["30 s", "20 s", "MAX_TIMEOUT_SECONDS=30"]),
        # A service manager that kills sooner loses requests.
        ({"drain_delay_seconds": 5.0, "body_seconds": 10.0, "max_timeout_seconds": 20.0}, "timeouts", OK, ["stop 40 s"]),
        ({"triton_tls_folder": "{}/nowhere", **ELSEWHERE}, "tls_files", FAILURE, ["{}/nowhere/ca.crt: No such", "ca.crt"]),
        ({"triton_control_key_file": "{}/nowhere", **ELSEWHERE}, "control_key", FAILURE, ["{}/nowhere", "CONTROL_KEY_FILE"]),
        ({"cache_key_file": "{}/nowhere"}, "cache_key", FAILURE, ["NEREID_CACHE_KEY_FILE: {}/nowhere: No such file"]),
        ({"routes_file": "{}/invalid.toml"}, "routes", FAILURE, ["NEREID_ROUTES_FILE: {}/invalid.toml", "`to`", "[detector]"]),
        ({"search_folders": "{},{}/missing"}, "search_folders", FAILURE, ["{}/missing is not a folder", "readable"]),
        ({"cache": "redis://host/0"}, "cache", FAILURE, ["installed: redis", "pip install 'nereid-gateway[redis]'"]),
    ],
)
def test_settings_and_their_files(  # noqa: PLR0913, PLR0917 - a table
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], code: str, severity: Severity, says: list[str]
) -> None:
    (tmp_path / "keys.toml").write_text(keys.create("camera")[1], encoding="utf-8")
    (tmp_path / "invalid.toml").write_text("[camera]\n", encoding="utf-8")
    monkeypatch.setattr("app.host.extras._is_installed", lambda module: module != "redis")
    given: dict[str, Any] = {
        name: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value for name, value in settings.items()
    }
    found = {finding.code: finding for finding in consistency.check(settings_kind()(**given))}
    assert_finding(found[code], severity, *(text.replace("{}", str(tmp_path)) for text in says))


@pytest.mark.parametrize(
    ("instances", "threads", "is_embedded", "severity", "says"),
    [
        (4, "", True, OK, "4 instances of 1 thread on 4 cores"),
        (1, "", False, OK, "1 instance of 4 threads on 4 cores"),
        (1, "1", True, WARNING, "1 instance of 1 thread on 4 cores: most of the cores are idle while it runs"),
        (4, "2", True, WARNING, "4 instances of 2 threads on 4 cores: they wait for each other"),
    ],
)
def test_threads_of_a_model_fit_the_cores(
    instances: int, threads: str, severity: Severity, says: str, *, is_embedded: bool
) -> None:
    config = {
        "name": "m",
        "backend": "onnxruntime",
        "instance_group": [{"count": instances, "kind": "KIND_CPU"}],
        "parameters": {"intra_op_thread_count": {"string_value": threads}},
    }
    (finding,) = batching.check_instances(batching.read(config), FILE, 4.0, is_embedded=is_embedded)
    assert_finding(finding, severity, says)


@pytest.mark.parametrize(
    ("machine", "settings", "code", "severity", "says"),
    [
        ({"cores": 2.0}, {"workers": 3}, "workers", WARNING, ["3 workers for 2 cores", "NEREID_WORKERS=2"]),
        ({}, {"workers": 4, "instances": 2}, "workers", WARNING, ["8 workers for 4 cores", "NEREID_WORKERS=2"]),
        ({"cores": 8.0}, {"workers": 2}, "workers", WARNING, ["only 2 of them", "NEREID_WORKERS=8"]),
        ({"cores": 1.5}, {}, "workers", OK, []),  # one for each core of the host would be too many
        ({}, {"workers": 4, "decode_threads": 4}, "decode_threads", OK, []),
        ({}, {"workers": 4, "decode_threads": 5}, "decode_threads", WARNING, ["only take memory", "DECODE_THREADS=2"]),
        ({}, {"workers": 2, "decode_threads": 1}, "decode_threads", WARNING, ["not all cores", "DECODE_THREADS=2"]),
        # A worker needs some files for itself.
        ({"files": RESERVED_FILES}, {}, "open_files", FAILURE, [f"needs {RESERVED_FILES} for itself"]),
        ({"files": MAX_CONNECTIONS + RESERVED_FILES - 1}, {}, "open_files", WARNING, ["further clients wait"]),
        ({"room": 50 * MIB}, {"workers": 2}, "dev_shm", WARNING, ["1 of them copy", "--shm-size=94m"]),
        ({"room": None}, {"workers": 2}, "dev_shm", WARNING, ["2 of them copy", "does not exist"]),
        ({"room": 0}, {"workers": 2, "transport": "shm"}, "dev_shm", FAILURE, ["2 of them can send nothing"]),
        ({"slot": MAX_ARENA_BYTES + 1}, {"workers": 2}, "dev_shm", WARNING, ["too large", "smaller"]),
        ({"slot": None, "room": 100 * MIB}, {"workers": 2}, "dev_shm", OK, []),
        ({"memory": 1500 * MIB}, {"workers": 1}, "memory", WARNING, ["of 1500 MiB", "kernel may kill", "NEREID_MAX_MEGAPIXELS=12"]),
        ({"memory": 400 * MIB}, {"workers": 1}, "memory", WARNING, ["400 MiB are too little", "they may have 8.15 megapixels"]),
        # The largest image is admitted whatever the budget: a JPEG, or an AVIF of 128 MiB.
        ({}, {"workers": 1, "memory_mb": 100}, "memory", WARNING, ["NEREID_MEMORY_MB=100", "NEREID_MEMORY_MB=894"]),
        ({}, {"workers": 2, "memory_mb": 1000}, "memory", OK, ["1000 MiB each, all in all 2355 of 8192 MiB"]),
    ],
)
def test_limits_of_the_machine(  # noqa: PLR0913, PLR0917 - a table
    monkeypatch: pytest.MonkeyPatch,
    machine: dict[str, Any],
    settings: dict[str, Any],
    code: str,
    severity: Severity,
    says: list[str],
) -> None:
    has = {"cores": 4.0, "room": 2**30, "memory": 2**33, "files": 10**6, "slot": 640 * 640 * 3, **machine}
    monkeypatch.setattr(cores, "available", lambda: has["cores"])
    monkeypatch.setattr(shared_memory, "room", lambda: has["room"])
    monkeypatch.setattr(memory, "available_bytes", lambda: has["memory"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (min(has["files"], 1024), has["files"]))
    found = {finding.code: finding for finding in limits.check(Settings(**settings), has["slot"], maps_memory=True)}
    assert_finding(found[code], severity, *says)


def check_machine(**settings: Any) -> dict[str, Finding]:  # noqa: ANN401
    return {finding.code: finding for finding in machine.check(Settings(**settings))}


def test_pillow_and_what_it_was_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", "13.0.0")
    assert_finding(check_machine()["pillow"], WARNING, "stock Pillow", "pip uninstall -y pillow")
    monkeypatch.setattr("PIL.__version__", "12.1.1.post0")
    assert check_machine()["pillow"].severity is OK
    monkeypatch.setattr(features, "check", lambda name: name in {"jpg", "libjpeg_turbo"})
    assert_finding(check_machine()["image_formats"], FAILURE, "zlib and libwebp", "libwebp-dev")
    monkeypatch.setattr(features, "check", lambda name: name != "libjpeg_turbo")
    assert check_machine()["image_formats"].severity is OK
    assert_finding(check_machine()["pillow_jpeg"], WARNING, "without libjpeg-turbo", "libjpeg-dev")


@pytest.mark.system
def test_library_that_cannot_be_imported() -> None:
    code = "import sys; sys.modules['cv2'] = None; from app.__main__ import main; sys.exit(main(['doctor', '--json']))"
    exit_code, found = run_command(sys.executable, "-c", code)

    assert exit_code == 1
    assert_finding(found["opencv"], FAILURE, "cv2", "does not start", "--force-reinstall")


def test_model_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded Triton gets one when it starts, and another Triton has its own."""
    repository = str(tmp_path / "nowhere")
    for settings, severity, *says in (
        ({"model": "yolo11n"}, OK, "has no model that was pulled; serve pulls yolo11n when it starts"),
        ({"model": "other", **ELSEWHERE}, OK),
        ({"model": "yolo12x"}, FAILURE, "yolo12x is neither among them", "one of yolo11n, yolo11n_file, yolox_nano"),
    ):
        assert_finding(check_machine(model_repository=repository, **settings)["model_repository"], severity, repository, *says)
    monkeypatch.setattr(machine, "loadable_models", Mock(side_effect=PermissionError(13, "Permission denied", repository)))
    found = check_machine(model_repository=repository)
    assert_finding(found["model_repository"], FAILURE, f"{repository}: Permission denied", "let this user read")


def with_policy(largest: int = 8, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Make a good config with other values in the policy of its queue."""
    return {"max_batch_size": largest, "dynamic_batching": {"default_queue_policy": {**POLICY, **changes}}}


@pytest.mark.parametrize(
    ("config", "code", "severity", "says"),
    [
        (with_policy(), "batching", OK, []),
        ({"max_batch_size": 8}, "batching", WARNING, ["no dynamic_batching", "8", "no end", f"add to {FILE}:\ndynamic_b"]),
        # Such a model may have dynamic batching only for the policy of its queue.
        ({"max_batch_size": 1}, "queue_policy", WARNING, ["no max_queue_size", f"add to {FILE}:\ndynamic_b"]),
        # A GPU computes a batch in little more time than one image.
        ({**with_policy(1), "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}]}, "batching", WARNING, ["max_batch_size: 64"]),
        (with_policy(max_queue_size=0), "queue_policy", WARNING, ["without end", f"in {FILE}:\n  default_queue"]),
        # Triton would compute answers that nobody waits for.
        (with_policy(timeout_action="DELAY"), "queue_timeout", WARNING, ["deadline", "timeout_action: REJECT"]),
        (with_policy(allow_timeout_override=False), "queue_timeout", WARNING, ["deadline", "allow_timeout_override: true"]),
        (
            {"max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [4, 16, 32]}},
            "preferred_batch_size",
            FAILURE,
            ["of 16, 32,", "of 8", f"from {FILE}"],
        ),
    ],
)
def test_queue_and_batches(config: dict[str, Any], code: str, severity: Severity, says: list[str]) -> None:
    found = {finding.code: finding for finding in batching.check(batching.read({"name": "m", **config}), FILE)}
    assert_finding(found[code], severity, *says)


def test_gateway_that_runs_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_finding(gateway.check(Settings(port=free_port(), **EVERYWHERE)), OK, "nothing listens at http://127.0.0.1:")
    with answering(b"") as url:
        found = gateway.check(Settings(port=int(url.rpartition(":")[2])))
    assert_finding(found, OK, f"a gateway runs at {url}, and is ready")
    monkeypatch.setattr(gateway, "_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = gateway.check(Settings(port=server.getsockname()[1]))
    assert_finding(found, WARNING, "something else", f"process {os.getpid()} (", "--port")
    assert_finding(gateway.check(Settings(host="203.0.113.1")), FAILURE, "203.0.113.1", "NEREID_HOST=127.0.0.1")
    with scripted(path=(first := tmp_path / "nereid-1.sock")):
        assert_finding(gateway.check(Settings(instances=2, socket=str(tmp_path))), OK, f"1 of 2 gateways answer: {first}")
    assert_finding(gateway.check(Settings(socket=str(tmp_path / "other.sock"))), OK, "no gateway answers at")


@pytest.mark.system
async def test_gateway_that_hangs(tmp_path: Path) -> None:
    async with serving(fake := FakeTriton()), running_gateway(fake.url, tmp_path, workers=1) as running:
        main = running.process
        stopped = [main, *running.workers()]
        for process in stopped:
            process.suspend()
        failure = await asyncio.to_thread(healthcheck.failure, Settings(port=running.port))
        finding = await asyncio.to_thread(gateway.check, Settings(port=running.port))
        for process in stopped:
            process.resume()
        running.process.terminate()  # at once: another thread may take the signal then, which must not wake nobody
        assert await asyncio.to_thread(running.process.wait, 30) == 0

    assert failure == f"{running.url} does not answer"
    assert_finding(finding, FAILURE, "a Nereid", f"process {main.pid} (nereid)", f"kill -9 {main.pid}")


@pytest.mark.system
@pytest.mark.parametrize("place", ["closed", "closed/models", "missing"])
async def test_gateway_works_without_warning_where_it_cannot_read_the_repository(
    served: Settings, tmp_path: Path, place: str
) -> None:
    """It needs nothing but gRPC."""
    (tmp_path / "closed").mkdir(mode=0)
    repository, prefix = tmp_path / place, obeying_modes()
    given = {"model": "yolo11n", "model_repository": repository, "host": "127.0.0.1", "slow_request_ms": 0}
    async with running_gateway(served.triton_address, tmp_path, prefix, **given) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            found = await client.post("/detect", files={"image": (IMAGES / "chelsea.jpg").read_bytes()})
            unknown = await client.post("/predict/nowhere", files={"image": (IMAGES / "chelsea.jpg").read_bytes()})
            models, health = (await client.get("/models")).json(), (await client.get("/health")).json()
        log = (tmp_path / "gateway.log").read_text(encoding="utf-8")
        changed = {"triton_endpoints": served.triton_address, "port": gateway.port, **given}
        environ = {f"NEREID_{name.upper()}": str(value) for name, value in changed.items()}
        command = [*prefix, sys.executable, "-m", "app", "doctor", "--json"]
        exit_code, findings = run_command(*command, **environ)

    assert [one["class_name"] for one in found.json()["detections"]] == ["cat"]
    assert unknown.status_code == 404
    assert "yolo11n" in {model["name"] for model in models["models"] if model["state"] == "ready"}
    assert not [model for model in models["models"] if str(repository) in str(model)]
    assert (health["status"], health["model"]) == ("healthy", "yolo11n")
    assert not [line for line in log.splitlines() if "warning" in line or "error" in line]
    assert exit_code == 0
    assert findings["model_repository"].severity is OK
    assert str(repository) in findings["model_repository"].message


async def check_database(url: str) -> Finding:
    (finding,) = await database.check(Settings(search="on", database_url=url))
    return finding


@pytest.mark.parametrize("version", ["postgres16", "postgres"])
async def test_a_database_that_can_be_used(request: pytest.FixtureRequest, version: str) -> None:
    server: Server = request.getfixturevalue(version)
    (found,) = await database.check(msgspec.structs.replace(server.settings, search="on"))
    assert_finding(found, OK, f"PostgreSQL {server.program.version}.", "with pgvector 0.8.5")
    await server.execute("DO $$ BEGIN ASSERT to_regclass('images') IS NULL; END $$", "nereid")


async def test_a_database_that_cannot_be_used(postgres: Server, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tenants are protected by a role. A pgvector may have known faults."""
    away = await check_database(f"postgresql://nereid:secret@127.0.0.1:{free_port()}/nereid")
    assert_finding(away, FAILURE, "127.0.0.1", "does not answer", "NEREID_DATABASE_URL")
    assert "secret" not in away.message
    await postgres.execute("CREATE ROLE nobody_much LOGIN")
    found = await check_database(database.replace("nereid@", "nobody_much@"))
    await postgres.execute("ALTER ROLE nobody_much CONNECTION LIMIT 0")
    full = await check_database(database.replace("nereid@", "nobody_much@"))
    await postgres.execute("DROP ROLE nobody_much")
    assert_finding(full, FAILURE, "too many connections", "CONNECTION LIMIT")
    assert_finding(found, FAILURE, "18", "cannot use it", "GRANT nereid_search")
    await postgres.pretend(database, "0.8.3")
    assert_finding(await check_database(database), WARNING, "pgvector 0.8.3", "can fail", "install pgvector 0.8.4")
    monkeypatch.setattr("app.search.postgres.migrations._MIN_MAJOR", 19)
    assert_finding(await check_database(database), FAILURE, "search needs PostgreSQL 19 or later")
