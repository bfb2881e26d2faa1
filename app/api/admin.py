"""Routes that add, choose and remove models, for callers whose key has the scope `admin`. Each runs a command of `nereid`."""

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import IO, Annotated, Any
from urllib.parse import urlsplit

import msgspec
from litestar import Request, delete, post, put
from litestar.handlers.base import BaseRouteHandler
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from app.api.answering.schema import ModelInfo
from app.api.caller.check import Connection
from app.api.context import PAUSE_SECONDS, context_of, header_of
from app.api.dependencies import Worker, WorkerResources
from app.api.documentation.openapi import KEY_SCHEMES, PROBLEMS
from app.api.receiving.client_watch import body_too_large
from app.api.receiving.intake import query_of
from app.api.reports.models import describe_model
from app.errors import (
    BodyTimeout,
    ClientGone,
    Forbidden,
    GatewayFull,
    InvalidParameter,
    MalformedRequest,
    ModelRefused,
    ModelsNotManaged,
    UnknownModel,
)
from app.host import program
from app.host.program import Busy, NotPossible
from app.zoo.recognize import Options

_OPTIONS = {*Options.__struct_fields__, "licence"}
_UPLOADS = "model uploads"
_MAX_FIELD_BYTES = 1 << 16


async def _guard_origin(connection: Connection, _: BaseRouteHandler) -> None:
    """Raise Forbidden for a request that the page of another origin has made."""
    origin = header_of(connection.scope, b"origin")  # type: ignore[arg-type]
    if origin and urlsplit(origin).netloc != header_of(connection.scope, b"host"):  # type: ignore[arg-type]
        raise Forbidden("this is not accepted from a page of another origin")


_COMMON: dict[str, Any] = {
    "guards": [_guard_origin],
    "opt": {"scope": "admin"},
    "security": [{name: ["admin"]} for name in KEY_SCHEMES],
    "responses": {status: PROBLEMS[status] for status in (400, 404, 422, 429)},
}

ModelName = FromPath[Annotated[str, Meta(description="Name of a model.")]]


class DefaultVersion(msgspec.Struct, frozen=True):
    """The version for requests that name none."""

    version: Annotated[int, Meta(ge=1)]


@post(
    "/models/{model:str}",
    status_code=201,
    summary="Add a model, or its next version",
    **_COMMON,
    request_max_body_size=None,
)
async def add_model(request: Request[Any, Any, Any], model: ModelName, worker: Worker) -> ModelInfo:
    """Add a detector or classifier in ONNX: the body is the file, or a form with it.

    The options of `nereid add` are parameters, or fields of the form. The file is checked as one that may be hostile.
    """
    table = worker.metrics.table
    column = table.column(_UPLOADS)
    with ExitStack() as stack:
        table.add(column, 1)
        stack.callback(table.add, column, -1)
        if table.total(column) > 1:
            raise GatewayFull("another model is being added", "models")
        file = stack.enter_context(tempfile.TemporaryFile(dir=worker.deployment.model_repository))
        options = dict(query_of(request.scope)) | await _receive(request, file, worker.deployment.max_model_bytes)
        context_of(request.scope).is_body_received = True
        if unknown := options.keys() - _OPTIONS:
            raise InvalidParameter(f"unknown parameter {min(unknown)[:64]!r}; expected one of {', '.join(sorted(_OPTIONS))}")
        given = [f"--{option.replace('_', '-')}={value}" for option, value in options.items()]
        file.seek(0)
        said = await _run("add", "-", f"--name={model}", "--untrusted", *given, stdin=file)
    return await _described(model, worker, said)


@post("/models/{model:str}/load", status_code=200, summary="Load a model of the repository, or its changes", **_COMMON)
async def load_model(model: ModelName, worker: Worker) -> ModelInfo:
    """Let the Tritons load a model that lies in the repository."""
    await describe_model(model, worker)
    return await _described(model, worker, await _run("load", "--", model))


@post("/models/{model:str}/unload", status_code=200, summary="Unload a model", **_COMMON)
async def unload_model(model: ModelName, worker: Worker) -> ModelInfo:
    """Let the Tritons unload a model, until it is loaded again or they start again."""
    await describe_model(model, worker)
    return await _described(model, worker, await _run("unload", "--", model))


