"""The documentation as a site: it is complete, and loads nothing from elsewhere."""

import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from app import feature
from app.resilience.worker_table import WorkerTable
from app.settings.schema import PREFIX
from app.telemetry.metrics import Metrics
from tests.browser import opened, running_browser
from tests.processes import require_program
from tests.support import ROOT

pytestmark = pytest.mark.system
PAGES = ("index.html", "reference/api.html", "reference/errors.html", "reference/settings.html")
PHONE = {"width": 420, "height": 800}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_program("dot", "graphviz")
    folder = tmp_path_factory.mktemp("docs")
    options = ["-W", "--keep-going", "-n", "-q", "-d", f"{folder}/doctrees"]
    command = [sys.executable, "-m", "sphinx", *options, "docs", f"{folder}/html"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return folder / "html"


@pytest.fixture(scope="module")
def origin(site: Path) -> Iterator[str]:
    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data:")
            super().end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as browser:
        yield browser


def ids_of(page: Path) -> set[str]:
    return set(re.findall(r' id="([^"]+)"', page.read_text(encoding="utf-8")))


def test_the_reference_is_complete(site: Path, table: WorkerTable) -> None:
    reference = site / "reference"
    settings = {(PREFIX + name).lower().replace("_", "-") for name in feature.settings_kind().__struct_fields__}
    metrics = {family.name.replace("_", "-") for family in Metrics(table, "", feature.instruments(table)).collect()}

    assert settings <= ids_of(reference / "settings.html")
    assert metrics <= {name.removesuffix("-total") for name in ids_of(reference / "metrics.html")}
    assert {"post-detect", "delete-models-model", "schema-detection"} <= ids_of(reference / "api.html")
    assert {"schema-health", "schema-serverhealth"} <= ids_of(reference / "health.html")
    assert {"serve", "add", "doctor"} <= ids_of(reference / "command-line.html")


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_loads_nothing_from_elsewhere(browser: Browser, origin: str, path: str) -> None:
    async with opened(browser, f"{origin}/{path}", viewport=PHONE) as page:
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert await page.locator(".sy-head").evaluate("head => getComputedStyle(head).position") == "sticky"
        mode = await page.locator("html").get_attribute("data-color-mode")
        await page.locator(".js-theme:visible").first.click()
        await expect(page.locator("html")).not_to_have_attribute("data-color-mode", str(mode))


async def test_the_search_finds_pages(browser: Browser, origin: str) -> None:
    async with opened(browser, f"{origin}/search.html?q=max_detections") as page:
        await expect(page.locator("#search-results a[href^='reference/api.html']").first).to_be_visible()
