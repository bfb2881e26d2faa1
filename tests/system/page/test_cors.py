"""A page of another origin calls the gateway from a real browser."""

from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from playwright.async_api import Browser, Page

from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.browser import opened
from tests.fakes.http import answering
from tests.faults.serving import Gateway, running_gateway
from tests.system.page.scene import SCENE, options_of

pytestmark = pytest.mark.usefixtures("served")

CALL = """
    async ([url, method, key, image]) => {
      const body = image && Uint8Array.from(atob(image), (character) => character.charCodeAt(0));
      try {
        const response = await fetch(url, { method, headers: key ? { Authorization: `Bearer ${key}` } : {}, body });
        return [response.status, await response.json(), response.headers.has("X-Request-ID")];
      } catch (error) {
        return error.name;
      }
    }
"""
"""Makes a request, and returns what the page can read of the response, or the name of the browser's error."""
CAMERA, BOSS = "camera.secret", "boss.secret"
REFUSED = "TypeError"
"""How a browser tells a page that it may not read a response."""
REFUSALS = ("blocked by CORS policy", "ERR_FAILED")
"""How it tells the developer, in the console."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The origin of a page, which is empty."""
    with answering(b"<!doctype html>") as url:
        yield url


@pytest.fixture(scope="module")
async def open_gateway(settings: Settings, site: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway with keys that the pages of `site` may call."""
    folder = tmp_path_factory.mktemp("cors")
    keys = write_keys(folder, ("camera", "secret", "detect"), ("boss", "secret", "admin"))
    given = {**options_of(settings), "cors_origins": site, "api_keys_file": keys}
    async with running_gateway(settings.triton_address, folder, **given) as running:
        yield running


async def call(page: Page, method: str, url: str, key: str = "", image: bytes = b"") -> Any:  # noqa: ANN401
    return await page.evaluate(CALL, [url, method, key, b64encode(image).decode() or None])


async def test_a_page_of_a_listed_origin_gets_detections_and_reads_errors(
    browser: Browser, open_gateway: Gateway, site: str
) -> None:
    url = open_gateway.url
    async with opened(browser, site, "401") as page:
        found = await call(page, "POST", f"{url}/detect", CAMERA, SCENE)
        rejected = await call(page, "POST", f"{url}/detect", "camera.wrong", SCENE)
        models = await call(page, "GET", f"{url}/models", CAMERA)

    assert [answer[0] for answer in (found, rejected, models)] == [200, 401, 200]
    assert [detection["class_name"] for detection in found[1]["detections"]] == ["red", "blue"]
    assert rejected[1]["code"] == "unauthorized"
    assert all(has_id for _, _, has_id in (found, rejected, models))


async def test_a_page_of_another_origin_is_refused_by_the_browser(browser: Browser, open_gateway: Gateway, site: str) -> None:
    """The same page under another name of the machine, even if its request needs no preflight request."""
    async with opened(browser, site.replace("127.0.0.1", "localhost"), *REFUSALS) as page:
        assert await call(page, "POST", f"{open_gateway.url}/detect", CAMERA, SCENE) == REFUSED
        assert await call(page, "GET", f"{open_gateway.url}/") == REFUSED


async def test_no_page_of_another_origin_reaches_the_routes_of_admin(browser: Browser, open_gateway: Gateway, site: str) -> None:
    """Even with the key of an administrator."""
    async with opened(browser, site, *REFUSALS) as page:
        for method, key in (("POST", BOSS), ("DELETE", BOSS)):
            assert await call(page, method, f"{open_gateway.url}/models/doors", key) == REFUSED
