"""POST /ingest/directory and /search/reindex, GET /ingest/jobs: work that goes on without a request."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.responses import JsonResponse
from app.api.context import AnyRequest
from app.api.dependencies import Worker
from app.api.documentation.openapi import PROBLEMS, own_route
from app.api.parameters.parse import Parameters
from app.api.receiving.body import ParsedBody, parse_document
from app.api.receiving.intake import Receiving
from app.api.search.asking import PageNumber, PageSize, WorkerSearch, ask, describe_text
from app.api.search.ingest import IngestFlags, Sums, sum_up
from app.errors import InvalidParameter, MalformedRequest
from app.pipeline.call import CallContext
from app.search.engine import Family, Job, Page
from app.search.jobs import DirectoryOptions, ReindexOptions, allowed_folder, begin_reindex
from app.search.service import Search

_PAUSE_SECONDS = 0.5
_EXAMPLE = 'expected no body, or a JSON object with parameters, such as {"wait": false}'
_Number = Annotated[int, Meta(ge=1, le=1_000_000)]
_Wait = Annotated[
    bool, Meta(description="Whether the answer comes at the end; otherwise, or after `timeout_ms`, it is 202 with the job.")
]
W = TypeVar("W", bound=Parameters)
_Begin = Callable[[Search, W, CallContext], Awaitable[DirectoryOptions | ReindexOptions]]


class _DirectoryParameters(IngestFlags, frozen=True, forbid_unknown_fields=True, kw_only=True):
    directory: Annotated[str, Meta(description="A folder in NEREID_SEARCH_FOLDERS, or below one of these.")] = ""
    recursive: Annotated[bool, Meta(description="Whether folders in it are read, too.")] = True
    max_images: Annotated[_Number | None, Meta(description="Maximum number of images. Default: all.")] = None
    wait: _Wait = True


class _ReindexParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    family: Annotated[Family, Meta(description="`image`: vectors of images and objects; `face`: those of faces.")] = "image"
    allow_missing: Annotated[bool, Meta(description="Whether images that cannot be read again may lose their vectors.")] = False
    wait: _Wait = True


class JobAnswer(Sums, frozen=True, kw_only=True):
    """Work that goes on without a request, and how far it has come."""

    job_id: str
    kind: Literal["directory", "reindex"]
    state: Literal["waiting", "running", "done", "failed"]
    directory: str | None
    total_files: int
    unreadable: int
    failures: dict[str, int]
    skipped_extensions: list[str] | None
    error: str | None
    created_at: datetime
    ended_at: datetime | None


class JobList(msgspec.Struct, frozen=True):
    """Jobs, newest first."""

    jobs: list[JobAnswer]
    total: int
    page: int
    size: int


def _to_answer(job: Job) -> JobAnswer:
    counts = job.counts
    return JobAnswer(
        **{name: getattr(job, name) for name in ("job_id", "kind", "state", "error", "created_at", "ended_at")},
        **sum_up(counts) | ({"status": "error"} if job.error else {}),
        directory=job.options.get("directory"),
        total_files=counts.get("total_files", 0),
        unreadable=counts.get("unreadable", 0),
        failures=_numbers(counts, "error:"),
        skipped_extensions=[*_numbers(counts, "skipped:")] or None,
    )


def _numbers(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): number for name, number in counts.items() if name.startswith(prefix)}


@get("/ingest/jobs", summary="List the jobs", opt={"scope": "ingest"}, responses=PROBLEMS)
async def jobs(request: AnyRequest, worker: Worker, page: PageNumber = 0, size: PageSize = 20) -> JobList:
    """List the jobs of this caller's tenant, newest first."""
    found = await ask(request, worker, lambda engine, tenant: engine.jobs(tenant, Page(size, page * size)))
    return JobList([*map(_to_answer, found.items)], found.total, page, size)


@get("/ingest/jobs/{job_id:str}", summary="Get a job", opt={"scope": "ingest"}, responses=PROBLEMS)
async def job(request: AnyRequest, worker: Worker, job_id: FromPath[str]) -> JobAnswer:
    """Get a job, and how far it has come."""
    return _to_answer(await ask(request, worker, lambda engine, tenant: engine.job(tenant, job_id)))


def _parse(data: bytes, _: str, kind: type[Parameters]) -> ParsedBody:
    image, pairs = parse_document(data, "image", kind, _EXAMPLE) if data else (b"", [])
    if image:
        raise MalformedRequest(_EXAMPLE)
    return ParsedBody(b"", pairs)


def _job_route(path: str, kind: type[W], begin: _Begin[W], scope: str, summary: str) -> HTTPRouteHandler:
    async def handle(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
        """Add a job, which goes on if the client leaves; `GET /ingest/jobs/{id}` tells how far it has come."""
        async with Receiving(request, worker, kind, _parse, may_be_empty=True) as (context, _, wanted, call):
            given: Any = wanted
            options = await begin(search, wanted, call)
            named: Literal["directory", "reindex"] = "directory" if isinstance(options, DirectoryOptions) else "reindex"
            async with search.database.asking(call) as engine:
                job = await engine.add_job(context.tenant, named, msgspec.to_builtins(options))
            search.new_job.set()
            context.log_fields["job"] = job.job_id
            while given.wait and job.state not in {"done", "failed"} and (given.timeout_ms is None or call.deadline.remaining > 0):
                await asyncio.sleep(_PAUSE_SECONDS if job.state == "running" else _PAUSE_SECONDS / 10)
                job = await search.engine.job(context.tenant, job.job_id)
        status = {"done": 201, "failed": 200}.get(job.state, 202)
        return JsonResponse(msgspec.json.encode(_to_answer(job)), status)

    described: dict[str, Any] = {"body": describe_text, "task": None, "takes": "text", "scope": scope, "summary": summary}
    also = {201: "The job is done", 202: "The job goes on"}
    return own_route(path, handle, JobAnswer, "The job has failed", kinds=(kind,), also=also, **described)


async def _begin_directory(search: Search, wanted: _DirectoryParameters, _: CallContext) -> DirectoryOptions:
    if not wanted.directory:
        raise InvalidParameter("directory: expected the path of a folder")
    folder = await asyncio.to_thread(allowed_folder, search.options.folders, wanted.directory)
    return DirectoryOptions(str(folder), wanted.recursive, wanted.max_images, wanted.options)


async def _begin_reindex(search: Search, wanted: _ReindexParameters, call: CallContext) -> ReindexOptions:
    model = await begin_reindex(search, wanted.family, call)
    return ReindexOptions(wanted.family, model, wanted.allow_missing)


ROUTES: list[HTTPRouteHandler] = [
    _job_route("/ingest/directory", _DirectoryParameters, _begin_directory, "ingest", "Add the images in a folder to the index"),
    _job_route("/search/reindex", _ReindexParameters, _begin_reindex, "admin", "Make the vectors anew with the newest model"),
    jobs,
    job,
]
