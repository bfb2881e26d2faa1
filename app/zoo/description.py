"""Descriptions of models: `model.toml` in the folder of a model, from which both of its Triton configs are generated."""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from app.host import toml
from app.host.program import CommandError
from app.model.golden import Golden
from app.model.names import parse_names
from app.triton.repository import DESCRIPTION
from app.zoo.recipe import EmbeddingRecipe, Recipe, TextDetectionRecipe

LABELS = "labels.txt"
"""Name of the file with class names, one per line, beside a network or a description."""
_HEADER = (
    "# The one description of this model. After a change, `nereid use` writes its Triton configs, which are generated from it.\n"
)
_Count = Annotated[int, Meta(ge=1, le=1024)]


class Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a Triton runs the model."""

    instances: _Count = 2
    """Instances on the CPU, or on each GPU."""
    threads: _Count = 1
    """Threads of an instance on the CPU while other instances run."""
    max_batch: _Count
    delay_us: Annotated[int, Meta(ge=0)] = 0
    """Time that an image waits for others, in microseconds."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a model."""

    labels: tuple[str, ...] = ()
    """Class names in the order of their ids; if the file has none, those in `labels.txt` beside it, one per line. A recogniser of
    text has its characters, after the blank; what has no classes has none."""
    licence: str = "unknown"
    source: str = ""
    default_version: Annotated[int, Meta(ge=1)]
    """The version for requests that name none."""
    pixel_model: str | None = None
    """For a model of encoded files, the one of the same network that takes pixels; None for other models."""
    recipe: Recipe
    versions: dict[str, str]
    """SHA-256 of the network of each version."""
    last_version: Annotated[int, Meta(ge=1)]
    """The newest version that was added; the number of a removed version is not given again."""
    embedded: Serving = Serving(max_batch=2)
    production: Serving = Serving(max_batch=64)
    golden: dict[str, Golden] = {}
    """What each version finds in the golden picture; those of earlier programs are not known."""
    unchecked: tuple[str, ...] = ()
    """Versions that have found nothing in the samples when they were added."""

    def __post_init__(self) -> None:
        if not (self.labels or isinstance(self.recipe, TextDetectionRecipe | EmbeddingRecipe)):
            raise ValueError("labels are missing")
        if str(self.default_version) not in self.versions:
            raise ValueError(f"default_version {self.default_version} is not among the versions {', '.join(self.versions)}")


def load(folder: Path) -> Description | None:
    """Read the description of a model in its folder, None if it has none; raise CommandError if it is not valid."""
    path = folder / DESCRIPTION
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        if "labels" not in content and (folder / LABELS).is_file():
            content["labels"] = read_labels(folder / LABELS)
        return msgspec.convert(content, Description)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise CommandError(f"{path}: {error}") from error


def read_labels(path: Path) -> tuple[str, ...]:
    """Read class names from a file, as `parse_names` does; raise CommandError if it cannot be read."""
    try:
        return parse_names(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', error)}") from error


def dump(description: Description) -> str:
    """Return the text of a description."""
    return _HEADER + toml.dump(msgspec.to_builtins(description))
