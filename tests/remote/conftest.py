"""A real https host to fetch from."""

from collections.abc import AsyncIterator

import pytest

from tests.fakes.https import HOST, Host, response, serving
from tests.remote.support import IMAGE


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving(HOST, "cdn.example.org") as host:
        host.answers["/cat.jpg"] = response(IMAGE, "200 OK", "Content-Type: image/jpeg")
        yield host
