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
            response = await reader.get(link)
            assert response.headers["content-type"].startswith("text/css" if link.endswith("css") else "text/javascript")
            assert "content-disposition" not in response.headers  # it is shown and not downloaded
            assert int(response.headers["content-length"]) == len(response.content) > 10_000


@pytest.mark.parametrize("name", ["redoc.js", "__init__.py", "..%2Fsecret"])
async def test_only_the_files_of_the_page_are_served(reader: httpx.AsyncClient, name: str) -> None:
    assert (await reader.get(f"/docs-assets/{name}")).status_code == 404
