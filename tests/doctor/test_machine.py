"""What is said of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from PIL import features

from app.doctor import machine
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from tests.doctor.setups import assert_useful
from tests.support import REPOSITORY, ROOT, free_port

STOCK_PILLOW = "12.1.1"
PREPARED = "import sys; {}; from app.__main__ import main; sys.exit(main(['doctor', '--json', '--no-burst']))"


def check(settings: Settings) -> dict[str, Finding]:
    return {finding.code: finding for finding in machine.check(settings)}


def run_prepared(preparation: str) -> tuple[int, dict[str, Finding]]:
    """Run the command in a process in which something was done before anything was imported."""
    environ = {**os.environ, "NEREID_TRITON_HOME": "/nowhere", "NEREID_PORT": str(free_port())}
    result = subprocess.run(
        [sys.executable, "-c", PREPARED.format(preparation)], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    findings: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    return result.returncode, {finding["code"]: msgspec.convert(finding, Finding) for finding in findings}


def test_this_machine(without_triton: Settings) -> None:
    """The tests could not run on a machine that fails these checks."""
    found = check(without_triton)

    assert set(found) == {"python", "pillow", "image_formats", "jpeg_decoder", "opencv", "model_repository"}
    assert {finding.severity for finding in found.values()} == {Severity.OK}
    assert "libjpeg-turbo" in found["jpeg_decoder"].message


@pytest.mark.parametrize(
    ("version", "is_supported"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), True), ((3, 14), False)]
)
def test_supported_versions_of_python(
    without_triton: Settings, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int], *, is_supported: bool
) -> None:
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform=sys.platform, version_info=(*version, 2, "final", 0)))
    monkeypatch.setattr("platform.python_version", lambda: f"{version[0]}.{version[1]}.2")
    finding = check(without_triton)["python"]

    assert f"Python {version[0]}.{version[1]}.2" in finding.message
    if is_supported:
        assert finding.severity is Severity.OK
    else:
        assert_useful(finding, Severity.FAILURE, says=["3.11 to 3.13"], fix="./just")


def test_stock_pillow_over_pillow_simd(without_triton: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that depends on Pillow has overwritten pillow-simd."""
    monkeypatch.setattr("PIL.__version__", STOCK_PILLOW)
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform="linux", version_info=sys.version_info))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    assert_useful(check(without_triton)["pillow"], Severity.FAILURE, says=["stock Pillow"], fix="pip uninstall -y pillow")


@pytest.mark.parametrize(("platform", "processor"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_stock_pillow_is_fine_elsewhere(
    without_triton: Settings, monkeypatch: pytest.MonkeyPatch, platform: str, processor: str
) -> None:
    """pillow-simd does not exist for these platforms."""
    monkeypatch.setattr("PIL.__version__", STOCK_PILLOW)
    monkeypatch.setattr(machine, "sys", SimpleNamespace(platform=platform, version_info=sys.version_info))
    monkeypatch.setattr("platform.machine", lambda: processor)

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


LIBRARIES = pytest.mark.parametrize(
    ("package", "code", "fix"),
    [("simplejpeg", "jpeg_decoder", "--force-reinstall simplejpeg"), ("cv2", "opencv", "--force-reinstall opencv-python-headless")],
)


@LIBRARIES
def test_a_missing_library_is_named(
    without_triton: Settings, monkeypatch: pytest.MonkeyPatch, package: str, code: str, fix: str
) -> None:
    monkeypatch.delattr("app.imaging.jpeg")  # so that it is imported anew
    monkeypatch.delitem(sys.modules, "app.imaging.jpeg")
    monkeypatch.setitem(sys.modules, package, None)

    assert_useful(check(without_triton)[code], Severity.FAILURE, says=[package, "does not start"], fix=fix)


def test_a_decoder_that_gives_up_is_named(without_triton: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow decodes in its place."""
    monkeypatch.setattr("app.imaging.jpeg.decode", lambda *_: None)

    assert_useful(check(without_triton)["jpeg_decoder"], Severity.WARNING, says=["Pillow does it"], fix="simplejpeg")


@pytest.mark.system
@LIBRARIES
def test_a_library_that_cannot_be_imported(package: str, code: str, fix: str) -> None:
    """The examination goes on without it; nothing but its absence is reported for it."""
    exit_code, found = run_prepared(f"sys.modules[{package!r}] = None")

    assert exit_code == 1
    assert_useful(found[code], Severity.FAILURE, says=[package, "does not start"], fix=fix)
    assert [name for name, finding in found.items() if finding.severity is Severity.FAILURE] == [code, "triton"]


def embedded(repository: Path, model: str = "yolo11n") -> Settings:
    return Settings(model_repository=str(repository), model=model)


def test_a_repository_that_is_not_there(tmp_path: Path, without_triton: Settings) -> None:
    """Only the embedded Triton needs it; another one has its own."""
    nowhere = tmp_path / "nowhere"
    finding = check(embedded(nowhere))["model_repository"]

    assert_useful(finding, Severity.FAILURE, says=[str(nowhere)], fix="NEREID_MODEL_REPOSITORY=")
    elsewhere = msgspec.structs.replace(without_triton, model_repository=str(nowhere))
    assert check(elsewhere)["model_repository"].severity is Severity.OK


def test_a_repository_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(machine, "loadable_models", fail)
    finding = check(embedded(tmp_path))["model_repository"]

    assert_useful(finding, Severity.FAILURE, says=[f"{tmp_path}: Permission denied"], fix="let this user read")


def test_a_model_that_can_be_pulled_is_not_missing(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_bytes((REPOSITORY / "models.toml").read_bytes())
    finding = check(embedded(tmp_path))["model_repository"]

    assert finding.severity is Severity.OK
    assert "serve pulls yolo11n" in finding.message


def test_a_model_that_nobody_knows(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_bytes((REPOSITORY / "models.toml").read_bytes())
    finding = check(embedded(tmp_path, "yolo12x"))["model_repository"]

    assert_useful(
        finding,
        Severity.FAILURE,
        says=["yolo12x"],
        fix="NEREID_MODEL=NAME, one of yolo11n, yolo11n_file, yolox_nano, efficientnet_lite0",
    )


def test_a_list_of_models_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[yolo11n\n", encoding="utf-8")
    finding = check(embedded(tmp_path))["model_repository"]

    assert_useful(finding, Severity.FAILURE, says=["models.toml", "line 1"], fix="git checkout")
