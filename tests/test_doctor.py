"""The check of this machine and of a running Triton."""

from pathlib import Path

import msgspec
import pytest
from PIL import features

from app import doctor
from app.config import Settings
from app.embedded import Server
from tests.conftest import free_port


def checked(settings: Settings, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str], list[str]]:
    """The exit code, and what was good and bad."""
    code = doctor.report(settings)
    lines = capsys.readouterr().out.splitlines()
    assert all(line[:6] in {"ok    ", "FAIL  "} for line in lines)
    return code, [line[6:] for line in lines if line.startswith("ok")], [line[6:] for line in lines if line.startswith("FAIL")]


def test_all_is_well(settings: Settings, triton: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """With a running Triton every line is ok, down to an inference, and the exit code says so."""
    code, good, bad = checked(settings, capsys)

    assert triton.poll() is None
    assert (code, bad) == (0, [])
    for text in ("Python 3.1", " decodes", "jpg support", "yolo11n", f"Triton 2.51.0 at {settings.triton_url}", "80 class names"):
        assert any(text in line for line in good), text
    assert good[-1].startswith("yolo11n answers on cpu in ")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("model", ["yolo_head", "half_four_tensors"])
def test_a_model_of_ones_own_is_asked_in_its_own_way(settings: Settings, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the layout of the default model, its inference is tried."""
    code, good, _ = checked(msgspec.structs.replace(settings, model=model), capsys)

    assert code == 0
    assert good[-1].startswith(f"{model} answers on cpu in ")


@pytest.mark.usefixtures("triton")
def test_a_model_that_takes_files_is_described_only(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """There is no file that it is bound to understand."""
    code, good, _ = checked(msgspec.structs.replace(settings, model="file_in"), capsys)

    assert code == 0
    assert good[-1].startswith("file_in: the file itself in")


@pytest.mark.usefixtures("triton")
def test_a_model_that_is_not_there_fails(settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    """Triton is fine, the default model is not."""
    code, good, bad = checked(msgspec.structs.replace(settings, model="nowhere"), capsys)

    assert code == 1
    assert any(line.startswith("Triton 2.51.0") for line in good)
    assert len(bad) == 1
    assert "nowhere" in bad[0]


def test_no_triton_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody at the address is one bad line that names it; the machine is checked all the same."""
    address = f"127.0.0.1:{free_port()}"
    code, good, bad = checked(Settings(triton_urls=address, model_repository=str(tmp_path)), capsys)

    assert code == 1
    assert len(bad) == 1
    assert address in bad[0]
    assert any("no model pulled" in line for line in good)


def test_every_fault_of_the_machine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run shows all that is missing, not just the first."""
    monkeypatch.setattr("app.image.is_simd", lambda: False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(features, "check", lambda name: name != "webp")
    settings = Settings(triton_urls=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path / "nowhere"))
    code, good, bad = checked(settings, capsys)

    assert code == 1
    assert [line.partition(":")[0] for line in bad] == [
        "stock Pillow decodes",
        "webp support",
        f"model repository {tmp_path / 'nowhere'}",
        "Triton at 127.0.0.1",
    ]
    assert len(good) == 3


def test_stock_pillow_is_fine_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where pillow-simd does not exist, its absence is no fault."""
    monkeypatch.setattr("app.image.is_simd", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    settings = Settings(triton_urls=f"127.0.0.1:{free_port()}", model_repository=str(tmp_path))
    _, good, _ = checked(settings, capsys)

    assert "stock Pillow decodes" in good
