"""The search tab of the page, in a real browser, on a real PostgreSQL: images like one, and words in images."""

from collections.abc import AsyncIterator

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.browser import opened
from tests.faults.serving import Gateway, running_gateway
from tests.postgres import Server
from tests.system.page.conftest import KEY, SCENE, choose, enlarged_scene, options_of

pytestmark = pytest.mark.usefixtures("served")
OTHER = enlarged_scene(times=3)


@pytest.fixture
async def searching(settings: Settings, postgres: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway that requires keys and keeps two images."""
    folder = tmp_path_factory.mktemp("search")
    name, secret = KEY.split(".")
    keys = write_keys(folder, (name, secret, "search"), ("scanner", secret, "ingest"))
    async with postgres.fresh() as url:
        options = {**options_of(settings), "search": "on", "database_url": url}
        options |= {"search_thumbnails": "true", "api_keys_file": keys}
        async with running_gateway(settings.triton_address, folder, **options) as running:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                for number, image in enumerate((SCENE, OTHER), 1):
                    query = {"image_id": f"scene-{number}", "image_path": f"/scenes/{number}.jpg"}
                    response = await client.post("/ingest", params=query, content=image, headers={"X-API-Key": f"scanner.{secret}"})
                    assert response.status_code == 201, response.text
            yield running


async def hits(page: Page) -> list[str]:
    return await page.locator("#hits figcaption .name").all_inner_texts()


async def test_images_are_found_by_an_image_and_by_words_on_a_phone(browser: Browser, searching: Gateway) -> None:
    size = {"width": 360, "height": 740}
    async with opened(browser, f"{searching.url}#search", "401", viewport=size, has_touch=True, is_mobile=True) as page:
        await expect(page.get_by_role("heading", name="Images", exact=True)).to_be_visible()  # the other view's button is hidden
        await choose(page, SCENE)
        await expect(page.get_by_role("alert")).to_contain_text("A valid API key is needed")
        await page.get_by_label("API key").fill(KEY)
        await page.keyboard.press("Enter")
        await expect(page.locator("#hits img")).to_have_count(2)
        assert await hits(page) == ["/scenes/1.jpg", "/scenes/2.jpg"]
        assert (await page.locator("#hits .score").all_inner_texts())[0] == "1.000"
        assert await page.locator("#hits img").first.evaluate("(image) => image.decode().then(() => image.naturalWidth)") > 0
        assert await page.evaluate("document.documentElement.scrollWidth") == 360

        await page.get_by_label("Words that are in the image").fill("r")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", name="Images with “r”")).to_be_visible()
        assert set(await hits(page)) == {"/scenes/1.jpg", "/scenes/2.jpg"}
        await page.get_by_label("Words that are in the image").fill("nowhere")
        await page.get_by_role("button", name="Find").click()
        await expect(page.get_by_text("Nothing was found.")).to_be_visible()
        assert await hits(page) == []
