"""The panels of the Grafana dashboard, drawn from a Prometheus without Grafana."""

import argparse
import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import msgspec
import uvloop

from bench.experiments.options import Commands, positive
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT
from bench.harness.prometheus import Prometheus, running_prometheus
from bench.harness.service import Service, running_service
from bench.load.images import unlabelled_samples
from bench.load.overload import drive_arrivals, drive_crowd
from bench.models.repository import write_fixture
from bench.report.dashboard import Dashboard, Panel, everything, fill_in, load_dashboard
from bench.report.dashboard_page import Curve, dashboard_page

DASHBOARD = ROOT / "deploy" / "grafana" / "nereid.json"

_MODEL, _SLOW_MODEL = "sim_gpu", "wait_20"
_POINTS = 120  # per curve
_SCRAPES = 4  # per window of a rate
_SHIPPED_SCRAPE_SECONDS = 15.0
_SCRAPE_SECONDS = 1.0
_RATE = 40
_CROWD = 150
_ODD_SECONDS = 0.25
_ODD = (
    ("GET", "/health"),
    ("GET", "/nowhere"),
    ("POST", "/detect"),  # without a body
    ("POST", "/detect?timeout_ms=1"),
    ("POST", f"/predict/{_SLOW_MODEL}?timeout_ms=20"),
)


def run(options: argparse.Namespace) -> int:
    """Draw the data of a Prometheus or, without one, of a service under load and faults."""
    dashboard = _load(options.dashboard)
    if options.prometheus:
        prometheus = Prometheus(options.prometheus.rstrip("/"))
        page = draw(dashboard, prometheus, options.minutes * 60, _SHIPPED_SCRAPE_SECONDS)
    else:
        with TemporaryDirectory(prefix="nereid-bench-") as temporary:
            folder = Path(temporary)
            with (
                loadable_service(folder) as service,
                running_prometheus(service.targets, folder, scrape_seconds=_SCRAPE_SECONDS) as prometheus,
            ):
                uvloop.run(exercise(service, options.seconds))
                page = draw(dashboard, prometheus, options.seconds, _SCRAPE_SECONDS)
    try:
        options.output.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ContestantError(f"{options.output} cannot be written: {error.strerror}") from error
    print(f"written: {options.output}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("dashboard", help="draw the Grafana dashboard's panels from a Prometheus, without Grafana")
    command.add_argument("--prometheus", metavar="URL", help="draw what it has; without it, a service is run and loaded")
    command.add_argument("--minutes", type=positive, default=60.0, help="how much of it to draw")
    command.add_argument("--seconds", type=positive, default=60.0, help="how long to load a service of its own")
    command.add_argument("--dashboard", type=Path, default=DASHBOARD, help="the dashboard's JSON")
    command.add_argument("-o", "--output", type=Path, default=Path("dashboard.html"), help="the page")
    command.set_defaults(run=run)


@contextmanager
def loadable_service(folder: Path) -> Iterator[Service]:
    """Run a service with two workers, a fast model and a slow one, until the block ends.

    Args:
        folder: Folder for the models and its files.

    Raises:
        ContestantError, InstallError, PackageError: As for `running_service`.
    """
    for model in (_MODEL, _SLOW_MODEL):
        write_fixture(model, folder / "models")
    with running_service(folder / "models", folder, {"model": _MODEL, "workers": 2, "timeout_seconds": 2}) as service:
        yield service


async def exercise(service: Service, seconds: float) -> None:
    """Generate data for every panel: steady load, a crowd, invalid requests, and a killed Triton.

    Args:
        service: The service of `loadable_service`.
        seconds: Duration. Triton needs 20 seconds to restart.

    Raises:
        ContestantError: The service no longer listens.
    """
    samples = unlabelled_samples()

    async def crowd() -> None:
        await asyncio.sleep(seconds / 6)
        await drive_crowd(f"{service.url}/predict/{_SLOW_MODEL}", samples, clients=_CROWD, seconds=seconds / 4, is_polite=True)

    async def kill() -> None:
        await asyncio.sleep(seconds / 2)
        if (triton := service.triton()) is not None:
            triton.kill()

    odd = asyncio.create_task(_ask_oddly(service.url, samples[0].body))
    try:
        await asyncio.gather(drive_arrivals(f"{service.url}/detect", samples, rate=_RATE, seconds=seconds), crowd(), kill())
    except OSError as error:
        raise ContestantError(f"{service.url} does not accept connections any more: {error}") from error
    finally:
        odd.cancel()
        await asyncio.gather(odd, return_exceptions=True)


def draw(dashboard: Dashboard, prometheus: Prometheus, seconds: float, scrape_seconds: float) -> str:
    """Draw the last seconds as a page.

    Raises:
        ContestantError: A query of Prometheus failed.
    """
    end = time.time()
    step = seconds / _POINTS
    variables = everything(f"{max(_SCRAPES * scrape_seconds, step) * 1000:.0f}ms")

    def curves(panel: Panel) -> list[Curve]:
        return [
            Curve(target.name(series.labels), [(at - end + seconds, value) for at, value in series.points])
            for target in panel.targets
            for series in prometheus.query_range(fill_in(target.expr, variables), end - seconds, end, step)
        ]

    return dashboard_page(dashboard, {panel.id: curves(panel) for panel in dashboard.panels}, seconds)


async def _ask_oddly(url: str, image: bytes) -> None:
    """Send invalid requests in turn until cancelled."""
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        while True:
            for method, path in _ODD:
                with suppress(httpx.HTTPError):  # the service may be briefly unavailable
                    await client.request(method, path, content=image if "?" in path else b"")
                await asyncio.sleep(_ODD_SECONDS)


def _load(path: Path) -> Dashboard:
    try:
        return load_dashboard(path)
    except OSError as error:
        raise ContestantError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ContestantError(f"{path} is no dashboard: {error}") from error
