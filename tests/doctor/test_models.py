"""What is said of models in a real Triton: the small ones, those of the project, and some with configs that hurt."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from app import __version__
from app.doctor import report
from app.doctor.finding import Severity
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.repository import DESCRIPTION
from app.triton.shared_memory import Arena
from app.triton.statistics import read_statistics
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding, examine
from tests.support import NEEDS_BYTES, ROOT, free_port, own_arenas, regions, triton_home

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
parameters { key: "wait_milliseconds" value { string_value: "10" } }
parameters { key: "wait_milliseconds_per_image" value { string_value: "0" } }
"""
CONFIGS = {
    "good": GOOD,
    "nameless": GOOD.replace('key: "labels"', 'key: "remarks"'),
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
def small(settings: Settings, triton: EmbeddedTriton) -> Settings:
    """Settings of the session's Triton; a small model without dynamic batching is the default one."""
    assert triton.poll() is None
    return msgspec.structs.replace(settings, model="six_columns", timeout_seconds=10, port=free_port())


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
        ("six_columns", "triton_version", OK, ["2.51.0", "may crash", "the embedded one"]),
        ("half_four_tensors", "inference", OK, ["half_four_tensors answers on cpu in "]),
        ("yolo_head", "inference", OK, ["yolo_head answers on cpu in "]),
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


def test_files_are_not_sent_where_they_cannot_be_read(small: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Under newer Pythons, the embedded Triton's models would crash on them."""
    monkeypatch.setattr("app.doctor.model._FIRST_PYTHON_WITHOUT_BYTES", (3, 0))
    examined = examine(msgspec.structs.replace(small, model="file_in"), capsys)

    assert_finding(examined["inference"], WARNING, "encoded files", "Python 3.12")


def test_triton_gets_little_and_keeps_nothing(small: Settings, capsys: Capture) -> None:
    async def count_images() -> int:
        client = TritonClient(small.triton_address)
        try:
            return (await read_statistics(client, 5))[small.model, "1"].inferences
        finally:
            await client.close()

    before = asyncio.run(count_images()), own_arenas(), asyncio.run(regions(small))

    assert examine(small, capsys)["shared_memory"].severity is OK
    assert (asyncio.run(count_images()) - 4, own_arenas(), asyncio.run(regions(small))) == before


@pytest.mark.parametrize("is_strict", [False, True])
def test_warning_is_exit_code_1_if_it_is_to_be(small: Settings, capsys: Capture, *, is_strict: bool) -> None:
    """Without `--strict`, scripts continue."""
    examined = examine(small, capsys, is_strict=is_strict)

    assert (examined.code, examined.report.status, examined.report.failures) == (is_strict, WARNING, 0)


def test_text_is_one_line_for_each_finding_and_each_line_of_a_fix(small: Settings, capsys: Capture) -> None:
    settings = msgspec.structs.replace(small, model="unbatched")
    findings = examine(settings, capsys).report.findings
    code = report.run(settings, as_json=False, is_strict=False)
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("WARN  queue_policy: unbatched has no"))

    assert code == 0
    assert sum(line[:6] in {"ok    ", "WARN  ", "FAIL  "} for line in lines) == len(findings)
    assert lines[start + 1].startswith("      fix: add to ")
    assert (lines[start + 2].strip(), lines[start + 8].strip()) == ("dynamic_batching {", "max_queue_size: 256")
    assert lines[-1] == f"0 failures, {sum(line.startswith('WARN') for line in lines)} warnings"


def test_report_as_json(without_triton: Settings, capsys: Capture) -> None:
    code = report.run(without_triton, as_json=True, is_strict=False)
    document = json.loads(capsys.readouterr().out)
    severities = [finding["severity"] for finding in document["findings"]]

    assert (code, document["status"], document["failures"], severities.count("failure")) == (1, "failure", 1, 1)
    assert set(document) == {"version", "status", "triton", "model", "warnings", "failures", "findings"}
    assert {tuple(finding) for finding in document["findings"]} == {("code", "severity", "message", "fix")}


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        # It may crash; a user can update it, unlike the embedded one.
        ({"triton_endpoints": "own"}, "triton_version", ["2.51.0", "may crash", "2.59.1"]),
        ({"transport": "inline"}, "shared_memory", ["as set", "copied", "unset NEREID_TRANSPORT"]),
    ],
)
def test_triton_of_ones_own_and_without_shared_memory(
    small: Settings, capsys: Capture, changes: dict[str, str], code: str, says: list[str]
) -> None:
    changes = changes | ({"triton_endpoints": small.triton_address} if "triton_endpoints" in changes else {})
    examined = examine(msgspec.structs.replace(small, **changes), capsys)

    assert_finding(examined[code], WARNING, *says)
    assert ("transport" in changes) != bool(examined.all("dev_shm"))


def test_machine_without_shared_memory(small: Settings, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Arena, "__init__", fail)

    assert_finding(examine(small, capsys)["shared_memory"], WARNING, "Permission denied", "tmpfs")


@pytest.mark.parametrize(
    ("config", "code", "severity", "says"),
    [
        ("dynamic_batching { max_queue_delay_microseconds: 200000 }", "queue_delay", WARNING, ["200 ms", "{}"]),
        ("max_batch_size: many\n", "model_config", FAILURE, ["config.pbtxt: 1:17", "correct it"]),
    ],
)
def test_config_is_checked_without_triton(  # noqa: PLR0913, PLR0917 - a table
    without_triton: Settings, tmp_path: Path, capsys: Capture, config: str, code: str, severity: Severity, says: list[str]
) -> None:
    (file := tmp_path / "odd" / "config.pbtxt").parent.mkdir()
    file.write_text(config, encoding="utf-8")
    examined = examine(msgspec.structs.replace(without_triton, model="odd"), capsys)

    assert_finding(examined[code], severity, *(text.format(file) for text in says))
