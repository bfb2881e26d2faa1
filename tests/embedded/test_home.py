"""The home of an embedded Triton: installed in full or not at all, used by one process, and models loaded through it."""

import asyncio
import ctypes.util
import errno
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from app import preflight
from app.embedded import install as module
from app.embedded.control import apply
from app.embedded.folder import TritonFolder
from app.embedded.install import WHEEL, install
from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.repository import DESCRIPTION, identify, last_change
from tests.fakes import http
from tests.fakes.triton import FakeTriton, serving
from tests.support import ROOT

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
NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


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
        assert requirements == module.REQUIREMENTS[module.CPU_FOLDER]
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
        monkeypatch.setitem(module.REQUIREMENTS, module.CPU_FOLDER, tmp_path / "triton.txt")
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


# As `serve`: with a child that inherits the lock, and outlives it until the pipe is closed.
CLAIM = """
import subprocess, sys
from app.embedded.control import apply
from app.embedded.folder import TritonFolder
from app.settings.schema import Settings
folder = TritonFolder(Settings(triton_home=sys.argv[1]))
folder.claim()
folder.fill()
subprocess.Popen(["cat"], pass_fds=[folder.descriptor], stdout=subprocess.DEVNULL)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """A home, and a repository with a model that was pulled and one that was not."""
    folder = tmp_path / getattr(request, "param", "home")
    for path in ("models/pulled/config.pbtxt", "models/pulled/1/model.onnx", "models/listed/config.pbtxt", "home/triton.log"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text('name: "pulled"', encoding="utf-8")
    (folder / "models" / "pulled" / DESCRIPTION).touch()
    return Settings(model_repository=str(folder / "models"), triton_home=str(folder / "home"))


@pytest.fixture
def folder(settings: Settings) -> Iterator[TritonFolder]:
    folder = TritonFolder(settings)
    yield folder
    folder.give_up()
    assert list(folder.path.iterdir()) == []


@pytest.mark.parametrize("settings", ["$(touch 'me)", "x" * 200], indirect=True)
def test_links_lead_to_triton_and_its_models(settings: Settings, folder: TritonFolder) -> None:
    """No path that Triton gets needs quotes or is too long for a socket, wherever it is installed; only its user has access."""
    folder.claim()
    for _ in range(2):
        folder.fill()
    home, repository = Path(settings.triton_home), Path(settings.model_repository)
    assert shlex.quote(str(folder.path)) == str(folder.path)
    assert len(os.fsencode(folder.socket)) <= 107
    assert f"unix:{folder.socket}" == settings.triton_address
    assert folder.path.stat().st_mode & 0o777 == 0o700
    links = {path.name: path.readlink() for path in folder.path.iterdir() if path.is_symlink()}
    assert links == {name: home / name for name in ("server", "python")}
    assert {path.name: path.resolve() for path in (folder.path / "models").iterdir()} == {"pulled": repository / "pulled"}
    folder.give_up()
    assert (repository / "pulled" / "1" / "model.onnx").is_file()
    assert (home / "triton.log").is_file()


def test_only_one_process_uses_a_folder(settings: Settings, folder: TritonFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose starter was killed ends, too, and is waited for."""
    command = [sys.executable, "-c", CLAIM, settings.triton_home]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(CommandError, match=f"runs the Triton in {settings.triton_home}; end it, or .* NEREID_TRITON_HOME$"):
            folder.claim(attempts=1)
        folder.give_up()
        assert (folder.path / "models").exists()
        folder.socket.touch()
        other.kill()
        other.wait()
        say = Mock(side_effect=lambda _, stdin=other.stdin: stdin.close())
        monkeypatch.setattr("app.embedded.folder.say", say)
        folder.claim()
    folder.claim()
    folder.fill()
    say.assert_called_once_with(f"another process runs the Triton in {settings.triton_home}; trying for 15 s, in case it is ending")
    assert [path.name for path in (folder.path / "models").iterdir()] == ["pulled"]
    assert not folder.socket.exists()


def make_foreign(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(mode=0o755), "is not a folder of mode 700; remove it"),
        pytest.param(make_foreign, "belongs to user 12345, and this is user 0; run this as that user", marks=NEEDS_ROOT),
        (lambda path: path.symlink_to("/tmp"), "is not a folder of mode 700; remove it"),  # noqa: S108 - not used
    ],
    ids=["open", "foreign", "link"],
)
def test_folder_that_others_can_use_is_refused(settings: Settings, make: Callable[[Path], None], reason: str) -> None:
    """Also by an API alone, which would send its images there."""
    path = settings.triton_folder
    make(path)
    try:
        with pytest.raises(CommandError, match=f"{path}, for Triton's socket, {reason}"):
            TritonFolder(settings).claim()
        with pytest.raises(CommandError, match=reason):
            preflight.require_usable(settings)
        assert path.exists()
    finally:
        path.unlink() if path.is_symlink() else path.rmdir()


class LoadingTriton(FakeTriton):
    """A file may be changed while it loads a model."""

    changes: Path | None = None

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.changes:
            self.changes.touch()
        return await super().RepositoryModelLoad(request, context)


@pytest.fixture
async def triton(settings: Settings, folder: TritonFolder) -> AsyncIterator[LoadingTriton]:
    folder.claim()
    folder.fill()
    async with serving(fake := LoadingTriton(), address=settings.triton_address):
        yield fake


def changed(settings: Settings) -> int:
    return last_change(Path(settings.model_repository))


async def test_model_is_loaded_again_whenever_it_is_changed(settings: Settings, triton: LoadingTriton) -> None:
    link, before = settings.triton_folder / "models" / "listed", 0
    for loads in ("load", "load", "unload"):
        if loads == "unload":
            link.resolve().rename(link.resolve().with_name("elsewhere"))
        assert await asyncio.to_thread(apply, settings, "listed") == ""
        assert triton.told.pop() == f"{loads} listed"
        assert link.is_symlink() is (loads == "load")
        assert changed(settings) > before
        before = changed(settings)


async def test_files_that_triton_has_loaded_are_known_unless_they_change_meanwhile(
    settings: Settings, folder: TritonFolder, triton: LoadingTriton
) -> None:
    pulled = Path(settings.model_repository, "pulled")
    assert folder.has_loaded("pulled", identify(pulled))
    (pulled / "1" / "model.onnx").write_bytes(b"another")
    assert not folder.has_loaded("pulled", identify(pulled))
    triton.load_refusal = grpc.StatusCode.INVALID_ARGUMENT, "load failed for model 'pulled': version 1: out of luck;\nand so on"
    before = changed(settings)
    with pytest.raises(CommandError, match=r"^Triton cannot load pulled: load failed for .*: version 1: out of luck;$"):
        await asyncio.to_thread(apply, settings, "pulled")
    assert (folder.has_loaded("pulled", identify(pulled)), changed(settings)) == (False, before)
    triton.load_refusal = None
    await asyncio.to_thread(apply, settings, "pulled")
    assert folder.has_loaded("pulled", identify(pulled))
    triton.changes = pulled / "1" / "model.onnx"
    await asyncio.to_thread(apply, settings, "pulled")
    assert not folder.has_loaded("pulled", identify(pulled))


def test_triton_that_does_not_run_loads_the_model_when_it_starts(settings: Settings, folder: TritonFolder) -> None:
    """One that was killed has left its socket behind."""
    folder.claim()
    folder.fill()
    for _ in range(2):
        assert apply(settings, "pulled") == f"when Triton starts with {settings.model_repository}; none runs yet"
        if not folder.socket.exists():
            http.listening_on(folder.socket).close()
