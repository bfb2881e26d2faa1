"""Links to the embedded Triton and its models: by paths that a shell takes as they are, and gone when Triton has ended."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.embedded import links
from app.settings.schema import Settings

SHM = Path("/dev/shm")  # noqa: S108 - where a folder may be that cannot be beside Triton


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that each test removes the folder that it has created."""
    before = set(SHM.glob("nereid-links-*"))
    yield
    assert set(SHM.glob("nereid-links-*")) == before


def settings_in(folder: Path) -> Settings:
    """Make a repository with a model that was pulled and one that was not."""
    for path in ("pulled/config.pbtxt", "pulled/1/model.onnx", "listed/config.pbtxt"):
        (folder / "models" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "models" / path).write_text('name: "pulled"', encoding="utf-8")
    (folder / "home").mkdir()
    return Settings(model_repository=str(folder / "models"), triton_grpc_port=4601)


@pytest.mark.parametrize("name", ["plain", "with a space", "quote's", "$(touch me)", "a;b&c", "ünïcode"])
def test_links_lead_to_triton_and_its_models(tmp_path: Path, name: str) -> None:
    """No path that Triton gets needs quotes, wherever it is installed and wherever the models are."""
    folder = tmp_path / name
    settings = settings_in(folder)
    made = links.make(settings, folder / "home")

    assert shlex.quote(str(made)) == str(made)
    assert {path.name: path.readlink() for path in made.iterdir() if path.is_symlink()} == {
        "server": folder / "home" / "server",
        "python": folder / "home" / "python",
    }
    assert {path.name: path.resolve() for path in (made / "models").iterdir()} == {"pulled": folder / "models" / "pulled"}
    links.remove(settings, folder / "home")
    assert not made.exists()
    assert list((folder / "home").iterdir()) == []


@pytest.mark.parametrize("name", ["plain", "with a space"])
def test_links_of_a_triton_that_was_killed_are_replaced(tmp_path: Path, name: str) -> None:
    """They are found again by the port; what they lead to is left alone."""
    folder = tmp_path / name
    settings = settings_in(folder)
    first = links.make(settings, folder / "home")
    (first / "models" / "stale").symlink_to(tmp_path)
    second = links.make(settings, folder / "home")

    assert [path.name for path in (second / "models").iterdir()] == ["pulled"]
    assert first == second or not first.exists()
    links.remove(settings, folder / "home")
    links.remove(settings, folder / "home")
    assert (folder / "models" / "pulled" / "1" / "model.onnx").is_file()


def test_a_folder_elsewhere_is_private(tmp_path: Path) -> None:
    """No other user may put a program there."""
    folder = tmp_path / "with a space"
    settings = settings_in(folder)
    made = links.make(settings, folder / "home")

    assert made.parent == SHM
    assert made.stat().st_mode & 0o777 == 0o700
    links.remove(settings, folder / "home")


def test_links_are_elsewhere_where_there_is_no_room(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    (tmp_path / "home" / "links-4601").touch()
    made = links.make(settings, tmp_path / "home")

    assert made.parent == SHM
    assert (made / "models" / "pulled" / "1" / "model.onnx").is_file()
    links.remove(settings, tmp_path / "home")
