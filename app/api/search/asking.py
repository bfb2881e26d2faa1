"""What routes of search have in common: their parameters, and how a request becomes questions to the engine."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, cast

import msgspec
from litestar.di import NamedDependency
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import RequestBody, Schema
from litestar.params import PathParameter, QueryParameter
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.native import respond_in_thread
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import Timed
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerResources
from app.api.documentation.openapi import PROBLEMS, describe, describe_form, own_route
from app.api.parameters.parse import Fraction, Parameters
from app.api.receiving.body import ParsedBody, decode, parse_body, parse_document
from app.api.receiving.content_type import JSON, body_type
from app.api.receiving.intake import Receiving
from app.errors import InvalidParameter
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.search.engine import Filter, Hit, Page, Vector, VectorIndex
from app.search.postgres.engine import PostgresEngine
from app.search.service import Search
from app.telemetry.timing import SEARCH

WorkerSearch = NamedDependency[Search]
Document = dict[str, Any]
RecordId = Annotated[str, PathParameter(max_length=64)]
PageNumber = Annotated[int, QueryParameter(ge=0, le=10_000, description="From 0.")]
PageSize = Annotated[int, QueryParameter(ge=1, le=100)]
READING = {status: PROBLEMS[status] for status in (400, 404, 503, 504)}
_MAX_OFFSET, _MAX_WORDS, _MAX_METADATA = 10_000, 500, 4096
_YEARS = range(1970, 9999)
# A cosine of equal vectors may be 0.9999999.
ROUNDING = 1e-6
_EXAMPLE = 'expected a JSON object such as {"text": "a red car", "top_k": 5}'
Text = Annotated[str | None, Meta(description=f"What is searched for: 1 to {_MAX_WORDS} characters.")]
Fuzzy = Annotated[bool, Meta(description="Whether similar words match, too.")]
Size = Annotated[int, Meta(ge=1, le=200, description="Number of results on a page.")]
_Time = Annotated[datetime, Meta(tz=True, title="a time with its offset (RFC 3339), such as 2026-01-31T12:00:00Z")] | None


class FilterParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every search: which images count, and which page of the results is returned."""

    documents, times = frozenset({"metadata"}), frozenset({"after", "before"})
    page: Annotated[int, Meta(ge=0, le=_MAX_OFFSET, description="Page of the results, from 0.")] = 0
    metadata: Annotated[str | None, Meta(description="A JSON object that the metadata of an image must contain.")] = None
    after: Annotated[_Time, Meta(description="Only images that were added then or later.")] = None
    before: Annotated[_Time, Meta(description="Only images that were added before.")] = None

    def __post_init__(self) -> None:
        """Raise InvalidParameter for a page or a filter that cannot be."""
        if self.window.offset > _MAX_OFFSET:
            raise InvalidParameter(f"page: at most {_MAX_OFFSET} results may be before it")
        self.read_filter()

    @property
    def window(self) -> Page:
        """The page as the engine counts."""
        size: int = getattr(self, "top_k", 0) or getattr(self, "size", 0)
        return Page(size, self.page * size)

    def read_filter(self) -> Filter:
        """Return the filter; raise InvalidParameter if it is none."""
        if any(time.year not in _YEARS for time in (self.after, self.before) if time is not None):
            raise InvalidParameter(f"after, before: expected years from {_YEARS[0]} to {_YEARS[-1]}")
        given = "" if len(self.metadata or "") > _MAX_METADATA else self.metadata or "{}"
        expected = f"metadata: expected a JSON object of at most {_MAX_METADATA} characters"
        return Filter(decode(given, dict[str, Any], expected, InvalidParameter), self.after, self.before)


