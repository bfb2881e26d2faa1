"""Chromium, gateways to the session's Triton, their page, an image for it, and what a program finds in that."""

from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import ExifTags, Image
from playwright.async_api import Browser, Page, expect

from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.browser import opened, running_browser
from tests.fakes import models
from tests.fakes.http import answering
from tests.faults.serving import Gateway, running_gateway
from tests.support import json

KEY = "camera.a-secret"
"""A key with the scope `detect` at `keyed_gateway`; it protects nothing."""
BOSS = "boss.a-secret"
ENLARGED = 4
TURNED = 6
"""The EXIF orientation of an image whose first row is its right side."""


def enlarged_scene(orientation: int = 1, times: int = ENLARGED) -> bytes:
    """Draw the two rectangles large enough for labels; stored turned, if its EXIF orientation says so."""
    with Image.open(BytesIO(models.scene("PNG"))) as small:
        scene = small.resize((small.width * times, small.height * times), Image.Resampling.NEAREST)
    if orientation == TURNED:
        scene = scene.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    file = BytesIO()
    scene.save(file, "JPEG", quality=95, exif=exif)
    return file.getvalue()


SCENE = enlarged_scene()
BLOB = f"new Blob([Uint8Array.from(atob('{b64encode(SCENE).decode()}'), (one) => one.charCodeAt(0))])"
"""The same image in JavaScript."""


def options_of(settings: Settings) -> dict[str, object]:
    """Return the settings of a gateway to the session's Triton, whose default model finds the two rectangles."""
    return {"model": "six_columns", "model_repository": settings.model_repository, "workers": 1}


async def ask(gateway: Gateway, image: bytes, **query: object) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer: dict[str, Any] = json(await client.post("/detect", params={"boxes": "pixel", **query}, content=image))  # type: ignore[dict-item]
    return answer


async def choose(page: Page, image: bytes) -> None:
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Choose image").click()
    await (await chooser.value).set_files({"name": "scene.jpg", "mimeType": "image/jpeg", "buffer": image})


@pytest.fixture(scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
async def gateway(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    async with running_gateway(settings.triton_address, tmp_path_factory.mktemp("page"), **options_of(settings)) as running:
        yield running


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The origin of a page, which is empty."""
    with answering(b"<!doctype html>") as url:
        yield url


@pytest.fixture(scope="module")
async def keyed_gateway(settings: Settings, site: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway with keys that the pages of `site` may call."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = write_keys(folder, (*KEY.partition(".")[::2], "detect"), (*BOSS.partition(".")[::2], "admin"))
    options = {**options_of(settings), "api_keys_file": keys, "cors_origins": site}
    async with running_gateway(settings.triton_address, folder, **options) as running:
        yield running


@pytest.fixture
async def page(browser: Browser, gateway: Gateway) -> AsyncIterator[Page]:
    """The page on a laptop whose screen has two pixels for each of CSS."""
    async with opened(browser, gateway.url, device_scale_factor=2, permissions=["clipboard-read", "clipboard-write"]) as made:
        # A list that comes later hides what is said before it.
        await expect(made.get_by_label("Model")).to_have_value("six_columns")
        yield made
