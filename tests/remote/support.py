"""What tests of fetching need."""

import pytest

from app.errors import GatewayError
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from tests.processes import PATIENCE_SECONDS

IMAGE = bytes(range(256)) * 300
"""What the host of the tests has at /cat.jpg."""


async def fetch(fetcher: Fetcher, url: str, seconds: float = PATIENCE_SECONDS) -> bytes:
    """Fetch as a request does; the bytes that were counted are those of the image."""
    counted: list[int] = []
    image = await fetcher.fetch(fetcher.parse(url), counted.append, Deadline.after(seconds))
    assert sum(counted) == len(image)
    return image


async def failure(fetcher: Fetcher, url: str, seconds: float = PATIENCE_SECONDS) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await fetch(fetcher, url, seconds)
    return raised.value
