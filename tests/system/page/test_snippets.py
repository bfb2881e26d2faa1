"""The code that the page shows for the same request: it runs as it is copied, and finds what the page shows."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.async_api import Browser, Page, expect

from tests.browser import opened
from tests.faults.serving import Gateway
from tests.processes import require_program
from tests.system.page.conftest import BLOB, SCENE, ask, choose

pytestmark = pytest.mark.usefixtures("served")


async def copied(page: Page, language: str) -> str:
    """Choose an image and settings, and copy the code for the same request."""
    await choose(page, SCENE)
    await expect(page.locator("#detections li")).to_have_count(2)
    await page.get_by_role("group", name="Classes to show").get_by_role("button", name="red").click()
    await page.locator("#confidence").fill("0.3")
    button = page.get_by_role("button", name=language)
    await button.click()
    await expect(button).to_have_attribute("aria-pressed", "true")
    await page.get_by_role("button", name="Copy").click()
    await expect(page.get_by_role("button", name="Copied")).to_be_visible()
    code: str = await page.evaluate("navigator.clipboard.readText()")
    return code


@pytest.fixture
async def expected(gateway: Gateway) -> list[dict[str, Any]]:
    """What the code of `copied` finds."""
    found: list[dict[str, Any]] = (await ask(gateway, SCENE, boxes="normalized", confidence=0.3, classes="1"))["detections"]
    assert [detection["class_name"] for detection in found] == ["blue"]
    return found


async def test_the_command_finds_the_same(page: Page, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    require_program("curl", "curl")
    (tmp_path / "scene.jpg").write_bytes(SCENE)
    command = await copied(page, "curl")
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, stdout=subprocess.PIPE, check=True)  # noqa: ASYNC221

    assert msgspec.json.decode(done.stdout)["detections"] == expected


async def test_the_python_code_finds_the_same(page: Page, expected: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "scene.jpg").write_bytes(SCENE)
    code = await copied(page, "Python")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)  # noqa: ASYNC221

    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == expected


async def test_the_javascript_code_finds_the_same(browser: Browser, gateway: Gateway, expected: list[dict[str, Any]]) -> None:
    async with opened(browser, gateway.url, "415", permissions=["clipboard-read", "clipboard-write"]) as page:
        code = await copied(page, "JavaScript")
        failing = f"{code}; detect(new Blob(['no image'])).catch(({{ message }}) => message)"

        assert await page.evaluate(f"{code}; detect({BLOB})") == expected
        assert (await page.evaluate(failing)).startswith("the data is not an image")
