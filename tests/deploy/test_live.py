"""A Prometheus that scrapes a loaded service: every panel of the dashboard has values, and every recording is made."""

import asyncio
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import pytest

from tests.deploy.dashboard import PANELS, Panel, Target
from tests.deploy.loaded import exercise, loadable_service
from tests.processes import no_process_left
from tests.programs import require_program
from tests.prometheus import CONFIG, Prometheus, running_prometheus

pytestmark = pytest.mark.system

GPU_PANELS = {"GPU utilisation", "GPU memory"}
"""They have values only where Triton has a GPU."""
HOST, TRITON = "127.0.0.1", "localhost"
SECONDS = 30.0
SCRAPE_SECONDS = 0.5


class Observed(NamedTuple):
    """The data that a Prometheus has about a loaded service."""

    prometheus: Prometheus
    start: float
    end: float

    def has_values(self, target: Target, **chosen: str) -> bool:
        series = self.prometheus.query_range(target.expression("4s", **chosen), self.start, self.end, SCRAPE_SECONDS)
        return any(one.points for one in series)


def _renamed(targets: dict[str, str]) -> dict[str, str]:
    return targets | {"triton": targets["triton"].replace(HOST, TRITON)}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A service that was loaded, whose Triton was killed, and that is still there; its Triton has another host name."""
    require_program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("observed")
    with (
        no_process_left(),
        loadable_service(folder) as service,
        running_prometheus(_renamed(service.targets), folder, scrape_seconds=SCRAPE_SECONDS) as prometheus,
    ):
        start = time.time()
        asyncio.run(exercise(service, SECONDS))
        yield Observed(prometheus, start, time.time())


@pytest.mark.parametrize("panel", [panel for panel in PANELS if panel.type != "row"], ids=lambda panel: str(panel.title))
def test_every_panel_has_values(observed: Observed, panel: Panel) -> None:
    empty = [target.expr for target in panel.targets if not observed.has_values(target, instance=HOST)]

    if panel.title in GPU_PANELS and observed.prometheus.query("absent(nv_gpu_utilization)"):
        assert len(empty) == len(panel.targets)
    else:
        assert empty == []


def test_the_panels_of_a_triton_that_is_not_there_are_empty(observed: Observed) -> None:
    """So that the variable `triton` chooses among several."""
    targets = [target for panel in PANELS for target in panel.targets if "nv_" in target.expr]

    assert len(targets) > 5
    assert not [target.expr for target in targets if observed.has_values(target, triton="other")]


def test_every_metric_exists(observed: Observed) -> None:
    """A metric that does not exist would leave an alert silent, and a panel that counts rare events at zero."""
    rules = [msgspec.yaml.decode((CONFIG.parent / name).read_bytes()) for name in ("recordings.yml", "alerts.yml")]
    expressions = [rule["expr"] for file in rules for group in file["groups"] for rule in group["rules"]]
    expressions += [target.expr for panel in PANELS if panel.title not in GPU_PANELS for target in panel.targets]
    used = {
        name
        for expression in expressions
        for name in re.findall(r"\b(?:instance:nereid_\w+:\w+|(?:api|triton|nv)_\w+)", expression)
    }

    assert len(used) > 30
    of_routes = {"api_canary_withdrawn"}  # the gateway here has none
    assert used - observed.prometheus.names() == of_routes
