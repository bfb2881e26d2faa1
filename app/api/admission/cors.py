"""CORS: which pages of other origins may call the API from a browser, and what they can read of the responses."""

from collections.abc import Mapping, Sequence

from litestar import Litestar
from litestar.config.cors import CORSConfig
from litestar.enums import HttpMethod, ScopeType
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send
from litestar.utils import normalize_path

from app.api.admission.guards import MAX_PATH
from app.api.context import header_of
from app.api.routes import note_route

_EXPOSED_HEADERS = ["Retry-After", "Server-Timing", "X-Cache", "X-Process-Time", "X-Request-ID"]
_VARY = (b"vary", b"Origin")

Headers = list[tuple[bytes, bytes]]


class CorsMiddleware:
    """Answers preflight requests, and adds the headers of CORS; unlike Litestar's, also to responses of `DispatchMiddleware`."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], litestar: Litestar) -> None:
        self.app = app
        self._router = litestar.asgi_router
        self._config = CORSConfig([*origins], allow_methods=["GET", "HEAD", "POST"], expose_headers=_EXPOSED_HEADERS)
        self._response_headers = _encode(self._config.simple_headers)
        # `*` means all headers except Authorization, because no cookies are allowed.
        self._preflight_headers = _encode({**self._config.preflight_headers, "Access-Control-Allow-Headers": "*, Authorization"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a preflight request, or pass a request on."""
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return
        origin, requested = header_of(scope, b"origin"), header_of(scope, b"access-control-request-method")
        if scope["method"] == HttpMethod.OPTIONS and origin and requested:
            headers = self._headers(scope, requested, origin, self._preflight_headers)
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        headers = self._headers(scope, scope["method"], origin, self._response_headers)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        await self.app(scope, receive, send_with_headers)

    def _headers(self, scope: HTTPScope, method: str, origin: str, allowing: Headers) -> Headers:
        is_allowed = origin and self._config.is_origin_allowed(origin) and not self._is_for_admin(scope, method)
        if self._config.is_allow_all_origins:
            return allowing if is_allowed else []
        # Caches must not give the response to a page of another origin, even if it allows none.
        return [*allowing, (b"access-control-allow-origin", origin.encode()), _VARY] if is_allowed else [_VARY]

    def _is_for_admin(self, scope: HTTPScope, method: str) -> bool:
        if len(scope["path"]) > MAX_PATH:
            return False  # `check_framing` rejects it; the router would keep it in a cache
        try:
            _, handler, _, _, template = self._router.handle_routing(path=normalize_path(scope["path"]), method=method)
        except HTTPException:
            return False  # no such route, or one of a dialect
        note_route(scope, template)
        return handler.opt.get("scope") == "admin"


def _encode(headers: Mapping[str, str]) -> Headers:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items() if name != "Vary"]
