"""What is said of this machine, and of the model repository."""

import sys
from pathlib import Path

import pytest
from PIL import features

from app.doctor import machine
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding, run_command
from tests.programs import obeying_modes

PREPARED = "import sys; {}; from app.__main__ import main; sys.exit(main(['doctor', '--json']))"
ELSEWHERE = Settings(triton_endpoints="127.0.0.1:1")


def check(settings: Settings = ELSEWHERE) -> dict[str, Finding]:
    return {finding.code: finding for finding in machine.check(settings)}


def test_machine_that_runs_the_tests_is_ok() -> None:
    """The tests could not run on a machine that fails these checks."""
    found = check()

    assert set(found) == {"pillow", "image_formats", "jpeg_decoder", "opencv", "model_repository"}
    assert {finding.severity for code, finding in found.items() if code != "pillow"} == {OK}
    assert "libjpeg-turbo" in found["jpeg_decoder"].message


def test_pillow_and_what_it_was_compiled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", "13.0.0")
    assert_finding(check()["pillow"], WARNING, "stock Pillow", "pip uninstall -y pillow")
    monkeypatch.setattr("PIL.__version__", "12.1.1.post0")
    assert check()["pillow"].severity is OK
    monkeypatch.setattr(features, "check", lambda name: name in {"jpg", "libjpeg_turbo"})
    assert_finding(check()["image_formats"], FAILURE, "zlib and libwebp", "libwebp-dev")
    assert "pillow_jpeg" not in check()
    monkeypatch.setattr(features, "check", lambda name: name != "libjpeg_turbo")
    assert check()["image_formats"].severity is OK
    assert_finding(check()["pillow_jpeg"], WARNING, "without libjpeg-turbo", "libjpeg-dev")  # for what simplejpeg cannot decode


@pytest.mark.system
@pytest.mark.parametrize(("package", "code"), [("simplejpeg", "jpeg_decoder"), ("cv2", "opencv")])
def test_library_that_cannot_be_imported(package: str, code: str) -> None:
    exit_code, found = run_command(sys.executable, "-c", PREPARED.format(f"sys.modules[{package!r}] = None"))

    assert exit_code == 1
    assert_finding(found[code], FAILURE, package, "does not start", "--force-reinstall")
    assert [name for name, finding in found.items() if finding.severity is FAILURE] == [code, "triton"]


@pytest.mark.parametrize(
    ("endpoint", "model", "severity", "says"),
    [
        # Whether it is there or not: the embedded Triton gets one when it starts, and another Triton has its own.
        ("", "yolo11n", OK, ["has no model that was pulled; serve pulls yolo11n when it starts"]),
        ("127.0.0.1:1", "other", OK, []),
        ("", "yolo12x", FAILURE, ["yolo12x is neither among them", "one of yolo11n, yolo11n_file, yolox_nano"]),
    ],
)
@pytest.mark.parametrize("folder", [".", "nowhere"])
def test_model_that_is_not_in_the_repository(  # noqa: PLR0913, PLR0917 - a table
    tmp_path: Path, folder: str, endpoint: str, model: str, severity: Severity, says: list[str]
) -> None:
    settings = Settings(model_repository=str(tmp_path / folder), model=model, triton_endpoints=endpoint)

    assert_finding(check(settings)["model_repository"], severity, f"{tmp_path / folder}", *says)


def test_repository_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(machine, "loadable_models", fail)
    found = check(Settings(model_repository=str(tmp_path)))

    assert_finding(found["model_repository"], FAILURE, f"{tmp_path}: Permission denied", "let this user read")
    assert_finding(check()["model_repository"], OK, "it is not needed")


@pytest.mark.system
@pytest.mark.parametrize(("endpoint", "severity"), [("", FAILURE), ("127.0.0.1:1", OK)])
def test_closed_repository_without_a_triton(tmp_path: Path, endpoint: str, severity: Severity) -> None:
    (closed := tmp_path / "closed").mkdir(mode=0)
    settings = {"NEREID_MODEL_REPOSITORY": str(closed), "NEREID_TRITON_ENDPOINTS": endpoint}
    _, found = run_command(*obeying_modes(), sys.executable, "-m", "app", "doctor", "--json", **settings)

    assert found["triton"].severity is FAILURE
    assert_finding(found["model_repository"], severity, f"{closed}: Permission denied")
