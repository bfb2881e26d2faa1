"""What a feature is. Each one is a folder of `app.features` and a name here; without both, the gateway starts and detects."""

import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.settings import environment
from app.settings.schema import Settings

if TYPE_CHECKING:  # processes without workers need no gRPC
    from app.pipeline.pipeline import Pipeline
    from app.resilience.worker_table import WorkerTable
    from app.telemetry.metrics import Metrics

NAMES: tuple[str, ...] = ("cache",)
"""All features, in the order in which they are opened."""


class Command(NamedTuple):
    """A command of `nereid`."""

    name: str
    text: str
    before: str
    """The command before which the help lists it."""
    arguments: Sequence[tuple[str, dict[str, Any]]]
    """Each with what argparse has to know of it."""


class Declaration(NamedTuple):
    """What is known of each feature: `DECLARATION` of its module `settings`, which imports nothing else of the feature.

    Each worker also imports the module `instruments`, whose class `Instruments` makes the metrics of the feature from the table.
    """

    settings: type[msgspec.Struct]
    before: str
    """The setting before which its settings are listed."""
    is_used: Callable[[Settings], bool]
    """Whether the feature is on, or has a file to check."""
    commands: Sequence[Command] = ()
    words: Sequence[str] = ()
    """What names the feature, besides its folder and its settings: patterns. Parameters of requests do not count."""
    named_in: Sequence[str] = ()
    """The modules outside its folder that these words are in, at most four."""


File = tuple[str, str, Callable[[str], object], str]
"""What no worker starts without: its code, its setting, what reads it or raises ValueError, and how to mend it."""


class Feature(NamedTuple):
    """What a feature does: `FEATURE` of its module `feature`, which is imported if it is on."""

    check: Callable[[Settings], None]
    """Raises SettingsError if its settings do not fit the others."""
    extras: Mapping[str, Sequence[str]]
    """The modules that it imports, by the extra of pyproject.toml that installs them."""
    needs: Callable[[Settings], tuple[str, str]]
    """Returns the extra that these settings need, or an empty text, and the name of the setting that needs it."""
    files: Sequence[File]
    share: Callable[[Settings], list[int]]
    """Opens what the parent of all workers leaves to them; returns the descriptors."""
    open: Callable[[Settings, "Pipeline", "Metrics", AsyncExitStack], list[Coroutine[Any, Any, None]]]
    """Adds the feature to a worker, and to the stack what closes it; returns what runs as long as the worker."""
    commands: Mapping[str, Callable[..., int | None]]
    """Each gets the settings and the parsed arguments, and may return an exit code."""


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
    return ((name, load(name)) for name, each in declarations().items() if each.is_used(settings))


def instruments(table: "WorkerTable") -> list[object]:
    """Make the instruments of all features: those of one that is off are exported, too."""
    return [import_module(f"app.features.{name}.instruments").Instruments(table) for name in NAMES]


def share(settings: Settings) -> list[int]:
    """Open what features leave to all workers of this process; return the descriptors."""
    return [descriptor for _, each in used(settings) for descriptor in each.share(settings)]


def kinds() -> list[tuple[type[msgspec.Struct], str]]:
    """Return the kinds of the features' settings, each with the setting before which they are listed."""
    return [(each.settings, each.before) for each in declarations().values()]


@cache
def settings_kind() -> type[Settings]:
    """Return the kind of all settings, with those of features."""
    fields = [(each.name, each.type, each.default) for kind, _ in kinds() for each in msgspec.structs.fields(kind)]
    options: Any = {"bases": (Settings,), "module": __name__, "frozen": True, "forbid_unknown_fields": True, "kw_only": True}
    return msgspec.defstruct("AllSettings", fields, **options)  # type: ignore[return-value]  # of `bases`


def __getattr__(name: str) -> type[Settings]:
    # For pickle, which looks for the class of an object in its module.
    if name != "AllSettings":
        raise AttributeError(name)
    return settings_kind()


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read all settings, as `environment.load` does."""
    return environment.load(settings_kind(), environ)


def check(settings: Settings) -> None:
    """Raise SettingsError, which names the setting, if one breaks a rule."""
    from app.settings import rules  # noqa: PLC0415 - a healthcheck, which containers run every few seconds, needs none

    rules.check(settings)
    for _, each in used(settings):
        each.check(settings)
