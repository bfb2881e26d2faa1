"""What is said of a Triton: the real one as far as it shows it, else one that answers as it is told."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import msgspec
import pytest

from app.doctor.finding import Severity
from app.settings.schema import Settings
from app.triton.shared_memory import Arena
from tests.doctor.setups import LOADED, Examined, assert_useful, examine
from tests.fakes.triton import FakeTriton, serving
from tests.support import free_port, own_arenas, regions

Capture = pytest.CaptureFixture[str]
EXTENSIONS = ["model_configuration", "schedule_policy", "statistics"]


@contextmanager
def fake_in_a_thread(fake: FakeTriton) -> Iterator[None]:
    loop = asyncio.new_event_loop()
    is_ready, may_end = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving(fake):
            is_ready.set()
            await may_end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    is_ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(may_end.set)
        thread.join()
        loop.close()


def examine_fake(fake: FakeTriton, settings: Settings, capsys: Capture) -> Examined:
    with fake_in_a_thread(fake):
        return examine(msgspec.structs.replace(settings, triton_endpoints=fake.url, model="a"), capsys)


def as_foreign(settings: Settings, **changes: object) -> Settings:
    """Treat the embedded Triton as one that the user runs."""
    return msgspec.structs.replace(settings, triton_endpoints=settings.triton_address, **changes)


@pytest.mark.parametrize(
    ("url", "says", "fix"),
    [
        ("", ["{address}", "No such file or directory"], "nereid serve"),
        ("127.0.0.1:{port}", ["{address}", "Connection refused"], "NEREID_TRITON_ENDPOINTS"),
        ("no-such-host.invalid:8001", ["{address}"], "NEREID_TRITON_ENDPOINTS"),
    ],
)
def test_a_triton_that_does_not_answer(  # noqa: PLR0913, PLR0917 - a table
    without_triton: Settings, capsys: Capture, tmp_path: Path, url: str, says: list[str], fix: str
) -> None:
    endpoints = url.format(port=free_port())
    settings = msgspec.structs.replace(without_triton, triton_endpoints=endpoints, triton_home=str(tmp_path))
    examined = examine(settings, capsys)

    says = [each.format(address=settings.triton_address) for each in says]
    assert_useful(examined["triton"], Severity.FAILURE, says=says, fix=fix)
    assert ("dev_shm" in {finding.code for finding in examined.report.findings}) is ("invalid" not in url)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to examine another user's Triton")
def test_a_triton_of_another_user(without_triton: Settings, capsys: Capture, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(without_triton, triton_endpoints="", triton_home=str(tmp_path))
    settings.triton_folder.mkdir(mode=0o700)
    os.chown(settings.triton_folder, 12345, 12345)
    examined = examine(settings, capsys)
    settings.triton_folder.rmdir()

    assert_useful(examined["triton"], Severity.FAILURE, says=["belongs to user 12345, and this is user 0"], fix="sudo -u '#12345'")


def test_a_certificate_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    examined = examine(Settings(triton_endpoints="127.0.0.1:8001", triton_tls_folder=str(tmp_path)), capsys)

    assert examined.code == 1
    assert_useful(
        examined["tls_files"], Severity.FAILURE, says=[f"NEREID_TRITON_TLS_FOLDER: {tmp_path}/ca.crt: No such"], fix="needs ca.crt"
    )
    assert not examined.all("triton")


def test_an_old_triton_of_ones_own(small: Settings, capsys: Capture) -> None:
    """It may crash; a user can update it, unlike the embedded one."""
    examined = examine(as_foreign(small), capsys)

    assert_useful(examined["triton_version"], Severity.WARNING, says=["2.51.0", "may crash"], fix="2.59.1")
    assert examine(small, capsys)["triton_version"].severity is Severity.OK


def test_another_server_of_the_same_protocol(without_triton: Settings, capsys: Capture) -> None:
    """A new Triton survives cancelled inferences."""
    fake = FakeTriton()
    fake.version, fake.extensions = "2.59.1", EXTENSIONS[1:]
    examined = examine_fake(fake, without_triton, capsys)

    assert examined["triton_version"].severity is Severity.OK
    assert examined.code == 1
    assert_useful(examined["extensions"], Severity.FAILURE, says=["model_configuration"], fix="NVIDIA Triton")
    assert "schedule_policy" not in examined["extensions"].message


def test_shared_memory_is_tried_and_nothing_is_left(small: Settings, capsys: Capture) -> None:
    before = own_arenas(), asyncio.run(regions(small))

    assert examine(small, capsys)["shared_memory"].severity is Severity.OK
    assert (own_arenas(), asyncio.run(regions(small))) == before


@pytest.mark.parametrize(("mode", "severity"), [("auto", Severity.WARNING), ("shm", Severity.FAILURE)])
def test_shared_memory_that_needs_a_key(without_triton: Settings, capsys: Capture, mode: str, severity: Severity) -> None:
    """Without the key, pixels are copied, or nothing works where the setting requires shared memory."""
    fake = FakeTriton()
    fake.refusal = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-nereid'"
    examined = examine_fake(fake, msgspec.structs.replace(without_triton, transport=mode), capsys)

    assert_useful(examined["shared_memory"], severity, says=["restricted"], fix="NEREID_TRITON_CONTROL_KEY_FILE")


@pytest.mark.parametrize(
    ("message", "fix"),
    [("Client shared memory is disabled", "--allow-client-shm=true"), ("Unable to open shared memory region", "--ipc=host")],
)
def test_shared_memory_that_triton_rejects(without_triton: Settings, capsys: Capture, message: str, fix: str) -> None:
    """Newer Tritons do not allow it unless they are told to; those in other containers do not have it."""
    fake = FakeTriton()
    fake.refusal = grpc.StatusCode.INVALID_ARGUMENT, message
    before = own_arenas()
    examined = examine_fake(fake, without_triton, capsys)

    assert_useful(examined["shared_memory"], Severity.WARNING, says=[message], fix=fix)
    assert own_arenas() == before


def test_a_triton_elsewhere_has_other_memory(without_triton: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("app.doctor.triton.ports.is_this_machine", lambda _: False)
    fake = FakeTriton()
    fake.accepts_regions = False
    examined = examine_fake(fake, without_triton, capsys)

    assert examined["shared_memory"].severity is Severity.OK
    assert not examined.all("dev_shm")
    assert not examined.all("instances")


def test_a_machine_without_shared_memory(small: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Arena, "__init__", fail)
    examined = examine(small, capsys)

    assert_useful(examined["shared_memory"], Severity.WARNING, says=["Permission denied"], fix="tmpfs")


def test_inline_needs_no_shared_memory(small: Settings, capsys: Capture) -> None:
    examined = examine(msgspec.structs.replace(small, transport="inline"), capsys)

    assert_useful(examined["shared_memory"], Severity.WARNING, says=["as set", "copied"], fix="unset NEREID_TRANSPORT")
    assert not examined.all("dev_shm")


@pytest.mark.system
def test_models_that_are_not_ready_are_named_with_the_reason(hurting: Settings, capsys: Capture) -> None:
    examined = examine(hurting, capsys)
    summary, *others = examined.all("models")

    assert examined.code == 0
    assert f"{len(LOADED)} of the {len(LOADED) + 2} models" in summary.message
    assert [finding.severity for finding in others] == [Severity.WARNING] * 2
    assert_useful(others[0], Severity.WARNING, says=["broken", "its weights are missing"], fix="remove it")
    assert_useful(others[1], Severity.WARNING, says=["too_large", "preferred size must be <= max batch size"], fix="remove it")


def test_models_that_nobody_asked_for_are_not_missed(without_triton: Settings, capsys: Capture) -> None:
    """A Triton of one's own may load models only when it is told to."""
    examined = examine_fake(FakeTriton(), without_triton, capsys)

    assert [finding.message.partition(" ")[0] for finding in examined.all("models")] == ["1", "b"]


