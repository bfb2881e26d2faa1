"""What is said of Tritons and their models: real ones, some with configs that hurt, and fakes that answer as they are told."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal

from app import __version__
from app.doctor import batching, inference, report
from app.doctor.finding import Finding, Severity
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.repository import DESCRIPTION
from tests.doctor.setups import FAILURE, OK, WARNING, Examined, assert_finding, examine
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, config_with, infer_response, serving
from tests.support import NEEDS_BYTES, ROOT, eventually, free_port, own_arenas, triton_home

Capture = pytest.CaptureFixture[str]

GOOD = """
name: "NAME"
backend: "python"
max_batch_size: 8
input { name: "image" data_type: TYPE_UINT8 dims: [ 32, 32, 3 ] }
output { name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "det_boxes" data_type: TYPE_FP32 dims: [ 300, 4 ] }
output { name: "det_scores" data_type: TYPE_FP32 dims: [ 300 ] }
output { name: "det_classes" data_type: TYPE_INT32 dims: [ 300 ] }
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching { default_queue_policy {
  timeout_action: REJECT default_timeout_microseconds: 600000000 allow_timeout_override: true max_queue_size: 64 } }
parameters { key: "labels" value { string_value: "nothing" } }
parameters { key: "box_units" value { string_value: "pixels" } }
parameters { key: "wait_milliseconds" value { string_value: "10" } }
parameters { key: "wait_milliseconds_per_image" value { string_value: "0" } }
"""
CONFIGS = {
    "good": GOOD,
    "nameless": GOOD.replace('key: "labels"', 'key: "remarks"').replace('key: "box_units"', 'key: "unit"'),
    "two_inputs": GOOD + 'input { name: "other" data_type: TYPE_UINT8 dims: [ 1 ] }',
    "too_large": GOOD.replace("dynamic_batching {", "dynamic_batching { preferred_batch_size: [ 16 ]"),
    "single": GOOD + 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
    "broken": GOOD,
}
WITH_A_MODEL = "triton_version shared_memory model labels batching inference dev_shm triton queue_policy queue_delay input_type"


@pytest.fixture(scope="module")
def hurting(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a running Triton with these models; `good` is the default one."""
    repository = tmp_path_factory.mktemp("hurting")
    for name, config in CONFIGS.items():
        (version := repository / name / "1").mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config.replace("NAME", name), encoding="utf-8")
        shutil.copy(ROOT / "bench" / "models" / "model.py", version)
    (repository / "single" / DESCRIPTION).touch()
    (repository / "broken" / "1" / "model.py").write_text("raise ValueError('its weights are missing')", encoding="utf-8")
    home = triton_home(tmp_path_factory.mktemp("triton"))
    own = msgspec.structs.replace(settings, model_repository=str(repository), triton_home=home, model="good", port=free_port())
    server = EmbeddedTriton(own)
    server.start()
    yield own
    server.stop()


@pytest.fixture
def small(served: Settings) -> Settings:
    """Settings of the session's Triton; a small model without dynamic batching is the default one."""
    return msgspec.structs.replace(served, model="six_columns", timeout_seconds=10, port=free_port())


@pytest.mark.system
def test_good_model_gives_no_advice_and_others_that_are_not_ready_are_named(hurting: Settings, capsys: Capture) -> None:
    examined = examine(hurting, capsys)

    assert (examined.code, examined.report.failures) == (0, 0)
    for code in WITH_A_MODEL.split():
        assert_finding(examined[code], OK)
    assert {"open_files", "memory", "workers", "api_keys", "gateway"} <= {finding.code for finding in examined.report.findings}
    made = examined.report
    assert (made.triton, made.model, made.version) == (hurting.triton_address, "good", __version__)
    summary, *others = examined.all("models")
    assert f"{len(CONFIGS) - 2} of the {len(CONFIGS)} models" in summary.message
    assert len(others) == 2
    assert_finding(others[0], WARNING, "broken", "its weights are missing", "remove it")
    assert_finding(others[1], WARNING, "too_large", "preferred size must be <= max batch size")


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "code", "severity", "says"),
    [
        ("nameless", "labels", WARNING, ["nameless", 'parameters { key: "labels"']),
        ("nameless", "box_units", WARNING, ["pixels are assumed", 'parameters { key: "box_units"']),
        ("single", "precision", WARNING, ["single", "FP32", "again with --production"]),
        ("two_inputs", "model", FAILURE, ["match no supported head", "other UINT8 [1]", "nereid pull"]),
        ("broken", "model", FAILURE, ["broken", "not ready", "its weights are missing", "start Triton again"]),
        # Triton does not give the reason for this one, but the config in the repository does.
        ("too_large", "preferred_batch_size", FAILURE, ["16", "8", "too_large/config.pbtxt"]),
        ("nowhere", "model", FAILURE, ["Triton does not have nowhere", "nereid pull nowhere"]),
    ],
)
def test_model_that_hurts(  # noqa: PLR0913, PLR0917 - a table
    hurting: Settings, capsys: Capture, model: str, code: str, severity: Severity, says: list[str]
) -> None:
    examined = examine(msgspec.structs.replace(hurting, model=model), capsys)

    assert examined.code == (severity is FAILURE)
    assert_finding(examined[code], severity, *says)
    assert examined.code == 0 or not examined.all("inference")


