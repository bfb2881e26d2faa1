"""What is said of a Triton, of several, and of their inferences: one that is not there, or that answers as it is told."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from app.doctor import batching, inference
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from app.triton.client import TritonClient
from tests.doctor.setups import FAILURE, OK, WARNING, Examined, assert_finding, examine
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, infer_response, serving
from tests.support import eventually, free_port, own_arenas

Capture = pytest.CaptureFixture[str]
Fake = tuple[FakeTriton, TritonClient]
EXTENSIONS = ["model_configuration", "schedule_policy", "statistics"]
RESTRICTED = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-nereid'"
LARGER = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}


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


def fake(**attributes: object) -> FakeTriton:
    made = FakeTriton()
    for name, value in {"version": "2.59.1", "extensions": EXTENSIONS, **attributes}.items():
        setattr(made, name, value)
    return made


def examine_fakes(settings: Settings, capsys: Capture, *fakes: FakeTriton, before: str = "", **changes: object) -> Examined:
    with ExitStack() as stack:
        for each in fakes:
            stack.enter_context(fake_in_a_thread(each))
        endpoints = ",".join([*filter(None, [before]), *(each.url for each in fakes)])
        return examine(msgspec.structs.replace(settings, triton_endpoints=endpoints, model="a", **changes), capsys)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", ["{address}", "No such file or directory", "nereid serve"]),
        ("127.0.0.1:{port}", ["{address}", "Connection refused", "NEREID_TRITON_ENDPOINTS"]),
        ("no-such-host.invalid:8001", ["{address}", "NEREID_TRITON_ENDPOINTS"]),
        ("dns:///no-such-name.invalid:8001", ["dns:///no-such-name.invalid:8001", "resolved", "headless"]),
    ],
)
def test_triton_that_does_not_answer(without_triton: Settings, capsys: Capture, tmp_path: Path, url: str, says: list[str]) -> None:
    changes = {"triton_endpoints": url.format(port=free_port()), "triton_home": str(tmp_path)}
    settings = msgspec.structs.replace(without_triton, **changes)
    examined = examine(settings, capsys)

    assert examined.code == 1
    assert_finding(examined["triton"], FAILURE, *(each.format(address=settings.triton_address) for each in says))
    assert bool(examined.all("dev_shm")) is ("invalid" not in url)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to examine another user's Triton")
def test_triton_of_another_user(without_triton: Settings, capsys: Capture, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(without_triton, triton_endpoints="", triton_home=str(tmp_path))
    settings.triton_folder.mkdir(mode=0o700)
    os.chown(settings.triton_folder, 12345, 12345)
    examined = examine(settings, capsys)
    settings.triton_folder.rmdir()

    assert_finding(examined["triton"], FAILURE, "belongs to user 12345, and this is user 0", "sudo -u '#12345'")


def test_certificate_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    examined = examine(Settings(triton_endpoints="127.0.0.1:8001", triton_tls_folder=str(tmp_path)), capsys)

    assert examined.code == 1
    assert not examined.all("triton")  # another check tells


@pytest.mark.parametrize(
    ("attributes", "transport", "code", "severity", "says"),
    [
        ({}, "auto", "triton_version", OK, ["survives cancelled"]),
        ({"extensions": EXTENSIONS[1:]}, "auto", "extensions", FAILURE, ["Triton's model_configuration (", "NVIDIA Triton"]),
        # Without the key, pixels are copied, or nothing works where the setting requires shared memory.
        ({"refusal": RESTRICTED}, "auto", "shared_memory", WARNING, ["restricted", "NEREID_TRITON_CONTROL_KEY_FILE"]),
        ({"refusal": RESTRICTED}, "shm", "shared_memory", FAILURE, ["restricted", "NEREID_TRITON_CONTROL_KEY_FILE"]),
        # Newer Tritons do not allow it unless they are told to; those in other containers do not have it.
        *(
            ({"refusal": (grpc.StatusCode.INVALID_ARGUMENT, text)}, "auto", "shared_memory", WARNING, [text, fix])
            for text, fix in (("Client shared memory is disabled", "--allow-client-shm=true"), ("Unable to open", "--ipc=host"))
        ),
        ({"query_refusal": RESTRICTED}, "auto", "triton", FAILURE, ["restricted"]),
    ],
)
def test_triton_that_answers(  # noqa: PLR0913, PLR0917 - a table
    without_triton: Settings,
    capsys: Capture,
    attributes: dict[str, Any],
    transport: str,
    code: str,
    severity: Severity,
    says: list[str],
) -> None:
    before = own_arenas()
    examined = examine_fakes(without_triton, capsys, fake(**attributes), transport=transport)

    assert_finding(examined[code], severity, *says)
    assert own_arenas() == before


def test_triton_elsewhere_has_other_memory(without_triton: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("app.doctor.triton.ports.is_this_machine", lambda _: False)
    examined = examine_fakes(without_triton, capsys, fake(accepts_regions=False))

    assert examined["shared_memory"].severity is OK
    assert not examined.all("dev_shm") + examined.all("instances")
    assert examine_fakes(without_triton, capsys, fake(), transport="inline")["shared_memory"].severity is OK


def test_models_that_can_be_loaded_by_no_triton_are_named_and_not_those_that_nobody_asked_for(
    without_triton: Settings, capsys: Capture
) -> None:
    """A Triton of one's own may load models only when it is told to."""
    repository = Path(without_triton.model_repository)
    messages = [finding.message.partition(" ")[0] for finding in examine_fakes(without_triton, capsys, fake()).all("models")]
    assert messages == ["1", "b"]
    for name, file in (("a", "config.pbtxt"), ("b", "config.pbtxt"), ("exported", "best.onnx")):
        (repository / name).mkdir()
        (repository / name / file).write_text("input {", encoding="utf-8")
    _, broken, exported = examine_fakes(without_triton, capsys, fake()).all("models")
    assert_finding(broken, WARNING, f"{repository}/b/config.pbtxt: ", "mend it")
    assert_finding(exported, WARNING, f"`nereid add {repository}/exported`", "mend it")


