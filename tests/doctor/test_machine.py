"""What is said of this machine."""

import sys
from pathlib import Path

import msgspec
import pytest
from PIL import features

from app.doctor import machine
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from tests.doctor.setups import assert_useful, run_command
from tests.programs import obeying_modes

PREPARED = "import sys; {}; from app.__main__ import main; sys.exit(main(['doctor', '--json']))"


def check(settings: Settings) -> dict[str, Finding]:
    return {finding.code: finding for finding in machine.check(settings)}


def test_the_machine_that_runs_the_tests_is_ok(without_triton: Settings) -> None:
    """The tests could not run on a machine that fails these checks."""
    found = check(without_triton)

    assert set(found) == {"pillow", "image_formats", "jpeg_decoder", "opencv", "model_repository"}
    assert {finding.severity for code, finding in found.items() if code != "pillow"} == {Severity.OK}
    assert "libjpeg-turbo" in found["jpeg_decoder"].message


def test_stock_pillow_is_a_warning(without_triton: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", "13.0.0")
    assert_useful(check(without_triton)["pillow"], Severity.WARNING, says=["stock Pillow"], fix="pip uninstall -y pillow")

    monkeypatch.setattr("PIL.__version__", "12.1.1.post0")
    assert check(without_triton)["pillow"].severity is Severity.OK


def test_formats_that_pillow_was_compiled_without(without_triton: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "check", lambda name: name in {"jpg", "libjpeg_turbo"})
    found = check(without_triton)

    assert_useful(found["image_formats"], Severity.FAILURE, says=["zlib and libwebp"], fix="libwebp-dev")
    assert "pillow_jpeg" not in found


def test_a_slow_libjpeg_in_pillow(without_triton: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes what simplejpeg cannot."""
    monkeypatch.setattr(features, "check", lambda name: name != "libjpeg_turbo")
    found = check(without_triton)

    assert found["image_formats"].severity is Severity.OK
    assert_useful(found["pillow_jpeg"], Severity.WARNING, says=["without libjpeg-turbo"], fix="libjpeg-dev")


@pytest.mark.system
@pytest.mark.parametrize(
    ("package", "code", "fix"),
    [("simplejpeg", "jpeg_decoder", "--force-reinstall simplejpeg"), ("cv2", "opencv", "--force-reinstall opencv-python-headless")],
)
def test_a_library_that_cannot_be_imported(package: str, code: str, fix: str) -> None:
    prepared = PREPARED.format(f"sys.modules[{package!r}] = None")
    exit_code, found = run_command(sys.executable, "-c", prepared)

    assert exit_code == 1
    assert_useful(found[code], Severity.FAILURE, says=[package, "does not start"], fix=fix)
    assert [name for name, finding in found.items() if finding.severity is Severity.FAILURE] == [code, "triton"]


@pytest.mark.parametrize(("extra", "module", "model"), [("ocr", "pyclipper", "ocr_detection"), ("masks", "pycocotools", "shapes")])
def test_extra_that_no_setting_needs_is_missed_if_there_is_a_model_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, module: str, model: str
) -> None:
    settings = Settings(model_repository=str(tmp_path), task_models="segmentation=shapes")
    monkeypatch.setattr("app.host.extras._is_installed", lambda name: name != module)
    without_model = check(settings)[extra]
    (tmp_path / model).mkdir()

    fix = f"pip install 'nereid-gateway[{extra}]'"
    assert (without_model.severity, fix in without_model.message) == (Severity.OK, True)
    assert_useful(check(settings)[extra], Severity.WARNING, says=["needs what is not installed", module], fix=fix)


def embedded(repository: Path, model: str = "yolo11n") -> Settings:
    return Settings(model_repository=str(repository), model=model)


def test_a_repository_that_is_not_there(tmp_path: Path, without_triton: Settings) -> None:
    """The embedded Triton gets one when it starts; another Triton has its own."""
    nowhere = tmp_path / "nowhere"
    finding = check(embedded(nowhere))["model_repository"]

    assert finding.severity is Severity.OK
    assert finding.message == f"the model repository {nowhere} has no model that was pulled; serve pulls yolo11n when it starts"
    elsewhere = msgspec.structs.replace(without_triton, model_repository=str(nowhere), model="other")
    assert check(elsewhere)["model_repository"].severity is Severity.OK


def test_a_repository_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(machine, "loadable_models", fail)
    finding = check(embedded(tmp_path))["model_repository"]

    assert_useful(finding, Severity.FAILURE, says=[f"{tmp_path}: Permission denied"], fix="let this user read")


@pytest.mark.system
@pytest.mark.parametrize(
    ("endpoint", "severity", "says"),
    [("", Severity.FAILURE, "{}: Permission denied"), ("127.0.0.1:1", Severity.OK, "{}: Permission denied; it is not needed")],
)
def test_a_closed_repository_without_a_triton(tmp_path: Path, endpoint: str, severity: Severity, says: str) -> None:
    (closed := tmp_path / "closed").mkdir(mode=0)
    settings = {"NEREID_MODEL_REPOSITORY": str(closed), "NEREID_TRITON_ENDPOINTS": endpoint}
    _, found = run_command(*obeying_modes(), sys.executable, "-m", "app", "doctor", "--json", **settings)

    assert found["triton"].severity is Severity.FAILURE
    assert found["model_repository"].severity is severity
    assert found["model_repository"].message.startswith(says.format(closed))


def test_a_model_that_is_not_in_the_repository(tmp_path: Path) -> None:
    """It is missing only if it cannot be pulled."""
    known, unknown = (check(embedded(tmp_path, model))["model_repository"] for model in ("yolo11n", "yolo12x"))

    assert known.severity is Severity.OK
    assert "serve pulls yolo11n" in known.message
    fix = "NEREID_MODEL=NAME, one of yolo11n, yolo11n_file, yolox_nano, efficientnet_lite0"
    assert_useful(unknown, Severity.FAILURE, says=["yolo12x"], fix=fix)