@pytest.mark.parametrize(
    ("model", "code", "severity", "says"),
    [
        ("six_columns", "input_type", WARNING, ["197 kB as FP32", "49 kB as UINT8", "TYPE_UINT8 dims: [ 128, 128, 3 ]"]),
        ("bytes_to_logits", "model", OK, ["returns logits of 4 classes"]),
        ("infinite", "inference", FAILURE, ["infinite", "not finite", "log"]),
        # No file is known that every model accepts, so it is no failure.
        pytest.param("file_in", "inference", OK, ["not a blank PNG"], marks=NEEDS_BYTES),
        ("yolo11n", "labels", OK, ["80 class names"]),
    ],
)
def test_model_of_the_session(  # noqa: PLR0913, PLR0917 - a table
    small: Settings, capsys: Capture, model: str, code: str, severity: Severity, says: list[str]
) -> None:
    examined = examine(msgspec.structs.replace(small, model=model), capsys)

    assert examined.code == (severity is FAILURE)
    assert_finding(examined[code], severity, *says)
    if model == "yolo11n":
        assert {examined[each].severity for each in ("model", "input_type", "batching", "queue_policy", "inference")} == {OK}


@pytest.mark.parametrize(("waits", "says"), [(600.0, "cameras of 0.01"), (0.0, "request_timeout_ms: 1000")])
def test_answers_come_while_frigate_waits(
    small: Settings, capsys: Capture, monkeypatch: pytest.MonkeyPatch, waits: float, says: str
) -> None:
    monkeypatch.setattr(inference, "_FRIGATE_SECONDS", waits)
    monkeypatch.setattr(inference, "_CAMERA_RATE", 0.01)  # the busiest machine has time for some cameras
    examined = examine(msgspec.structs.replace(small, frigate_zmq="tcp://127.0.0.1:5555"), capsys)
    assert_finding(examined["frigate"], OK if waits else WARNING, says)


def test_text_is_one_line_for_each_finding_and_each_line_of_a_fix(small: Settings, capsys: Capture) -> None:
    settings = msgspec.structs.replace(small, model="unbatched")
    findings = examine(settings, capsys).report.findings
    code = report.run(settings, as_json=False, is_strict=True)
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("WARN  queue_policy: unbatched has no"))

    assert (code, examine(settings, capsys).code) == (1, 0)  # without `--strict`, scripts continue
    assert sum(line[:6] in {"ok    ", "WARN  ", "FAIL  "} for line in lines) == len(findings)
    assert lines[start + 1].startswith("      fix: add to ")
    assert (lines[start + 2].strip(), lines[start + 8].strip()) == ("dynamic_batching {", "max_queue_size: 256")
    assert lines[-1] == f"0 failures, {sum(line.startswith('WARN') for line in lines)} warnings"


Fake = tuple[FakeTriton, TritonClient]
EXTENSIONS = ["model_configuration", "schedule_policy", "statistics"]
RESTRICTED = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'triton-grpc-protocol-nereid'"
LARGER = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}


@pytest.fixture
def without_triton(tmp_path: Path) -> Settings:
    return Settings(triton_endpoints=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path), port=free_port())


def fake(**attributes: object) -> FakeTriton:
    made = FakeTriton()
    for name, value in {"version": "2.59.1", "extensions": EXTENSIONS, **attributes}.items():
        setattr(made, name, value)
    return made


def examine_fakes(settings: Settings, capsys: Capture, *fakes: FakeTriton, before: str = "", **changes: object) -> Examined:
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        for each in fakes:
            stack.enter_context(portal.wrap_async_context_manager(serving(each)))
        endpoints = ",".join([*filter(None, [before]), *(each.url for each in fakes)])
        return examine(msgspec.structs.replace(settings, triton_endpoints=endpoints, model="a", **changes), capsys)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", ["{address}", "No such file or directory", "nereid serve"]),
        ("127.0.0.1:{port}", ["{address}", "Connection refused", "NEREID_TRITON_ENDPOINTS"]),
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


