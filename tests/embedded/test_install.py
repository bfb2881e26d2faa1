"""Installing the embedded Triton: in full or not at all."""

import ctypes.util
import errno
import hashlib
import os
import re
import sys
import sysconfig
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path

import pytest

from app.embedded import install as module
from app.embedded.install import REQUIREMENTS, WHEEL, install
from app.host.program import CommandError

MINOR = sys.version_info.minor
VERSION = f"3.{MINOR}"
STUB = "triton_python_backend_stub"
BUNDLED_LIBPYTHON, OTHER_LIBPYTHON = (f"nvidia_pytriton.libs/libpython3-0123abcd.{minor}.so.1.0" for minor in (MINOR, 99))
INSTALLED = {
    "pytriton/tritonserver/bin/tritonserver",
    "pytriton/tritonserver/backends/python/libtriton_python.so",
    "nvidia_pytriton.libs/libssl.so",
    BUNDLED_LIBPYTHON,
    OTHER_LIBPYTHON,
    "nvidia_pytriton-0.7.0.dist-info/LICENSE",
}
LOCK = "install.lock"


def triton_wheel() -> bytes:
    """Make a small wheel that is laid out like NVIDIA's; it has the same bytes in each process."""
    file = BytesIO()
    stubs = [f"pytriton/tritonserver/python_backend_stubs/3.{minor}/{STUB}" for minor in range(9, 15)]
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("pytriton/__init__.py", *sorted(INSTALLED), *stubs):
            archive.writestr(zipfile.ZipInfo(name), name)
    return file.getvalue()


TRITON = triton_wheel()


class Packages:
    """Takes the place of pip and venv; a test may let one of them fail."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.failure: BaseException | None = None
        self.fails_at = ""

    def download_wheel(self, requirement: str, folder: Path) -> Path:
        assert requirement == WHEEL
        wheel = folder / "nvidia_pytriton-0.7.0-py3-none-any.whl"
        wheel.write_bytes(TRITON)
        self.finish("download")
        return wheel

    def make_environment(self, folder: Path, requirements: Path, _: str) -> None:
        assert requirements == module.REQUIREMENTS
        (folder / "bin").mkdir()
        self.finish("environment")

    def finish(self, step: str) -> None:
        self.steps.append(step)
        if step == self.fails_at and self.failure is not None:
            raise self.failure


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Packages:
    packages = Packages()
    monkeypatch.setattr(module, "download_wheel", packages.download_wheel)
    monkeypatch.setattr(module, "make_environment", packages.make_environment)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(TRITON).hexdigest())
    return packages


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    """List a folder without the lock file, which stays."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_server_is_unpacked_after_half_of_it_was_by_a_killed_process(tmp_path: Path, packages: Packages) -> None:
    for name in ("server", "server.partial", "python", "python.123.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    install(tmp_path)
    triton = tmp_path / "server" / "pytriton" / "tritonserver"
    stub = triton / "backends" / "python" / STUB

    assert packages.steps == ["download", "environment"]
    assert names(tmp_path) == ["python", "server"]
    assert files(tmp_path / "server") == {*INSTALLED, "complete", str(stub.relative_to(tmp_path / "server"))}
    assert files(tmp_path / "python") == {"complete"}
    assert f"/{VERSION}/" in stub.read_text(encoding="utf-8")
    assert all(os.access(path, os.X_OK) for path in (stub, triton / "bin" / "tritonserver"))


@pytest.mark.parametrize(
    ("new", "steps"),
    [({}, []), ({"REQUIREMENTS": "numpy==1.26.4"}, ["environment"]), ({"VERSION": "3.10"}, ["download", "environment"])],
)
def test_second_install_renews_what_has_changed(
    tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch, new: dict[str, str], steps: list[str]
) -> None:
    """The stub of the server and the packages of the environment are those of one Python. What is complete needs no lock."""
    install(tmp_path)
    (tmp_path / LOCK).unlink()
    (tmp_path / "triton.txt").write_text(new.get("REQUIREMENTS", ""), encoding="utf-8")
    for name in ("server", "python"):
        (tmp_path / name / "old").touch()
        mark = tmp_path / name / "complete"
        mark.write_text(mark.read_text(encoding="utf-8").replace(VERSION, new.get("VERSION", VERSION)), encoding="utf-8")
    if "REQUIREMENTS" in new:
        monkeypatch.setattr(module, "REQUIREMENTS", tmp_path / "triton.txt")
        packages.fails_at, packages.failure = "environment", CommandError("pip failed")
        with pytest.raises(CommandError, match="pip failed"):
            install(tmp_path)
        assert (names(tmp_path), (tmp_path / "python" / "old").exists()) == (["python", "server", "triton.txt"], True)
        packages.failure = None
    packages.steps.clear()
    install(tmp_path)
    assert packages.steps == steps
    kept = [name for name in ("server", "python") if (tmp_path / name / "old").exists()]
    assert kept == {0: ["server", "python"], 1: ["server"], 2: []}[len(steps)]
    assert (tmp_path / LOCK).exists() is bool(steps)


@pytest.mark.parametrize("step", ["download", "environment"])
@pytest.mark.parametrize(
    ("failure", "match"),
    [
        (KeyboardInterrupt(), None),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "could not be written: No space left on device"),
    ],
)
def test_interrupted_install_leaves_no_half_folder(
    tmp_path: Path, packages: Packages, step: str, failure: BaseException, match: str | None
) -> None:
    packages.fails_at, packages.failure = step, failure
    with pytest.raises((KeyboardInterrupt, CommandError), match=match):
        install(tmp_path)
    assert names(tmp_path) == ([] if step == "download" else ["server"])


