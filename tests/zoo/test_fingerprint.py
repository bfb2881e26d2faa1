"""A fingerprint changes with everything that changes what a network finds, and is not known while Triton may run something else."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.triton.repository import CLEARED, DESCRIPTION, identify
from app.zoo import description, fingerprint
from app.zoo.configs import HALF
from app.zoo.description import Description, Serving
from app.zoo.recipe import DetectionRecipe

DOORS = Description(
    labels=("door",),
    default_version=1,
    recipe=DetectionRecipe(size=(64, 64), head="yolo"),
    versions={"1": "aa", "2": "bb"},
    last_version=2,
)


class Repository:
    """A repository with the model `doors`, of which Triton has loaded what a test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "doors"
        for version in ("1", "2"):
            (self.folder / version).mkdir(parents=True)
            self.network(version).write_bytes(b"network " + version.encode())
        self.describe()
        self.loaded = identify(self.folder)

    def network(self, version: str = "1") -> Path:
        return self.folder / version / "model.onnx"

    def describe(self, **changes: Any) -> None:  # noqa: ANN401
        text = description.dump(msgspec.structs.replace(DOORS, **changes))
        (self.folder / DESCRIPTION).write_text(text, encoding="utf-8")

    def load(self) -> None:
        self.loaded = identify(self.folder)

    def read(self, version: str = "1", name: str = "doors") -> bytes:
        return fingerprint.read(self.path, lambda _, identity: identity == self.loaded, name, version)


@pytest.fixture
def doors(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def replace_with_the_old_time(doors: Repository) -> None:
    """Of the same size, and with the times that the file had."""
    status = doors.network().stat()
    doors.network().write_bytes(b"network 9")
    os.utime(doors.network(), ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        replace_with_the_old_time,
        lambda doors: doors.network().with_name("new").replace(doors.network()),
        lambda doors: (doors.folder / "2" / HALF).write_bytes(b"half 2"),  # then version 1 runs in FP16, too
        lambda doors: doors.describe(recipe=msgspec.structs.replace(DOORS.recipe, iou=0.5)),
    ],
    ids=["network", "renamed network", "precision", "recipe"],
)
def test_change_makes_a_new_fingerprint_once_it_is_loaded(doors: Repository, change: Callable[[Repository], object]) -> None:
    doors.network().with_name("new").write_bytes(b"network 9")
    (doors.folder / "1" / HALF).write_bytes(b"half 1")
    doors.load()
    before = doors.read()
    assert doors.read() == before != b""
    change(doors)
    assert doors.read() == b""
    doors.load()

    assert doors.read() not in {b"", before}


def test_copies_and_other_ways_to_run_have_the_same_fingerprint(doors: Repository) -> None:
    """Hosts may run the same network in different ways, and have copies of it; Python caches byte code. Versions differ."""
    before = doors.read()
    (doors.folder / "1" / "__pycache__").mkdir()
    (doors.folder / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"byte code")
    assert doors.read() == before != doors.read("2")
    assert doors.read("3") == b""
    doors.describe(production=Serving(max_batch=8), licence="MIT")
    content = doors.network().read_bytes()
    doors.network().unlink()
    doors.network().write_bytes(content)
    doors.load()
    assert doors.read() == before

    (doors.path / CLEARED).touch()
    assert doors.read() not in {b"", before}


@pytest.mark.parametrize("text", ["no = TOML = at all", None])
def test_without_a_valid_description_nothing_is_known(doors: Repository, text: str | None) -> None:
    """Nor of a model that runs the network of another one: its own files would not tell that the other one has changed."""
    doors.describe(pixel_model="gates")
    doors.load()
    assert doors.read() == b""
    if text is None:
        (doors.folder / DESCRIPTION).unlink()
    else:
        (doors.folder / DESCRIPTION).write_text(text, encoding="utf-8")
    doors.load()
    assert doors.read() == doors.read(name="gates") == b""


def test_network_that_changes_while_it_is_read_has_none(doors: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    load = description.load

    def load_slowly(folder: Path) -> Description | None:
        found = load(folder)
        doors.network().write_bytes(b"network 9")
        return found

    monkeypatch.setattr(description, "load", load_slowly)
    assert doors.read() == b""
