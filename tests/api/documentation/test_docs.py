"""The documentation page, which needs no other server."""

import re

import httpx
import pytest


async def test_the_page_needs_no_other_server(reader: httpx.AsyncClient) -> None:
    page = (await reader.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert len(links) >= 3
    assert not re.search(r"https?://", page.partition("<body>")[0])
    for link in links:
        if not link.startswith("data:"):
            assert len((await reader.get(link)).content) > 10_000


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("swagger_bundle.js", "text/javascript"), ("swagger_preset.js", "text/javascript"), ("swagger_style.css", "text/css")],
)
async def test_files_are_shown_and_not_downloaded(reader: httpx.AsyncClient, name: str, media_type: str) -> None:
    response = await reader.get(f"/docs-assets/{name}")

    assert response.status_code == 200
    assert response.headers["content-type"].startswith(media_type)
    assert "content-disposition" not in response.headers
    assert int(response.headers["content-length"]) == len(response.content) > 10_000


@pytest.mark.parametrize("name", ["redoc.js", "__init__.py", "..%2Fsecret"])
async def test_only_the_files_of_the_page_are_served(reader: httpx.AsyncClient, name: str) -> None:
    assert (await reader.get(f"/docs-assets/{name}")).status_code == 404
