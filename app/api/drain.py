"""Let a client that is answered early finish sending: one that still sends would see a broken connection, not the answer."""

import asyncio
from collections.abc import Mapping

from litestar.types import Receive

_SECONDS = 2.0


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request with these headers has a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def drain(receive: Receive) -> None:
    """Receive the rest of a body and throw it away, for up to two seconds."""
    try:
        async with asyncio.timeout(_SECONDS):
            while (await receive()).get("more_body"):
                pass
    except TimeoutError:
        pass
