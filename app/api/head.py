"""Answer HEAD wherever GET is answered: with the same status and headers, and no body."""

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Hands a HEAD request on as GET, and leaves out the body of the response.

    Litestar can route both methods to one handler, but would send the body, would describe each route twice in the OpenAPI
    document, and makes the routes of the documentation itself.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request; GET as it is."""
        if scope["type"] != ScopeType.HTTP or scope["method"] == "GET":
            await self.app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        if is_head:
            scope["method"] = "GET"

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, _with_head(value) if name == b"allow" else value) for name, value in message["headers"]
                ]
            elif is_head:
                message = {"type": "http.response.body", "body": b"", "more_body": bool(message.get("more_body"))}
            await send(message)

        await self.app(scope, receive, send_without_body)


def _with_head(allow: bytes) -> bytes:
    """Add HEAD to the methods in an `Allow` header if GET is one of them."""
    return allow.replace(b"GET", b"GET, HEAD")
