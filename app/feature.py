"""What a feature is. Each one is a folder of `app.features` and a name here; the gateway also works without both.

The rest of Nereid knows features only by this module, and asks the cache at one more place: `Pipeline.finder`.
"""

import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.resilience.worker_table import WorkerTable
from app.settings import environment, rules
from app.settings.schema import Settings

if TYPE_CHECKING:  # processes without workers need no gRPC
    import argparse

    from app.pipeline.pipeline import Pipeline
    from app.telemetry.metrics import Metrics

NAMES: tuple[str, ...] = ("cache",)
"""All features, in the order in which they are opened."""


class Command(NamedTuple):
    """A command of `nereid`, which `Feature.commands` runs."""

    name: str
    text: str
    before: str
    """The command before which the help lists it."""
    arguments: Sequence[tuple[str, dict[str, Any]]] = ()
    """Each with what argparse has to know of it."""


class Declaration(NamedTuple):
    """What is known of a feature that is off: `DECLARATION` of its module `settings`, the only one that is imported then."""

    settings: type[msgspec.Struct]
    """The kind of its settings, whose names are those of no other feature."""
    before: str
    """The setting before which they are listed."""
    is_on: Callable[[Settings], bool]
    """Whether the feature, or the check of one of its files, is on."""
    commands: Sequence[Command] = ()


class File(NamedTuple):
    """A setting that names something which a worker needs to start, such as a file."""

    code: str
    setting: str
    read: Callable[[str], object]
    """Raises ValueError if it cannot be used."""
    fix: str


class Feature(NamedTuple):
    """What a feature does: `FEATURE` of its module `feature`."""

    check: Callable[[Settings], None] = lambda _: None
    """Raises SettingsError if its settings do not fit the others."""
    extras: Mapping[str, Sequence[str]] = {}
    """The modules that it imports, by the extra of pyproject.toml that installs them."""
    needs: Callable[[Settings], str] = lambda _: ""
    """Returns the extra that these settings need, or an empty text."""
    files: Sequence[File] = ()
    share: Callable[[Settings], list[int]] = lambda _: []
    """Opens what the parent of all workers leaves to them; returns the descriptors."""
    open: Callable[[Settings, "Pipeline", "Metrics", AsyncExitStack], list[Coroutine[Any, Any, None]]] = lambda *_: []
    """Adds the feature to a worker, and what closes it to the stack; returns what is to run as long as the worker."""
    commands: Mapping[str, Callable[[Settings, "argparse.Namespace"], None]] = {}


@cache
def declarations() -> dict[str, Declaration]:
    """Return what is known of each feature, by name."""
    return {name: import_module(f"app.features.{name}.settings").DECLARATION for name in NAMES}


def load(name: str) -> Feature:
    """Import a feature."""
    feature: Feature = import_module(f"app.features.{name}.feature").FEATURE
    return feature


def used(settings: Settings) -> Iterator[tuple[str, Feature]]:
    """Iterate over the features that are on, with their names."""
    return ((name, load(name)) for name, each in declarations().items() if each.is_on(settings))


@cache
def settings_kind() -> type[Settings]:
    """Return the kind of all settings together."""
    fields = [
        (each.name, kind.__annotations__[each.name], each.default) for _, kind in kinds() for each in msgspec.structs.fields(kind)
    ]
    kind: Any = msgspec.defstruct("Settings", fields, bases=(Settings,), frozen=True, forbid_unknown_fields=True, kw_only=True)
    return kind  # type: ignore[no-any-return]


def kinds() -> list[tuple[str, type[msgspec.Struct]]]:
    """Return the kinds of the features' settings, each with the setting before which they are listed."""
    return [(each.before, each.settings) for each in declarations().values()]


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings, as `environment.load` does."""
    return environment.load(settings_kind(), environ)


def check(settings: Settings) -> None:
    """Raise SettingsError if a setting breaks a rule, or one of a feature does."""
    rules.check(settings)
    for _, each in used(settings):
        each.check(settings)


def share(settings: Settings) -> list[int]:
    """Open what features leave to all workers of this process; return the descriptors."""
    return [descriptor for _, each in used(settings) for descriptor in each.share(settings)]


def instruments(table: WorkerTable) -> list[object]:
    """Make the instruments of all features: what those count that are off is exported, too, as 0."""
    return [import_module(f"app.features.{name}.instruments").Instruments(table) for name in NAMES]
