"""An image for the page, and what a program finds in it."""

from base64 import b64encode
from io import BytesIO
from typing import Any

import httpx
from PIL import ExifTags, Image
from playwright.async_api import Page

from app.settings.schema import Settings
from tests.fakes import models
from tests.faults.serving import Gateway
from tests.support import json

KEY = "camera.a-secret"
"""A key with the scope `detect` at `keyed_gateway`; it protects nothing."""
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
    return {
        "model": "six_columns",
        "model_repository": settings.model_repository,
        "workers": 1,
    }


async def ask(gateway: Gateway, image: bytes, **query: object) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
        answer: dict[str, Any] = json(await client.post("/detect", params={"boxes": "pixel", **query}, content=image))  # type: ignore[dict-item]
    return answer


async def choose(page: Page, image: bytes) -> None:
    async with page.expect_file_chooser() as chooser:
        await page.get_by_role("button", name="Choose image").click()
    await (await chooser.value).set_files({"name": "scene.jpg", "mimeType": "image/jpeg", "buffer": image})
