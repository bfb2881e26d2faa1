"""Chromium, in which tests look at pages."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Browser, Page, async_playwright, expect

from tests.processes import PATIENCE_SECONDS, require_program

expect.set_options(timeout=PATIENCE_SECONDS * 1000)  # milliseconds

_READS_CANVAS = "willReadFrequently"  # advice for pages that read their canvas as often as the tests do
_NOTE_VIOLATIONS = """
    window.violations = [];
    document.addEventListener("securitypolicyviolation", ({ violatedDirective, blockedURI }) => {
      violations.push(`${violatedDirective} ${blockedURI}`);
    });
"""


@asynccontextmanager
async def running_browser() -> AsyncIterator[Browser]:
    """Run Debian's Chromium until the block ends; root may run it without its sandbox only."""
    program = require_program("chromium", "chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(browser: Browser, url: str, *expected: str, **options: Any) -> AsyncIterator[Page]:  # noqa: ANN401
    """Open a page in a context of its own; only texts with `expected` parts may be written to its console."""
    said: list[str] = []
    context = await browser.new_context(**options)
    await context.add_init_script(_NOTE_VIOLATIONS)
    page = await context.new_page()
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    await page.goto(url)
    yield page
    violations = await page.evaluate("violations")
    assert violations == [], violations
    unexpected = [text for text in said if not any(part in text for part in (*expected, _READS_CANVAS))]
    assert unexpected == [], unexpected
    await context.close()
