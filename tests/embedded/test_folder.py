"""The private folder of an embedded Triton, used by one process of one user, and the models that are loaded through it."""

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from app import preflight
from app.embedded.control import apply
from app.embedded.folder import TritonFolder
from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.repository import DESCRIPTION, identify, last_change
from tests.fakes import http
from tests.fakes.triton import FakeTriton, serving
from tests.support import ROOT

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


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


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
    """Notes which models it is to load or unload; a file may be changed meanwhile, and a message be why it cannot load."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.changes: Path | None = None
        self.refusal_to_load = ""

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.loads.append(("load", request.model_name))
        if self.changes:
            self.changes.touch()
        if self.refusal_to_load:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.refusal_to_load)
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.loads.append(("unload", request.model_name))
        return messages.RepositoryModelUnloadResponse()


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
        assert triton.loads.pop() == (loads, "listed")
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
    triton.refusal_to_load = "load failed for model 'pulled': version 1: out of luck;\nand so on"
    before = changed(settings)
    with pytest.raises(CommandError, match=r"^Triton cannot load pulled: load failed for .*: version 1: out of luck;$"):
        await asyncio.to_thread(apply, settings, "pulled")
    assert (folder.has_loaded("pulled", identify(pulled)), changed(settings)) == (False, before)
    triton.refusal_to_load = ""
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