def test_models_that_no_triton_can_load_are_named(without_triton: Settings, capsys: Capture) -> None:
    repository = Path(without_triton.model_repository)
    for name in ("a", "b", "exported"):
        (repository / name).mkdir()
        (repository / name / ("best.onnx" if name == "exported" else "config.pbtxt")).write_text("input {", encoding="utf-8")
    _, *others = examine_fake(FakeTriton(), without_triton, capsys).all("models")

    assert len(others) == 2
    assert_useful(others[0], Severity.WARNING, says=[f"{repository}/b/config.pbtxt: "], fix="mend it")
    assert_useful(others[1], Severity.WARNING, says=[f"`nereid add {repository}/exported`"], fix="mend it")


def test_models_whose_process_has_died_are_named(without_triton: Settings, capsys: Capture) -> None:
    """Only an inference shows it, whatever the backend: the embedded Triton runs ONNX models in processes as well."""
    fake = FakeTriton()
    fake.index = [(name, "1", "READY", "") for name in ("a", "other")]
    fake.refusal = grpc.StatusCode.INTERNAL, "Stub process '0_0' is not healthy."
    examined = examine_fake(fake, without_triton, capsys)

    assert examined.code == 1
    for name, finding in zip(["other", "a"], examined.all("model_process"), strict=True):
        assert_useful(finding, Severity.FAILURE, says=[f"Triton says that {name} is ready"], fix="nereid serve")
