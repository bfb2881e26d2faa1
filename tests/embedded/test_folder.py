"""The private folder of an embedded Triton: found by its home, used by one process of one user, and never given to another user."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from app import preflight
from app.embedded.folder import TritonFolder
from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.repository import DESCRIPTION, identify
from tests.support import ROOT

# As `serve`: with a child that inherits the lock, and outlives it until the pipe is closed.
CLAIM = """
import subprocess, sys
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


@pytest.mark.parametrize("settings", ["plain", "with a space", "quote's", "$(touch me)", "ünïcode", "x" * 200], indirect=True)
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


def test_files_that_triton_will_load_are_known(settings: Settings, folder: TritonFolder) -> None:
    pulled = Path(settings.model_repository, "pulled")
    folder.claim()
    assert not folder.has_loaded("pulled", identify(pulled))
    folder.fill()
    assert folder.has_loaded("pulled", identify(pulled))
    (pulled / "1" / "model.onnx").touch()
    assert not folder.has_loaded("pulled", identify(pulled))


def test_each_home_has_a_folder(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "home" / "home")
    same = [str(tmp_path / "link"), f"{settings.triton_home}/../home"]
    assert {msgspec.structs.replace(settings, triton_home=home).triton_folder for home in same} == {settings.triton_folder}
    assert msgspec.structs.replace(settings, triton_home=str(tmp_path)).triton_folder != settings.triton_folder


def test_only_one_process_uses_a_folder(settings: Settings, folder: TritonFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose starter was killed ends, too, and is waited for."""
    command, told = [sys.executable, "-c", CLAIM, settings.triton_home], list[str]()

    def end_triton(line: str) -> None:
        told.append(line)
        triton.close()

    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        triton = other.stdin
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(CommandError, match=f"runs the Triton in {settings.triton_home}; end it, or .* NEREID_TRITON_HOME$"):
            folder.claim(attempts=1)
        folder.give_up()
        assert (folder.path / "models").exists()
        folder.socket.touch()
        other.kill()
        other.wait()
        monkeypatch.setattr("app.embedded.folder.say", end_triton)
        folder.claim()
    folder.claim()
    folder.fill()
    assert told == [f"another process runs the Triton in {settings.triton_home}; trying for 15 s, in case it is ending"]
    assert [path.name for path in (folder.path / "models").iterdir()] == ["pulled"]
    assert not folder.socket.exists()


def test_folder_is_made_by_the_api_and_again_if_it_was_removed(settings: Settings, folder: TritonFolder) -> None:
    """No other user can listen there then, whether Triton runs or not. Systemd may remove it when a user logs out."""
    preflight.require_usable(settings)
    for _ in range(2):
        folder.claim()
        folder.fill()
        assert folder.path.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(folder.path)
        folder.clear()
    folder.claim()


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def make_foreign(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, 12345)


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as another user")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_open, "is not a folder of mode 700; remove it"),
        pytest.param(make_foreign, "belongs to user 12345, and this is user 0; run this as that user", marks=NEEDS_ROOT),
        (lambda path: path.symlink_to("/tmp"), "is not a folder of mode 700; remove it"),  # noqa: S108 - not used
        (Path.touch, "is not a folder of mode 700; remove it"),
    ],
    ids=["open", "foreign", "link", "file"],
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
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