@pytest.mark.parametrize(
    ("attributes", "transport", "code", "severity", "says"),
    [
        ({}, "auto", "triton_version", OK, ["survives cancelled"]),
        ({"extensions": EXTENSIONS[1:]}, "auto", "extensions", FAILURE, ["Triton's model_configuration (", "NVIDIA Triton"]),
        # Without the key, pixels are copied, or nothing works where the setting requires shared memory.
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
    examined = examine_fakes(without_triton, capsys, made := fake(**attributes), transport=transport)

    assert_finding(examined[code], severity, *says)
    assert (own_arenas(), made.regions) == (before, set())


def test_models_whose_process_has_died_are_named(without_triton: Settings, capsys: Capture) -> None:
    """Only an inference shows it, whatever the backend: the embedded Triton runs ONNX models in processes as well."""
    dead = fake(index=[(name, "1", "READY", "") for name in ("a", "other")])
    dead.refusal = grpc.StatusCode.INTERNAL, "Stub process '0_0' is not healthy."
    examined = examine_fakes(without_triton, capsys, dead)

    assert examined.code == 1
    for name, finding in zip(["other", "a"], examined.all("model_process"), strict=True):
        assert_finding(finding, FAILURE, f"Triton says that {name} is ready", "nereid serve")


def test_each_of_several_tritons_is_examined(without_triton: Settings, capsys: Capture) -> None:
    """One with another model of that name is not used for it; one that has no such model may be for other models."""
    dead, alive, other = f"127.0.0.1:{free_port()}", fake(), fake(config=LARGER)
    without = fake(model_refusal=(grpc.StatusCode.NOT_FOUND, "not found"), index=[])
    examined = examine_fakes(without_triton, capsys, alive, other, without, before=dead)

    down, up, *_ = examined.all("triton")
    assert_finding(down, FAILURE, dead, "Connection refused")
    assert_finding(up, OK, f"{alive.url}: Triton 2.59.1 answers at {alive.url}")
    assert_finding(examined["same_model"], WARNING, f"at {other.url} than at {alive.url}", "same model repository")
    assert_finding(examined.all("model")[-1], WARNING, without.url, "does not have a")


@pytest.mark.parametrize(
    ("head", "row", "fix"),
    [
        ("yolox", [0, 0, 90, 90, 0.1, 0], '"head" value { string_value: "deepstream" }'),
        ("yolox", [9, 9, 4, 90, 0.1, 0], '"yolov5" } }, or without an objectness:'),
        ("yolov5", [9, 9, 4, 4, -9, -9], "export it again with its sigmoid"),
        ("end_to_end", [9, 9, 4, 4, 0.1, 0], "a `head` of the page"),
    ],
)
def test_fix_of_a_wrong_head_is_that_of_its_reason(
    without_triton: Settings, capsys: Capture, head: str, row: list[float], fix: str
) -> None:
    rows = np.array([row] * 21, np.float32)
    rows[:20, 3] += 1  # rows that are like the last one are padding
    config = {**config_with(head=head), "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [21, 6]}]}
    made = fake(config=config, knows_picture=True, answer=infer_response(output0=rows))
    assert_finding(examine_fakes(without_triton, capsys, made)["head"], WARNING, fix)


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
    ],
)
async def test_inferences(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake, columns: int, message: str, seconds: float, code: str, severity: Severity, says: list[str]
) -> None:
    fake_triton[0].answer = infer_response(output0=np.zeros((2, columns), np.float32))
    if message:
        fake_triton[0].refusal = grpc.StatusCode.INTERNAL, message
    assert_finding((await measure(fake_triton, seconds))[code], severity, *says)
    assert len(fake_triton[0].requests) == (4 if columns == 6 and not message else 1)


async def test_triton_that_hangs_is_left_alone(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inferences are not cancelled, which could crash it, while others may still be answered."""
    hanging, _ = fake_triton
    hanging.may_answer.clear()
    monkeypatch.setattr(inference, "_PATIENCE_SECONDS", 0.1)
    assert_finding((await measure(fake_triton))["inference"], FAILURE, "no answer for 0.1 s", "log")
    assert (hanging.running, hanging.cancelled) == (1, 0)
    hanging.may_answer.set()
    await eventually(lambda: hanging.running == 0)
    assert hanging.cancelled == 0


def test_config_is_checked_without_triton_and_the_report_is_one_json(
    without_triton: Settings, tmp_path: Path, capsys: Capture
) -> None:
    (file := tmp_path / "odd" / "config.pbtxt").parent.mkdir()
    file.write_text("dynamic_batching { max_queue_delay_microseconds: 200000 }", encoding="utf-8")
    examined = examine(msgspec.structs.replace(without_triton, model="odd"), capsys)
    assert_finding(examined["queue_delay"], WARNING, "200 ms", str(file))
    file.write_text("max_batch_size: many\n", encoding="utf-8")
    assert report.run(msgspec.structs.replace(without_triton, model="odd"), as_json=True, is_strict=False) == 1
    document = json.loads(capsys.readouterr().out)

    assert set(document) == {"version", "status", "triton", "model", "warnings", "failures", "findings"}
    assert {tuple(finding) for finding in document["findings"]} == {("code", "severity", "message", "fix")}
    assert sorted(each["code"] for each in document["findings"] if each["severity"] == "failure") == ["model_config", "triton"]