def test_two_processes_install_once(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    def finish(step: str) -> None:
        packages.steps.append(step)
        time.sleep(0.2)

    monkeypatch.setattr(packages, "finish", finish)
    with ThreadPoolExecutor(2) as pool:  # whose files are locked as those of processes are
        list(pool.map(install, [tmp_path, tmp_path]))
    assert packages.steps == ["download", "environment"]


def test_another_wheel_is_rejected(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(CommandError, match=f"py3-none-any.whl is not the expected file: .*{hashlib.sha256(TRITON).hexdigest()}"):
        install(tmp_path)
    assert packages.steps == ["download"]
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["", "lib", "loader"])
def test_libpython_of_the_wheel_is_replaced_by_that_of_this_python(
    tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A Python that was built by hand has it in its library folder or under its prefix; what only the loader finds has no path."""
    monkeypatch.setattr(sysconfig, "get_config_vars", lambda *_: [str(tmp_path), None])
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    with pytest.raises(CommandError, match=rf"libpython{VERSION}\.so\.1\.0 is missing; .*apt-get install libpython{VERSION}"):
        install(tmp_path / "home")
    assert packages.steps == []
    if place == "loader":
        monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1.0")
    else:
        (tmp_path / place).mkdir(exist_ok=True)
        (tmp_path / place / f"libpython{VERSION}.so.1.0").write_text("own", encoding="utf-8")
    install(tmp_path / "home")
    server = tmp_path / "home" / "server"
    assert (server / BUNDLED_LIBPYTHON).read_text(encoding="utf-8") == (BUNDLED_LIBPYTHON if place == "loader" else "own")
    assert (server / OTHER_LIBPYTHON).read_text(encoding="utf-8") == OTHER_LIBPYTHON


def test_requirements_are_pinned_by_their_hashes() -> None:
    packages = re.findall(r"(?m)^\w.*(?:\n +.*)*", REQUIREMENTS.read_text(encoding="utf-8"))
    assert len(packages) > 1
    assert all(re.match(r"[\w.-]+==[\w.]+ .*\\\n +--hash=sha256:[0-9a-f]{64}", package) for package in packages)