class TopParameters(FilterParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a search for what is nearest."""

    top_k: Size = 10
    min_score: Annotated[Fraction, Meta(description="Minimum score of a result.")] = 0.5


def words_of(text: str | None) -> str:
    """Return a text without white space around it; raise InvalidParameter if there is none, or too much."""
    words = (text or "").strip()
    if not 0 < len(words) <= _MAX_WORDS:
        raise InvalidParameter(f"text: expected 1 to {_MAX_WORDS} characters, in the query or in a JSON object")
    return words


P = TypeVar("P", bound=FilterParameters)
T = TypeVar("T")
Question = Callable[[PostgresEngine, str], Awaitable[T]]


class Asked(NamedTuple, Generic[P]):
    """A request for a search; `image` is empty if it has none."""

    search: Search
    tenant: str
    image: bytes
    wanted: P
    call: CallContext

    async def nearest(self, index: VectorIndex, *vectors: Vector, least: float, **filters: object) -> list[list[Hit]]:
        """Return what is nearest to each vector, from this cosine on; `filters` are further fields of the filter."""
        where: Filter = self.wanted.read_filter()._replace(**filters)  # type: ignore[arg-type]
        options: Any = {"min_score": least - ROUNDING, "where": where}
        engine, window = self.search.asking(self.call), self.wanted.window
        return [[*await engine.nearest(self.tenant, index, vector, window, **options)] for vector in vectors]


def search_route(
    path: str,
    kind: type[P],
    response: type[Timed],
    find: Callable[[Asked[P]], Awaitable[dict[str, Any]]],
    check: Callable[[WorkerResources], object] = lambda _: None,
    **described: Any,  # noqa: ANN401 - of a route
) -> HTTPRouteHandler:
    """Make a route whose response has the fields that `find` returns; `check` may raise before the body is received.

    A body need have no image, and may be empty, if the parameters have a text.
    """
    may_be_empty = "text" in kind.__struct_fields__
    parse, is_text = parse_any if may_be_empty else parse_body, described.get("takes") == "text"

    async def handle(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
        check(worker)
        if is_text:
            context_of(request.scope).content_type = JSON  # whatever was declared, if anything: it is parsed in a thread
        async with Receiving(request, worker, kind, parse, may_be_empty=may_be_empty) as (context, content, wanted, call):
            found = await find(Asked(search, context.tenant, content.image, wanted, call))
            context.log_fields["results"] = len(found["results"])

            def describe() -> Timed:
                took = round(context.timing.stages.get(SEARCH, 0.0), 2)
                return response(**found, search_time_ms=took, **context.ending)  # type: ignore[call-arg]

            return await respond_in_thread(describe, search.pipeline, call)

    described = {"task": None, **described, **({"body": describe_text} if is_text else {})}
    return own_route(path, handle, response, "What was found, best first", kinds=(kind,), scope="search", **described)


def parse_any(data: bytes, content_type: str, kind: type[Parameters]) -> ParsedBody:
    """Parse a body that may be empty, JSON without an image, or anything with one."""
    is_json = data and body_type(content_type, data) == JSON
    image, pairs = parse_document(data, "image", kind, _EXAMPLE) if is_json else (data, [])
    return parse_body(data, content_type, kind) if image else ParsedBody(b"", pairs)


def show(what: str) -> dict[int, ResponseSpec]:
    """Describe the responses of a route that shows what is kept."""
    return {**describe(200, Document, what), **READING}


def describe_text(fields: dict[str, Schema]) -> RequestBody:
    """Describe a body of JSON that may be missing."""
    return RequestBody(required=False, content={JSON: describe_form(fields)})


def search_of(worker: Worker) -> Search:
    """Return the search of a worker of this process."""
    return cast("Search", worker.search)


async def ask(request: AnyRequest, worker: WorkerResources, question: Question[T]) -> T:
    """Ask the engine a question about the caller's tenant, within the default deadline."""
    context, deadline = context_of(request.scope), Deadline.after(worker.pipeline.limits.timeout_seconds)
    call = CallContext(deadline, context.timing, context.request_id, context.caller)
    return await question(search_of(worker).asking(call), context.tenant)


async def reply(document: Document) -> ASGIResponse:
    """Encode a document in a thread, because it may be large."""
    return JsonResponse(await asyncio.to_thread(msgspec.json.encode, {"status": "success", **document}))
