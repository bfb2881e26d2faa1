"""The Grafana dashboard: its panels and their PromQL expressions."""

import re

import msgspec

from tests.deploy.needs import DEPLOY

DASHBOARD = DEPLOY / "grafana" / "nereid.json"


class Target(msgspec.Struct):
    expr: str

    def expression(self, window: str, **chosen: str) -> str:
        """Return the query with values of variables, which are all there are by default.

        Args:
            window: Of its rates; four scrapes or more.
            chosen: Values by variable.
        """
        values = {"instance": ".+", "triton": ".+", "model": ".+", "__rate_interval": window, **chosen}
        return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values[found[1] or found[2]], self.expr)


class Panel(msgspec.Struct):
    """One panel; a panel of the type `row` is a heading."""

    type: str
    title: str
    targets: list[Target] = msgspec.field(default_factory=list)


PANELS = msgspec.convert(msgspec.json.decode(DASHBOARD.read_bytes())["panels"], list[Panel])
