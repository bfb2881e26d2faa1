"""Let a client that is answered early finish sending: one that still sends would see a broken connection, not the answer."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from litestar.types import Receive

_SECONDS = 2.0
_ANONYMOUS_BYTES = 1 << 20


def has_body(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request with these headers has a body."""
    return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers


async def drain(receive: Receive, *, is_anonymous: bool = False) -> None:
    """Receive the rest of a body and throw it away, for up to two seconds; an anonymous sender has to wait after the first MiB."""
    received = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS):
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                received += len(message["body"])
                if is_anonymous and received > _ANONYMOUS_BYTES:
                    await asyncio.sleep(_SECONDS)
