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
def test_a_model_without_class_names(hurting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(with_model(hurting, "nameless"), capsys)

    assert_useful(examined["labels"], Severity.WARNING, says=["nameless"], fix='parameters { key: "labels"')


def test_a_model_that_takes_floats(small: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tensors are four times as large as those of bytes."""
    examined = examine(small, capsys)

    assert_useful(
        examined["input_type"], Severity.WARNING, says=["197 kB as FP32", "49 kB as UINT8"], fix="TYPE_UINT8 dims: [ 128, 128, 3 ]"
    )


def test_a_classifier(settings: Settings, triton: EmbeddedTriton, capsys: pytest.CaptureFixture[str]) -> None:
    """It is examined as a detector is; one that does not return what its config says is of no use."""
    assert triton.poll() is None
    sound = examine(with_model(settings, "bytes_to_logits"), capsys)
    broken = examine(with_model(settings, "infinite"), capsys)

    assert "returns logits of 4 classes" in sound["model"].message
    assert sound["inference"].severity is Severity.OK
    assert sound["labels"].severity is Severity.OK
    assert_useful(broken["inference"], Severity.FAILURE, says=["infinite", "not finite"], fix="log")


@pytest.mark.system
def test_a_model_with_unsupported_tensors(hurting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(with_model(hurting, "two_inputs"), capsys)

    assert examined.code == 1
    assert_useful(
        examined["model"],
        Severity.FAILURE,
        says=["the tensors of two_inputs match no supported head", "other UINT8 [1]"],
        fix="nereid pull",
    )
    assert examined["batching"].severity is Severity.OK
    assert not examined.all("inference")


@pytest.mark.system
def test_a_model_that_could_not_be_loaded(hurting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(with_model(hurting, "broken"), capsys)

    assert examined.code == 1
    assert_useful(
        examined["model"], Severity.FAILURE, says=["broken", "not ready", "its weights are missing"], fix="start Triton again"
    )


@pytest.mark.system
def test_a_model_whose_config_triton_rejects(hurting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Triton does not give the reason, but the config in the repository does."""
    examined = examine(with_model(hurting, "too_large"), capsys)
    file = Path(hurting.model_repository, "too_large", "config.pbtxt")

    assert examined.code == 1
    assert examined["model"].severity is Severity.FAILURE
    assert_useful(
        examined["preferred_batch_size"], Severity.FAILURE, says=["16", "8"], fix=f"remove preferred_batch_size from {file}"
    )


def test_a_model_that_triton_does_not_have(small: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(with_model(small, "nowhere"), capsys)

    assert examined.code == 1
    assert_useful(examined["model"], Severity.FAILURE, says=["Triton does not have nowhere"], fix="nereid pull nowhere")


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
