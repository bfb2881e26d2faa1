"""POST /ingest/directory and /search/reindex, /ingest/jobs: work that goes on without a request."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from litestar import delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.responses import JsonResponse
from app.api.caller.check import guard_origin
from app.api.context import AnyRequest
from app.api.dependencies import Worker
from app.api.documentation.openapi import PROBLEMS, own_route
from app.api.parameters.parse import Parameters
from app.api.receiving.body import ParsedBody, parse_document
from app.api.receiving.intake import Receiving
from app.api.search.asking import PageNumber, PageSize, WorkerSearch, ask, describe_text
from app.api.search.ingest import IngestFlags, Sums, numbers_of, sum_up
from app.errors import InvalidParameter, MalformedRequest
from app.model.heads import EmbeddingHead
from app.model.reference import refer_to
from app.pipeline.call import CallContext
from app.search.engine import Family, FileFailure, Job, Page
from app.search.jobs import DirectoryOptions, ReindexOptions
from app.search.service import Search

_PAUSE_SECONDS = 0.5
_EXAMPLE = 'expected no body, or a JSON object with parameters, such as {"wait": false}'
_GIVING_UP: dict[str, Any] = {"status_code": 200, "guards": [guard_origin], "responses": PROBLEMS}
_Number = Annotated[int, Meta(ge=1, le=1_000_000)]
_Wait = Annotated[
    bool, Meta(description="Whether the answer comes at the end; otherwise, or after `timeout_ms`, it is 202 with the job.")
]
W = TypeVar("W", bound=Parameters)
_Begin = Callable[[Search, str, W, CallContext], Awaitable[Job]]


class _DirectoryParameters(IngestFlags, frozen=True, forbid_unknown_fields=True, kw_only=True):
    directory: Annotated[str, Meta(description="A folder in NEREID_SEARCH_FOLDERS, or below one of these.")] = ""
    recursive: Annotated[bool, Meta(description="Whether folders in it are read, too.")] = True
    max_images: Annotated[_Number | None, Meta(description="Maximum number of images. Default: all.")] = None
    wait: _Wait = True


class _ReindexParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    family: Annotated[Family, Meta(description="`image`: vectors of images and objects; `face`: those of faces.")] = "image"
    allow_missing: Annotated[
        int, Meta(ge=0, le=1_000_000_000, description="So many images, whose files are gone, may lose their vectors.")
    ] = 0
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
    excluded: int
    """Files and folders that were left out because of their names."""
    error: str | None
    created_at: datetime
    ended_at: datetime | None


class FailureList(msgspec.Struct, frozen=True):
    """The first 1,000 failures of a job, by name."""

    failures: Sequence[FileFailure]
    total: int
    page: int
    size: int


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
        **sum_up(counts) | ({"status": "error"} if job.state == "failed" else {}),
        directory=job.options.get("directory"),
        total_files=counts.get("total_files", 0),
        unreadable=counts.get("unreadable", 0),
        failures=numbers_of(counts, "error:"),
        excluded=counts.get("excluded", 0),
        skipped_extensions=[*numbers_of(counts, "skipped:")] or None,
    )


@get("/ingest/jobs", summary="List the jobs", opt={"scope": "ingest"}, responses=PROBLEMS)
async def jobs(request: AnyRequest, worker: Worker, page: PageNumber = 0, size: PageSize = 20) -> JobList:
    """List the jobs of this caller's tenant, newest first."""
    found = await ask(request, worker, lambda engine, tenant: engine.jobs(tenant, Page(size, page * size)))
    return JobList([*map(_to_answer, found.items)], found.total, page, size)


@get("/ingest/jobs/{job_id:str}", summary="Get a job", opt={"scope": "ingest"}, responses=PROBLEMS)
async def job(request: AnyRequest, worker: Worker, job_id: FromPath[str]) -> JobAnswer:
    """Get a job, and how far it has come."""
    return _to_answer(await ask(request, worker, lambda engine, tenant: engine.job(tenant, job_id)))


@get("/ingest/jobs/{job_id:str}/failures", summary="List what a job could not do", opt={"scope": "ingest"}, responses=PROBLEMS)
async def job_failures(
    request: AnyRequest, worker: Worker, job_id: FromPath[str], page: PageNumber = 0, size: PageSize = 20
) -> FailureList:
    """List the first 1,000 files, or images of this tenant, that failed, and why."""
    found = await ask(request, worker, lambda engine, tenant: engine.failures(tenant, job_id, Page(size, page * size)))
    return FailureList(found.items, found.total, page, size)


@delete("/ingest/jobs/{job_id:str}", summary="Give up a job", opt={"scope": "ingest"}, **_GIVING_UP)
async def give_up_job(request: AnyRequest, worker: Worker, job_id: FromPath[str]) -> dict[str, str]:
    """End a job that waits or runs, also one that no gateway can work on. What it has indexed stays."""
    await ask(request, worker, lambda engine, tenant: engine.give_up_job(tenant, job_id))
    return {"status": "success", "job_id": job_id}


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
            job = await begin(search, context.tenant, wanted, call)
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


async def _begin_directory(search: Search, tenant: str, wanted: _DirectoryParameters, call: CallContext) -> Job:
    if not wanted.directory:
        raise InvalidParameter("directory: expected the path of a folder")
    folder = str(await search.files.allowed(wanted.directory))
    options = DirectoryOptions(folder, wanted.recursive, wanted.max_images, wanted.options)
    folders = await search.files.identify([folder])
    return await search.asking(call).add_job(tenant, "directory", msgspec.to_builtins(options), folders)


async def _begin_reindex(search: Search, tenant: str, wanted: _ReindexParameters, call: CallContext) -> Job:
    active, following = await search.engine.models(wanted.family)
    spec = await search.newest_model(wanted.family, call)
    reference = refer_to(spec.name, spec.version)
    if active in {None, reference}:
        why = "it has no vectors yet" if active is None else f"its vectors are those of {active} already, the default model"
        cure = f"DELETE /search/reindex/{wanted.family} gives up the change to {following}"
        raise InvalidParameter(f"family: {why}; {cure if following else 'there is nothing to do'}")
    options = msgspec.to_builtins(ReindexOptions(wanted.family, reference, wanted.allow_missing))
    folders = await search.files.identify([*map(str, search.options.folders)])
    dimensions = spec.expect_head(EmbeddingHead).dimensions
    return await search.engine.add_job(tenant, "reindex", options, folders, dimensions)


@delete("/search/reindex/{family:str}", summary="Give up making the vectors anew", opt={"scope": "admin"}, **_GIVING_UP)
async def give_up_reindex(request: AnyRequest, worker: Worker, family: FromPath[Family]) -> dict[str, str]:
    """Keep the vectors that are searched, drop those of the other model, and end the job."""
    await ask(request, worker, lambda engine, _: engine.give_up_reindex(family))
    return {"status": "success", "family": family}


ROUTES: list[HTTPRouteHandler] = [
    _job_route("/ingest/directory", _DirectoryParameters, _begin_directory, "ingest", "Add the images in a folder to the index"),
    _job_route("/search/reindex", _ReindexParameters, _begin_reindex, "admin", "Make the vectors anew with the newest model"),
    *(give_up_reindex, jobs, job, give_up_job, job_failures),
]
