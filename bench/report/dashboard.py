"""A Grafana dashboard: its panels and their PromQL expressions."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class Target(msgspec.Struct, rename="camel"):
    """One query of a panel."""

    ref_id: str
    expr: str
    legend_format: str

    def name(self, labels: Mapping[str, str]) -> str:
        """Return the name of one of the query's series in the legend."""
        return _LABEL.sub(lambda found: labels.get(found[1], ""), self.legend_format)


class Place(msgspec.Struct):
    """Position of a panel in the dashboard's grid of 24 columns."""

    x: int
    y: int
    w: int
    h: int


class Stacking(msgspec.Struct):
    """Whether the series are stacked."""

    mode: str = "none"


class Style(msgspec.Struct):
    """Drawing style of the series."""

    stacking: Stacking = msgspec.field(default_factory=Stacking)


class Defaults(msgspec.Struct):
    """Defaults for all series of a panel."""

    unit: str = "short"
    custom: Style = msgspec.field(default_factory=Style)


class FieldConfig(msgspec.Struct):
    """Field configuration of a panel."""

    defaults: Defaults = msgspec.field(default_factory=Defaults)


class Panel(msgspec.Struct, rename="camel"):
    """One panel; a panel of the type `row` is a heading."""

    id: int
    type: str
    title: str
    grid_pos: Place
    description: str = ""
    targets: list[Target] = msgspec.field(default_factory=list)
    field_config: FieldConfig = msgspec.field(default_factory=FieldConfig)

    @property
    def unit(self) -> str:
        """Grafana's name of the unit."""
        return self.field_config.defaults.unit

    @property
    def is_stacked(self) -> bool:
        """Whether the series are stacked."""
        return self.field_config.defaults.custom.stacking.mode != "none"


class Variable(msgspec.Struct):
    """A variable of the dashboard, which the user sets at the top."""

    name: str
    type: str


class Templating(msgspec.Struct):
    """All variables."""

    list: list[Variable]


class Dashboard(msgspec.Struct):
    """The parts of a dashboard that are needed to draw it."""

    uid: str
    title: str
    templating: Templating
    panels: list[Panel]


def load_dashboard(path: Path) -> Dashboard:
    """Read a dashboard.

    Raises:
        OSError: It cannot be read.
        msgspec.DecodeError: It is not a dashboard.
    """
    return msgspec.json.decode(path.read_bytes(), type=Dashboard)


def fill_in(expression: str, variables: Mapping[str, str]) -> str:
    """Replace the variables in an expression by values.

    Raises:
        KeyError: A variable has no value.
    """
    return _VARIABLE.sub(lambda found: variables[found[1] or found[2]], expression)


def everything(window: str) -> dict[str, str]:
    """Return values of the variables that select all hosts and models.

    Args:
        window: The window of rates: at least four scrapes.
    """
    return {"instance": ".+", "model": ".+", "__rate_interval": window}
