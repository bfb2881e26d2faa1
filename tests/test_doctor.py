"""The checks of this machine and of a running Triton."""

import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from PIL import features

from app import doctor
from app.config import Settings
from app.embedded.server import EmbeddedTriton
from tests.support import free_port

STOCK_PILLOW = "12.1.1"


def check(settings: Settings, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    """Return the exit code, and the checks that passed and failed."""
    code = doctor.report(settings)
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:6] in {"ok    ", "FAIL  "} for line in lines)
    return code, [line[6:] for line in lines if line.startswith("ok")], [line[6:] for line in lines if line.startswith("FAIL")]


@pytest.fixture
def without_triton(tmp_path: Path) -> Settings:
    """Settings of a Triton that does not run."""
    return Settings(triton_urls=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path))


def test_everything_is_fine(settings: Settings, triton: EmbeddedTriton, capsys: pytest.CaptureFixture[str]) -> None:
    """With a running Triton every check passes, down to an inference, and the exit code is 0."""
    code, good, bad = check(settings, capsys)

    assert triton.poll() is None
    assert (code, bad) == (0, [])
    for text in (
        "Python 3.1",
        " is installed",
        "jpg support",
        "yolo11n",
        f"Triton 2.51.0 at {settings.triton_url}",
        "80 class names",
    ):
        assert any(text in line for line in good), text
    assert good[-1].startswith("yolo11n answers on cpu in ")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("model", ["six_columns", "half_four_tensors", "yolo_head", "yolox_head", "unbatched"])
def test_model_of_ones_own_is_run(settings: Settings, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the formats of the default model are, an inference is tried."""
    code, good, _ = check(msgspec.structs.replace(settings, model=model), capsys)

    assert code == 0
    assert good[-1].startswith(f"{model} answers on cpu in ")


@pytest.mark.usefixtures("triton")
def test_model_that_takes_files_is_only_described(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """No file is known that it accepts."""
    code, good, _ = check(msgspec.structs.replace(settings, model="file_in"), capsys)

    assert code == 0
    assert good[-1].startswith("file_in: the encoded file in")


@pytest.mark.usefixtures("triton")
def test_missing_model_fails(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Triton passes its check, the default model does not."""
    code, good, bad = check(msgspec.structs.replace(settings, model="nowhere"), capsys)

    assert code == 1
    assert any(line.startswith("Triton 2.51.0") for line in good)
    assert len(bad) == 1
    assert "nowhere" in bad[0]


def test_missing_triton_fails(without_triton: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """It is one failed check with its address; the machine is checked all the same."""
    code, good, bad = check(without_triton, capsys)

    assert code == 1
    assert len(bad) == 1
    assert without_triton.triton_url in bad[0]
    assert any("no model pulled" in line for line in good)


@pytest.mark.parametrize(
    ("version", "is_supported"), [((3, 10), False), ((3, 11), True), ((3, 12), True), ((3, 13), True), ((3, 14), False)]
)
def test_supported_versions_of_python(
    without_triton: Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: tuple[int, int],
    *,
    is_supported: bool,
) -> None:
    """Python 3.11 to 3.13 pass."""
    monkeypatch.setattr("app.doctor.sys", SimpleNamespace(platform=sys.platform, version_info=(*version, 2, "final", 0)))
    monkeypatch.setattr("platform.python_version", lambda: f"{version[0]}.{version[1]}.2")
    _, good, bad = check(without_triton, capsys)

    assert f"Python {version[0]}.{version[1]}.2 (3.11 to 3.13)" in (good if is_supported else bad)


def test_every_failure_of_the_machine_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run shows all that is missing, not just the first."""
    monkeypatch.setattr("PIL.__version__", STOCK_PILLOW)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(features, "check", lambda name: name != "webp")
    settings = Settings(triton_urls=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path / "nowhere"))
    code, good, bad = check(settings, capsys)

    assert code == 1
    assert [line.partition(":")[0] for line in bad] == [
        "stock Pillow is installed",
        "webp support",
        f"model repository {tmp_path / 'nowhere'}",
        "Triton at 127.0.0.1",
    ]
    assert len(good) == 3


@pytest.mark.parametrize(("platform", "machine"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_stock_pillow_is_fine_elsewhere(
    without_triton: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], platform: str, machine: str
) -> None:
    """Where pillow-simd does not exist, its absence is not a failure."""
    monkeypatch.setattr("PIL.__version__", STOCK_PILLOW)
    monkeypatch.setattr("app.doctor.sys", SimpleNamespace(platform=platform, version_info=sys.version_info))
    monkeypatch.setattr("platform.machine", lambda: machine)
    _, good, _ = check(without_triton, capsys)

    assert "stock Pillow is installed" in good
