"""What the routes of search say while it is off."""

import re

import httpx
import pytest

from app.api.search import routes
from tests.support import json

ROUTES = sorted(
    (method, path) for route in [*routes.MODEL_ROUTES, *routes.ROUTES] for path in route.paths for method in route.http_methods
)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_every_route_of_search_says_how_it_is_turned_on(faces: httpx.AsyncClient, prefix: str) -> None:
    for method, path in ROUTES:
        asked = re.sub(r"{\w+:\w+}", "1", path)
        problem = json(await faces.request(method, f"{prefix}{asked}?text=red"), 404)
        assert (path, problem["code"]) == (path, "not_offered")
        assert problem["detail"] == f"{asked} is off, because this gateway keeps no images; `nereid serve --search` turns it on"
