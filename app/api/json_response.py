"""The response of the routes that must be fast."""

from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

VARY = b"vary", b"Accept"
"""The header of whatever `Accept` has a say in."""


class JsonResponse(ASGIResponse):
    """Sends JSON that has been encoded, with status 200.

    Litestar's own response also prepares for cookies, background tasks and HEAD, which costs some 15 us, up to a tenth of the
    step `framework` in `./just bench stages`.
    """

    def __init__(self, body: bytes) -> None:  # deliberately not the constructor of its base
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI
        """Send the response."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body)), VARY]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})
