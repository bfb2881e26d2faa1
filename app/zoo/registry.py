"""The models that `pull` knows, from `models.toml` in the model repository."""

import shutil
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.host import program


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="task"):
    """What must be known of a network to compose a model from it; its task decides what else."""

    architecture: Literal["efficientnet_lite0"] | None = None
    """Network of which the file has the weights, as PyTorch saved them; without it, the file is the network in ONNX."""
    square: Annotated[int, Meta(ge=128, multiple_of=32)]
    """Side of the square input, pixels."""
    channels: Literal["RGB", "BGR"]
    mean: Annotated[float, Meta(ge=0, le=255)] = 0.0
    """What is subtracted from each byte."""
    scale: Annotated[float, Meta(gt=0)]
    """Divisor of each byte, after that."""


class DetectionRecipe(Recipe, frozen=True, kw_only=True, tag="detection"):
    """What must be known of a detector."""

    head: Literal["yolo", "yolox"]
    """Format of its one output. `yolo`: (4 + classes, anchors), box centres and sizes in pixels, final scores.
    `yolox`: (anchors, 5 + classes), to be decoded with the strides 8, 16 and 32."""
    iou: Annotated[float, Meta(ge=0, le=1)]
    """Overlap above which two boxes of a class are one object."""


class ClassificationRecipe(Recipe, frozen=True, kw_only=True, tag="classification"):
    """What must be known of a classification network."""

    head: Literal["logits", "probabilities"]
    """What its one output, (classes), has for each class."""


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
    recipe: DetectionRecipe | ClassificationRecipe

    @property
    def file_name(self) -> str:
        """Name of the network's file at its source."""
        return (self.member or self.url or "").rpartition("/")[2]


class RegistryError(Exception):
    """`models.toml` is not valid; the message says where."""


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


def carried() -> dict[str, PublishedModel]:
    """Return the registry that the one file carries, for a folder that has none; otherwise it is empty."""
    return load(program.ROOT / "model_repository" / "models.toml") if program.IS_ONE_FILE else {}


def lay_out_configs(name: str, folder: Path, scratch: Path) -> None:
    """Put those configs of a model that the one file carries into the model's folder that it does not have.

    Args:
        name: Of the model; it is one that is carried.
        folder: Of the model, in the model repository.
        scratch: Folder on the same disk, so that a config is there as a whole or not at all.

    Raises:
        OSError: They cannot be written.
    """
    carried = program.ROOT / "model_repository" / name
    if not program.IS_ONE_FILE or not carried.is_dir():
        return
    for source in filter(Path.is_file, carried.rglob("*")):
        target = folder / source.relative_to(carried)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            Path(shutil.copy(source, scratch)).rename(target)
