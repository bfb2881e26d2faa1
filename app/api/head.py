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
        """Handle a request; change nothing but HEAD, and what OPTIONS is told."""
        if scope["type"] == ScopeType.HTTP:
            if scope["method"] == "HEAD":
                scope["method"] = "GET"
                send = _without_body(send)
            elif scope["method"] == "OPTIONS":
                send = _with_head_allowed(send)
        await self.app(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_without_body(message: Message) -> None:
        if message["type"] != "http.response.start":
            message = {"type": "http.response.body", "body": b"", "more_body": bool(message.get("more_body"))}
        await send(message)

    return send_without_body


def _with_head_allowed(send: Send) -> Send:
    async def send_with_head_allowed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [
                (name, with_head(value.decode()).encode() if name == b"allow" else value) for name, value in message["headers"]
            ]
        await send(message)

    return send_with_head_allowed


def with_head(allow: str) -> str:
    """Add HEAD to the methods in an `Allow` header if GET is one of them."""
    return allow.replace("GET", "GET, HEAD")