@put("/models/{model:str}/default-version", summary="Choose the default version of a model", **_COMMON)
async def choose_version(model: ModelName, data: JSONBody[DefaultVersion], worker: Worker) -> ModelInfo:
    """Choose the version for requests that name none."""
    await describe_model(model, worker)
    return await _described(model, worker, await _run("use", "--", f"{model}:{data.version}"))


@delete("/models/{model:str}", summary="Remove an added model, or a version of it", **_COMMON)
async def remove_model(model: ModelName, worker: Worker, version: FromQuery[int | None] = None) -> None:
    """Remove all versions that were added, or one that is not the default one."""
    await describe_model(model, worker)
    await _run("remove", "--", model if version is None else f"{model}:{version}")


ROUTES = [add_model, load_model, unload_model, choose_version, remove_model]


async def _run(command: str, *arguments: str, stdin: IO[bytes] | None = None) -> str:
    """Run a command of this program, and return what it says."""
    # uvloop's own would run the hooks of Granian's forks.
    process = await asyncio.to_thread(
        subprocess.run,
        program.command("app", command, *arguments),
        env=program.environment(),
        stdin=stdin or subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    said = [line.removeprefix("nereid: ") for line in process.stderr.decode(errors="replace").splitlines()]
    match process.returncode:
        case 0:
            return "; ".join(said)
        case Busy.exit_code:
            raise GatewayFull(said[-1], "models")
        case NotPossible.exit_code:
            raise ModelsNotManaged(said[-1])
    raise ModelRefused(said[-1] if said else f"nereid {command} has failed")


async def _described(model: str, worker: WorkerResources, said: str) -> ModelInfo:
    for server in worker.tritons.servers:
        server.specs.forget(model)
    try:
        return msgspec.structs.replace(await describe_model(model, worker), detail=said)
    except UnknownModel:  # as long as a running Triton has not loaded it
        return ModelInfo(model, "not_ready", detail=said)


async def _receive(request: Request[Any, Any, Any], file: IO[bytes], max_bytes: int) -> dict[str, str]:
    """Receive a file, or a form with one, into `file`; return the form's other fields."""
    content_type, options = parse_options_header(header_of(request.scope, b"content-type"))
    chunks = _chunks(request, max_bytes)
    if content_type != "multipart/form-data":
        async for chunk in chunks:
            await asyncio.to_thread(file.write, chunk)
    else:
        try:
            with PushMultipartParser(options.get("boundary", ""), max_segment_count=len(_OPTIONS) + 1) as parser:
                return await _receive_form(parser, chunks, file)
        except MultipartError as error:
            raise MalformedRequest("the form is not well formed, or has too many parts") from error
    return {}


async def _receive_form(parser: PushMultipartParser, chunks: AsyncIterator[bytes], file: IO[bytes]) -> dict[str, str]:
    fields: dict[str, bytes] = {}
    name = ""
    async for chunk in chunks:
        for event in await asyncio.to_thread(list, parser.parse(chunk)):
            if isinstance(event, MultipartSegment):
                name = "" if event.filename else event.name
            elif event and not name:
                await asyncio.to_thread(file.write, event)
            elif event:
                fields[name] = fields.get(name, b"") + event
                if len(fields[name]) > _MAX_FIELD_BYTES:
                    raise MalformedRequest(f"a field of the form has more than {_MAX_FIELD_BYTES} bytes")
    return {name: value.decode(errors="replace") for name, value in fields.items()}


async def _chunks(request: Request[Any, Any, Any], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the parts of the body, none if it is declared too large."""
    received = int(header_of(request.scope, b"content-length") or "0")
    if received > max_bytes:
        raise body_too_large(max_bytes)
    received = 0
    while True:
        try:
            async with asyncio.timeout(PAUSE_SECONDS):
                message = await request.receive()
        except TimeoutError:
            raise BodyTimeout(f"a body has to arrive without pauses of more than {PAUSE_SECONDS:g} s") from None
        if message["type"] != "http.request":
            raise ClientGone("the client disconnected before the end of the body")
        received += len(message["body"])
        if received > max_bytes:
            raise body_too_large(max_bytes)
        yield message["body"]
        if not message["more_body"]:
            return
