"""A Prometheus that scrapes a loaded service: every panel of the dashboard has values, and every metric in a rule exists."""

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import pytest

from bench.harness.ports import find_free
from bench.load.driver import Driver
from bench.load.images import unlabelled_samples
from bench.models.repository import write_fixture
from tests.deploy.needs import DASHBOARD, load
from tests.faults.fleet import Fleet, running_fleet
from tests.processes import no_process_left, require_program
from tests.prometheus import CONFIG, Prometheus, running_prometheus

pytestmark = pytest.mark.system

MODEL, SLOW_MODEL = "sim_gpu", "wait_20"
GPU_PANELS = {"GPU utilisation", "GPU memory"}
"""They have values only where Triton has a GPU."""
HOST, TRITON = "127.0.0.1", "localhost"
SECONDS, SCRAPE_SECONDS = 30.0, 0.5
PANELS: list[tuple[str, list[str]]] = [
    (panel["title"], [target["expr"] for target in panel.get("targets", ())])
    for panel in msgspec.json.decode(DASHBOARD.read_bytes())["panels"]
]
"""Title and queries of each."""
ODD = (
    ("GET", "/health"),
    ("GET", "/nowhere"),
    ("POST", "/detect"),  # without a body
    ("POST", "/detect?timeout_ms=1"),
    ("POST", f"/predict/{SLOW_MODEL}?timeout_ms=20"),
)


async def exercise(service: Fleet) -> None:
    """Generate data for every panel: steady load, a crowd, invalid requests, and a killed Triton, which restarts in 20 seconds."""
    samples = unlabelled_samples()

    async def crowd() -> None:
        await asyncio.sleep(SECONDS / 6)
        await Driver(f"{service.url}/predict/{SLOW_MODEL}", samples, SECONDS / 4).closed(150, is_polite=True)

    async def kill() -> None:
        await asyncio.sleep(SECONDS / 2)
        triton = service.triton()
        assert triton is not None
        triton.kill()

    async def ask_oddly() -> None:
        async with httpx.AsyncClient(base_url=service.url, trust_env=False) as client:
            while True:
                for method, path in ODD:
                    with suppress(httpx.HTTPError):  # the service may be briefly unavailable
                        await client.request(method, path, content=samples[0].body if "?" in path else b"")
                    await asyncio.sleep(0.25)

    odd = asyncio.create_task(ask_oddly())
    await asyncio.gather(Driver(f"{service.url}/detect", samples, SECONDS).constant(40), crowd(), kill())
    odd.cancel()
    await asyncio.gather(odd, return_exceptions=True)


class Observed(NamedTuple):
    """The data that a Prometheus has about a loaded service."""

    prometheus: Prometheus
    start: float
    end: float

    def has_values(self, query: str) -> bool:
        """Return whether a query of the dashboard has values, with rates of eight scrapes and what it has chosen by default."""
        values = {"instance": HOST, "triton": ".+", "model": ".+", "__rate_interval": "4s"}
        query = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values[found[1] or found[2]], query)
        return self.prometheus.has_values(query, self.start, self.end, SCRAPE_SECONDS)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A service with a fast model and a slow one that was loaded, and that is still there; its Triton has another host name."""
    require_program("prometheus", "prometheus")
    folder: Path = tmp_path_factory.mktemp("observed")
    for model in (MODEL, SLOW_MODEL):
        write_fixture(model, folder / "models")
    (http,) = find_free(1)
    settings = {"triton_ports": http, "model": MODEL, "workers": 2, "timeout_seconds": 2}
    with (
        no_process_left(),
        running_fleet(folder / "models", folder, instances=0, settings=settings) as service,
        running_prometheus(
            {"nereid": service.url.removeprefix("http://"), "triton": f"{TRITON}:{http + 1}"}, folder, scrape_seconds=SCRAPE_SECONDS
        ) as prometheus,
    ):
        start = time.time()
        asyncio.run(exercise(service))
        yield Observed(prometheus, start, time.time())


def test_every_panel_has_values(observed: Observed) -> None:
    has_gpu = observed.has_values("nv_gpu_utilization")
    for title, queries in PANELS:
        empty = [query for query in queries if not observed.has_values(query)]
        assert len(empty) == (len(queries) if title in GPU_PANELS and not has_gpu else 0), (title, empty)


def test_every_metric_exists(observed: Observed) -> None:
    """A metric that does not exist would leave an alert silent, and a panel that counts rare events at zero."""
    rules = [load(CONFIG.parent / name) for name in ("recordings.yml", "alerts.yml")]
    expressions = [rule["expr"] for file in rules for group in file["groups"] for rule in group["rules"]]
    expressions += [query for title, queries in PANELS if title not in GPU_PANELS for query in queries]
    metric = re.compile(r"\b(?:instance:nereid_\w+:\w+|(?:api|triton|nv)_\w+)")
    used = {name for expression in expressions for name in metric.findall(expression)}

    assert len(used) > 30
    # The gateway here has neither routes nor Frigate.
    assert used - observed.prometheus.names() == {"api_canary_withdrawn", "api_frigate_images_total"}
