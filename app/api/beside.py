"""Search runs in a process beside the workers, which pass its requests on to it over a private socket.

A dead disk or a hung database may block that process. It costs a worker only the requests of search.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from math import inf
from time import monotonic
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from litestar.types import HTTPScope, Receive, Send

from app.api.context import BodyLimits, RequestContext, context_of
from app.api.receiving.client_watch import ClientWatch, has_body
from app.errors import GatewayError, GatewayFull, MalformedRequest, SearchUnavailable
from app.host.processes import MAX_PASSED_ON
from app.resilience.fairness import Caller, CallerCounts
from app.resilience.interruption import Interruption
from app.resilience.worker_table import WorkerTable

_CHECK_SECONDS, _BEAT_SECONDS = 0.25, 1.5
# After so long, most requests have been answered. Each check of the database takes a second if it hangs.
_SLOW_SECONDS = 0.5
_HOP_BY_HOP = {b"connection", b"expect", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_REPLACED = {b"traceparent", b"x-real-ip", b"x-request-id"}
_KEYS = {b"authorization", b"x-api-key"}
REPORT = "/unusable"
_AWAY = "the process that keeps images does not answer"


@asynccontextmanager
async def open_process(
    transport: httpx.AsyncBaseTransport, limits: BodyLimits, table: WorkerTable
) -> AsyncIterator["SearchProcess"]:
    """Open the connections to the process of search, whether it answers or not."""
    async with httpx.AsyncClient(transport=transport, base_url="http://search", timeout=httpx.Timeout(None)) as client:
        search = SearchProcess(client, transport, limits, table)
        watching = asyncio.gather(search.watch_process(), search.watch_database())
        try:
            yield search
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


class Report(msgspec.Struct, frozen=True):
    """What the process of search tells the workers beside: why it does not work, if so; whether its database takes no images."""

    unusable: str | None
    is_read_only: bool


class SearchProcess:
    """Search as a worker sees it: a process that answers requests, or does not."""

    def __init__(
        self, client: httpx.AsyncClient, transport: httpx.AsyncBaseTransport, limits: BodyLimits, table: WorkerTable
    ) -> None:
        self._limits, self._read_beat = limits, table.follower_beat
        self._passed_on = CallerCounts(table, "passed on")
        self._client, self._transport = client, transport
        self._is_away = self.is_read_only = False
        self._database_failure: str | None = None
        self._waiting: dict[Interruption, float] = {}
        """Since when each request waits for the process; `inf` if the response has begun."""

    async def watch_process(self) -> None:
        """Look regularly whether the process runs. When it does not, requests that wait for it fail, and new ones at once."""
        last, changed_at = 0, 0.0
        while True:
            now, beat = monotonic(), self._read_beat()
            if beat != last:
                last, changed_at = beat, now
            self._is_away = not beat or now - changed_at > _BEAT_SECONDS
            if self._is_away:
                for waiting in self._waiting:
                    waiting.interrupt(SearchUnavailable(_AWAY))
            await asyncio.sleep(_CHECK_SECONDS)

    async def watch_database(self) -> None:
        """Look whether the database answers, while requests wait, or it has not; then they fail, and new ones at once."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            if self._database_failure or min(self._waiting.values(), default=inf) < monotonic() - _SLOW_SECONDS:
                failure = await self.why_unusable()
                self._database_failure = failure = None if failure == _AWAY else failure  # `watch_process` decides about that
                for waiting, since in self._waiting.items():
                    if failure and since < inf:
                        waiting.interrupt(SearchUnavailable(failure))

    async def why_unusable(self) -> str | None:
        """Return why search does not work, None if it does."""
        if self._is_away:
            return _AWAY
        with suppress(TimeoutError, httpx.HTTPError, msgspec.DecodeError):  # or what is no report
            async with asyncio.timeout(_BEAT_SECONDS):
                response = await self._client.get(REPORT)
                report = msgspec.json.decode(response.content, type=Report)
                self.is_read_only = report.is_read_only
                return report.unusable
        return _AWAY

    async def keep_vector(self, image: bytes, image_id: str | None, scope: HTTPScope, seconds: float) -> str:
        """Index an encoded image, with its vector alone; return its id. Raise SearchUnavailable, or the error of the process."""
        parts = dict.fromkeys(("enable_detection", "enable_faces", "enable_ocr"), "false")
        query = {**parts, "timeout_ms": str(round(seconds * 1e3)), **({} if image_id is None else {"image_id": image_id})}
        headers = [*(header for header in scope["headers"] if header[0] in _KEYS), *_headers(context_of(scope))]
        with self._counting(context_of(scope).caller), Interruption() as waiting, self._answering(waiting):
            response = await self._client.post("/ingest", params=query, headers=headers, content=image)
        document: dict[str, Any] = msgspec.json.decode(response.content)
        if response.is_error:
            error = GatewayError(document["detail"])
            vars(error).update({name: document[name] for name in ("status", "code", "title")}, repeats_request=True)
            error.retry_after_seconds = int(response.headers["retry-after"]) if "retry-after" in response.headers else None
            raise error
        return str(document["existing_image_id"] or document["image_id"])

    async def pass_on(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        """Pass a request on, and the response back; raise GatewayFull, SearchUnavailable, BodyTimeout or ClientGone."""
        context = context_of(scope)
        headers = [header for header in scope["headers"] if header[0] not in _HOP_BY_HOP | _REPLACED] + _headers(context)
        target = quote(scope["path"]).encode() + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        with self._counting(context.caller), ClientWatch(receive, self._limits) as client, self._answering(client):
            content = client.receive_parts() if has_body(dict(scope["headers"])) else None
            client.is_body_complete = content is None
            # A URL would have its dots resolved, and could be that of another route: `/ingest/../metrics`. What a client looks
            # for in a response (redirects, cookies) would take as long as the rest.
            url = self._client.base_url
            request = httpx.Request(scope["method"], url, headers=headers, content=content, extensions={"target": target})
            response = await self._transport.handle_async_request(request)
            context.is_body_received = client.is_body_complete
            async with aclosing(response):
                context.is_passed_on = True
                self._waiting[client] = inf
                kept = [(name.lower(), value) for name, value in response.headers.raw if name.lower() not in _HOP_BY_HOP]
                await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
                last = b""
                async for part in response.aiter_raw():
                    if last:
                        await send({"type": "http.response.body", "body": last, "more_body": True})
                    last = part
        # Not in the block, which the client interrupts that leaves when it has all.
        await send({"type": "http.response.body", "body": last, "more_body": False})

    @contextmanager
    def _counting(self, caller: Caller) -> Iterator[None]:
        """Count a request that is passed on. Each costs a file, and httpx looks at all connections for each new one."""
        self._passed_on.add(caller, 1)
        try:
            if not self._passed_on.has_room(caller, limit=MAX_PASSED_ON):
                raise GatewayFull("too many requests of search are in progress")
            yield
        finally:
            self._passed_on.add(caller, -1)

    @contextmanager
    def _answering(self, waiting: Interruption) -> Iterator[None]:
        failure = _AWAY if self._is_away else self._database_failure
        if failure is not None:
            raise SearchUnavailable(failure)
        self._waiting[waiting] = monotonic()
        try:
            yield
        except httpx.LocalProtocolError as error:
            raise MalformedRequest("the request's headers are malformed") from error
        except httpx.TransportError as error:
            raise SearchUnavailable(_AWAY) from error
        finally:
            del self._waiting[waiting]


def _headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    headers = {b"x-request-id": context.request_id, b"x-real-ip": context.client_address}
    if context.trace is not None:
        headers[b"traceparent"] = context.trace.traceparent
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in headers.items() if value]
