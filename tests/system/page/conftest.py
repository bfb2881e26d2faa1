"""Chromium, a gateway to the session's Triton, and its page."""

from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Browser, Page, expect

from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.browser import opened, running_browser
from tests.faults.serving import Gateway, running_gateway
from tests.system.page.scene import KEY, options_of


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
async def gateway(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(settings.triton_address, tmp_path_factory.mktemp("page"), **options_of(settings)) as running:
        yield running


@pytest.fixture(scope="module")
async def keyed_gateway(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("keyed")
    options = {**options_of(settings), "api_keys_file": write_keys(folder, (*KEY.partition(".")[::2], "detect"))}
    async with running_gateway(settings.triton_address, folder, **options) as running:
        yield running


@pytest.fixture
async def page(browser: Browser, gateway: Gateway) -> AsyncIterator[Page]:
    """The page on a laptop whose screen has two pixels for each of CSS."""
    async with opened(browser, gateway.url, device_scale_factor=2, permissions=["clipboard-read", "clipboard-write"]) as made:
        await expect(made.get_by_label("Model")).to_have_value(
            "six_columns"
        )  # a list that comes later hides what is said before it
        yield made
