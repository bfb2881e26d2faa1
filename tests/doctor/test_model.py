"""What is said of the default model: real models in a real Triton, each with one thing that hurts."""

from pathlib import Path

import msgspec
import pytest

from app.doctor.finding import Severity
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.doctor import setups
from tests.doctor.setups import assert_useful, examine
from tests.support import NEEDS_BYTES


def with_model(settings: Settings, model: str) -> Settings:
    return msgspec.structs.replace(settings, model=model)


@pytest.mark.system
@pytest.mark.parametrize(
    ("model", "code", "severity", "says", "fix"),
    [
        ("nameless", "labels", Severity.WARNING, ["nameless"], 'parameters { key: "labels"'),
        ("single", "precision", Severity.WARNING, ["single", "FP32"], "again with --production"),
        ("two_inputs", "model", Severity.FAILURE, ["match no supported head", "other UINT8 [1]"], "nereid pull"),
        ("broken", "model", Severity.FAILURE, ["broken", "not ready", "its weights are missing"], "start Triton again"),
        ("too_large", "model", Severity.FAILURE, ["too_large", "not ready"], "start Triton again"),
        # Triton does not give the reason for the last one, but the config in the repository does.
        ("too_large", "preferred_batch_size", Severity.FAILURE, ["16", "8"], "too_large/config.pbtxt"),
        ("nowhere", "model", Severity.FAILURE, ["Triton does not have nowhere"], "nereid pull nowhere"),
    ],
)
def test_a_model_that_hurts(  # noqa: PLR0913, PLR0917 - a table
    hurting: Settings, capsys: pytest.CaptureFixture[str], model: str, code: str, severity: Severity, says: list[str], fix: str
) -> None:
    examined = examine(with_model(hurting, model), capsys)

    assert examined.code == (severity is Severity.FAILURE)
    assert_useful(examined[code], severity, says=says, fix=fix)
    assert examined.code == 0 or not examined.all("inference")


def test_a_model_that_takes_floats(small: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(small, capsys)

    assert_useful(
        examined["input_type"], Severity.WARNING, says=["197 kB as FP32", "49 kB as UINT8"], fix="TYPE_UINT8 dims: [ 128, 128, 3 ]"
    )


def test_a_classifier(settings: Settings, triton: EmbeddedTriton, capsys: pytest.CaptureFixture[str]) -> None:
    assert triton.poll() is None
    sound = examine(with_model(settings, "bytes_to_logits"), capsys)
    broken = examine(with_model(settings, "infinite"), capsys)

    assert "returns logits of 4 classes" in sound["model"].message
    assert sound["inference"].severity is Severity.OK
    assert sound["labels"].severity is Severity.OK
    assert_useful(broken["inference"], Severity.FAILURE, says=["infinite", "not finite"], fix="log")


def test_the_config_is_checked_without_triton(without_triton: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setups.write(tmp_path)
    examined = examine(with_model(without_triton, "long_delay"), capsys)

    assert_useful(examined["queue_delay"], Severity.WARNING, says=["200 ms"], fix=str(tmp_path / "long_delay" / "config.pbtxt"))


def test_a_config_that_cannot_be_read(without_triton: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.pbtxt").write_text("max_batch_size: many\n", encoding="utf-8")
    examined = examine(with_model(without_triton, "odd"), capsys)

    assert_useful(examined["model_config"], Severity.FAILURE, says=["config.pbtxt: 1:17"], fix="correct it")


@pytest.mark.usefixtures("triton")
def test_the_default_model_of_the_project(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(settings, capsys)

    assert examined.code == 0
    assert "80 class names" in examined["labels"].message
    for code in ("model", "labels", "input_type", "batching", "queue_policy", "queue_delay", "inference"):
        assert examined[code].severity is Severity.OK


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("model", ["six_columns", "half_four_tensors", "yolo_head", "yolox_head", "unbatched"])
def test_a_model_of_ones_own_is_run(settings: Settings, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(with_model(settings, model), capsys)

    assert examined.code == 0
    assert f"{model} answers on cpu in " in examined["inference"].message


@NEEDS_BYTES
@pytest.mark.usefixtures("triton")
def test_a_model_that_does_not_accept_the_blank_file(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """No file is known that every model accepts, so it is no failure."""
    examined = examine(with_model(settings, "file_in"), capsys)

    assert examined.code == 0
    assert examined["inference"].severity is Severity.OK
    assert "not a blank PNG" in examined["inference"].message


def test_files_are_not_sent_where_they_cannot_be_read(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], triton: object
) -> None:
    """Under newer Pythons, the embedded Triton's models would crash on them."""
    assert triton
    monkeypatch.setattr("app.doctor.model._FIRST_PYTHON_WITHOUT_BYTES", (3, 0))
    examined = examine(with_model(settings, "file_in"), capsys)

    assert_useful(examined["inference"], Severity.WARNING, says=["encoded files"], fix="Python 3.12")
