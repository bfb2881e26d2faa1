"""Receive an inference request: its parameters, its body or the image at its URL, and its deadline."""

import sys
from collections.abc import Callable
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl

from litestar.types import HTTPScope

from app.api.caller.check import admit_with_body
from app.api.context import AnyRequest, RequestContext, context_of, header_of
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import Pairs, Parameters, parse_parameters
from app.api.parameters.tasks import PathModel
from app.api.receiving import body, content_encoding
from app.api.receiving.client_watch import ClientWatch
from app.errors import MalformedRequest
from app.pipeline.call import CallContext
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.fairness import Turn
from app.resilience.uploads import Upload
from app.telemetry.timing import FETCH

_NO_KEY = ("api_key", "")  # sent by clients whose key is in the body, or in the query


class Content(Protocol):
    """Content of a parsed body."""

    @property
    def parameters(self) -> Pairs:
        """The parameters in the body."""


C = TypeVar("C", bound=Content)
P = TypeVar("P", bound=Parameters)


class Receiving(ClientWatch, Generic[C, P]):
    """Receive a request, and interrupt the `async with` block when the client leaves.

    Yields its context, the parsed body, the parameters, and the context of the calls. Those of a `PathModel` are found after the
    body has been read, because only then does the server tell that the client has left. `parse` takes next to no time where
    `body.needs_parsing` is false. Raises a GatewayError; before the body is read if parameters in the query are the cause.
    """

    # A class, because a generator with contextlib's decorator took 5 % of the CPU time of a file that is passed through.
    def __init__(  # noqa: PLR0913 - the parts of a request
        self,
        request: AnyRequest,
        worker: WorkerResources,
        kind: type[P] | PathModel,
        parse: Callable[[bytes, str, type[P]], C],
        in_path: Pairs = (),
        *,
        may_be_empty: bool = False,
    ) -> None:
        context = context_of(request.scope)
        super().__init__(request.receive, context.body_limits)
        self._context = context
        self._received = _receive(self, context, request.scope, worker, in_path, kind, parse, may_be_empty=may_be_empty)

    async def __aenter__(self) -> tuple[RequestContext, C, P, CallContext]:
        self.__enter__()
        try:
            return self._context, *await self._received
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)


async def _receive(  # noqa: PLR0913, PLR0917 - the parts of a request
    client: ClientWatch,
    context: RequestContext,
    scope: HTTPScope,
    worker: WorkerResources,
    pairs: Pairs,
    kind: type[P] | PathModel,
    parse: Callable[[bytes, str, type[P]], C],
    *,
    may_be_empty: bool,
) -> tuple[C, P, CallContext]:
    pipeline = worker.pipeline
    if scope["query_string"]:
        pairs = [*pairs, *(pair for pair in query_of(scope) if not (context.is_anonymous and pair == _NO_KEY))]
    wanted = parse_parameters(pairs, kind) if isinstance(kind, type) else kind.common
    address, seconds = wanted.address, pipeline.limits.timeout(wanted.timeout_ms)
    admission = pipeline.admission
    is_anonymous, uploads = context.is_anonymous, admission.anonymous_uploads
    with uploads.start(context.client_address) if is_anonymous else admission.start_upload(context.caller) as upload:
        may_be_empty = may_be_empty or address is not None
        data = await client.read_body(upload, may_be_empty=may_be_empty, is_last=not is_anonymous)
        context.is_body_received = True
        received_at = monotonic()
        if not isinstance(kind, type):
            kind = await kind.find_kind(Deadline(received_at + seconds), context.caller)
            wanted = parse_parameters(pairs, kind)
        if address is not None and data:
            raise MalformedRequest("with `url` in the query, send no body")
        if address is None:
            if body.needs_parsing(context.content_type, context.content_encoding):
                work = partial(_decode_and_parse, parse, data, kind, context, upload)
                threads = pipeline.apart_threads if is_anonymous else pipeline.threads
                turn = Turn(context.caller, len(data))  # a large body must not delay small images
                content = await threads.run(work, Deadline(received_at + seconds), upload, turn=turn)
                given = [pair for pair in content.parameters if pair != _NO_KEY or not getattr(wanted, "api_key", None)]
                wanted = parse_parameters([*pairs, *given], kind)
                address = wanted.address
                images = getattr(content, "images", ())  # of a batch, which has more time
                seconds = pipeline.limits.timeout(wanted.timeout_ms, len(images))
            else:
                content = parse(data, context.content_type, kind)
        if is_anonymous and worker.keys is not None:
            key = getattr(wanted, "api_key", None)
            admit_with_body(key, context, worker.keys, worker.deployment.body_limits.total_seconds)
        client.is_body_complete = True
        context.timing.lap("read")
    if address is not None:
        with admission.start_upload(context.caller) as upload:
            image = await _fetch_image(address, pipeline.fetcher, upload, Deadline(received_at + seconds), context)
        content = parse(image, "", kind)
    # Triton would export spans even of a trace that is not sampled.
    trace = context.trace if context.trace is not None and context.trace.is_sampled else None
    uses_cache = pipeline.finder is not None and getattr(wanted, "use_cache", True)
    uses_cache = uses_cache and not any(b"no-store" in text.lower() for name, text in scope["headers"] if name == b"cache-control")
    further: dict[str, Any] = {"trace": trace, "allows_truncated": wanted.truncated == "allow", "uses_cache": uses_cache}
    if context.stream:  # without keys, many addresses are one caller
        further["stream"] = context.stream if worker.keys is not None else f"{context.stream} {context.client_address}"
    if pipeline.router is not None:
        further |= {"route_key": header_of(scope, b"x-route-key"), "after_answer": context.after_answer}
    call = CallContext(Deadline(received_at + seconds), context.timing, context.request_id, context.caller, **further)
    return content, wanted, call  # type: ignore[possibly-undefined]  # set for a body and for a url


def query_of(scope: HTTPScope) -> Pairs:
    """Return the parameters in the query."""
    return parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)


def _decode_and_parse(
    parse: Callable[[bytes, str, type[P]], C], data: bytes, kind: type[P], context: RequestContext, upload: Upload
) -> C:
    upload.add(len(data) - upload.nbytes)  # the rest, which `read_body` did not count
    plain = content_encoding.decode(data, context.content_encoding, context.body_limits.max_bytes, upload.add)
    upload.add(body.parsing_bytes(len(plain), context.content_type))
    return parse(plain, context.content_type, kind)


async def _fetch_image(url: str, fetcher: Fetcher, upload: Upload, deadline: Deadline, context: RequestContext) -> bytes:
    """Only the host of the URL is logged, because path and query may contain secrets."""
    context.timing.begin(FETCH)
    address = fetcher.parse(url)
    context.log_fields["url_host"] = address.name
    image = await fetcher.fetch(address, upload.add, deadline)
    context.timing.lap(FETCH)
    return image