def test_models_whose_process_has_died_are_named(without_triton: Settings, capsys: Capture) -> None:
    """Only an inference shows it, whatever the backend: the embedded Triton runs ONNX models in processes as well."""
    dead = fake(index=[(name, "1", "READY", "") for name in ("a", "other")])
    dead.refusal = grpc.StatusCode.INTERNAL, "Stub process '0_0' is not healthy."
    examined = examine_fakes(without_triton, capsys, dead)

    assert examined.code == 1
    for name, finding in zip(["other", "a"], examined.all("model_process"), strict=True):
        assert_finding(finding, FAILURE, f"Triton says that {name} is ready", "nereid serve")


def test_each_of_several_tritons_is_examined(without_triton: Settings, capsys: Capture) -> None:
    dead, alive = f"127.0.0.1:{free_port()}", fake()
    examined = examine_fakes(without_triton, capsys, alive, before=dead)

    down, up = examined.all("triton")
    assert_finding(down, FAILURE, dead, "Connection refused")
    assert_finding(up, OK, f"{alive.url}: Triton 2.59.1 answers at {alive.url}")
    assert examined["triton_version"].message.startswith(f"{alive.url}: ")
    assert examined.report.triton == f"{dead},{alive.url}"


@pytest.mark.parametrize(
    ("attributes", "code", "severity", "says"),
    [
        ({}, "same_model", OK, []),
        # A Triton with another model of that name is not used for it.
        ({"config": LARGER}, "same_model", WARNING, ["at {1} than at {0}", "same model repository"]),
        # One that has no such model may be for other models.
        ({"model_refusal": (grpc.StatusCode.NOT_FOUND, "not found"), "index": []}, "model", WARNING, ["{1}", "does not have a"]),
    ],
)
def test_several_tritons_have_the_same_model(  # noqa: PLR0913, PLR0917 - a table
    without_triton: Settings, capsys: Capture, attributes: dict[str, Any], code: str, severity: Severity, says: list[str]
) -> None:
    fakes = fake(), fake(**attributes)
    examined = examine_fakes(without_triton, capsys, *fakes)

    assert_finding(examined.all(code)[-1], severity, *(text.format(*(each.url for each in fakes)) for text in says))


async def measure(fake_triton: Fake, timeout_seconds: float = 60) -> dict[str, Finding]:
    """Measure a fake; returns the findings by their codes."""
    model = batching.read({"name": "tiny", "dynamic_batching": {}})
    found = inference.measure(fake_triton[1], SPEC, model, "config.pbtxt", timeout_seconds)
    return {finding.code: finding async for finding in found}


@pytest.mark.parametrize(
    ("columns", "message", "seconds", "code", "severity", "says"),
    [
        (6, "", 60, "statistics", WARNING, ["does not tell its statistics", "restrict"]),
        (6, "", 0, "inference", FAILURE, ["later than the deadline of 0 s"]),
        (5, "", 60, "inference", FAILURE, ["(2, 5)", "log"]),
        (6, "out of memory\nAt:\n  model.py", 60, "inference", FAILURE, ["tiny fails", "out of memory", "log"]),
        (
            6,
            "Stub process 'tiny_0_0' is not healthy.",
            60,
            "model_process",
            FAILURE,
            ["tiny is ready", "'tiny_0_0'", "start Triton"],
        ),
    ],
)
async def test_inferences(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake, columns: int, message: str, seconds: float, code: str, severity: Severity, says: list[str]
) -> None:
    fake_triton[0].answer = infer_response(output0=np.zeros((2, columns), np.float32))
    if message:
        fake_triton[0].refusal = grpc.StatusCode.INTERNAL, message
    found = await measure(fake_triton, seconds)

    assert_finding(found[code], severity, *says)
    assert len(fake_triton[0].requests) == (4 if columns == 6 and not message else 1)


async def test_triton_that_hangs_is_left_alone(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inferences are not cancelled, which could crash it, while others may still be answered."""
    hanging, _ = fake_triton
    hanging.may_answer.clear()
    monkeypatch.setattr(inference, "_PATIENCE_SECONDS", 0.1)
    found = await measure(fake_triton)

    assert_finding(found["inference"], FAILURE, "no answer for 0.1 s", "log")
    assert (hanging.running, hanging.cancelled) == (1, 0)
    hanging.may_answer.set()
    await eventually(lambda: hanging.running == 0)
    assert hanging.cancelled == 0
