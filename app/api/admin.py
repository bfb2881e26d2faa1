"""Routes that add, choose and remove models, for callers whose key has the scope `admin`. Each runs a command of `nereid`."""

import asyncio
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, Annotated, get_type_hints

import msgspec
from litestar import delete, post, put
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, Parameter, RequestBody, Schema
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Meta
from multipart import MultipartSegment, PushMultipartParser

from app.api.answering.schema import ModelInfo
from app.api.context import PAUSE_SECONDS, AnyRequest, context_of, header_of
from app.api.dependencies import Worker, WorkerResources
from app.api.documentation.openapi import ADMIN, binary, describe_form
from app.api.parameters.parse import Pairs, check_model_name
from app.api.receiving.client_watch import body_too_large
from app.api.receiving.content_type import MULTIPART, boundary_of, media_type
from app.api.receiving.intake import query_of
from app.api.reports.models import describe_model
from app.errors import (
    BodyTimeout,
    ClientGone,
    GatewayError,
    GatewayFull,
    InvalidParameter,
    MalformedRequest,
    ModelRefused,
    ModelsNotManaged,
    UnknownModel,
)
from app.host import program
from app.host.program import Busy, NoSuchModel, NotPossible
from app.zoo.recognize import MAX_MODEL_BYTES, Evaluation, Options

_OPTIONS = {*Options.__struct_fields__, "licence"}.difference(Evaluation.__struct_fields__)  # only for computing AP
_CHANGES = "changes of models"
_MAX_OPTION_LENGTH = 1 << 14
_MAX_LINES, _MAX_LINE_BYTES = 100, 1 << 12
_MIN_BYTES_PER_SECOND = 1 << 16
_MESSAGE = "nereid: "


_RAW = "application/octet-stream"


@dataclass
class _AddOperation(Operation):
    def __post_init__(self) -> None:
        hints = get_type_hints(Options, include_extras=True).items()
        texts = {name: hint.__metadata__[0].description for name, hint in hints if name in _OPTIONS} | {
            "licence": "shown by /models"
        }
        fields = {name: Schema(type=OpenAPIType.STRING, description=text) for name, text in texts.items()}
        self.parameters = [*(self.parameters or []), *(Parameter(name, "query", schema) for name, schema in fields.items())]
        form = describe_form({"file": binary(_RAW), **fields}, ["file"])
        self.request_body = RequestBody({_RAW: OpenAPIMediaType(schema=binary(_RAW)), MULTIPART: form}, "The file", required=True)


ModelName = FromPath[Annotated[str, Meta(description="Name of a model.")]]


class DefaultVersion(msgspec.Struct, frozen=True):
    """The version for requests that name none."""

    version: Annotated[int, Meta(ge=1)]


@post(
    "/models/{model:str}",
    status_code=201,
    summary="Add a model, or its next version",
    operation_class=_AddOperation,
    **ADMIN,
    request_max_body_size=None,
)
async def add_model(request: AnyRequest, model: ModelName, worker: Worker) -> ModelInfo:
    """Add a network in ONNX: the body is the file, or a zip with it and the files of its weights, or a form with one of these.

    The options of `nereid add` are parameters, or fields of the form. The file is checked as one that may be hostile.
    """
    options = _check_options(query_of(request.scope))
    if worker.pipeline.router is not None and worker.pipeline.router.handles(model):
        raise ModelRefused(f"{model} is a route; give the model another name")
    with _changing(model, worker), ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=worker.deployment.model_repository))
            options += _check_options(await _receive(request, file, MAX_MODEL_BYTES))
            file.seek(0)
        except OSError as error:
            raise ModelsNotManaged(f"the model repository cannot be written: {error.strerror}") from error
        context_of(request.scope).is_body_received = True
        given = [f"--{option.replace('_', '-')}={value}" for option, value in options]
        return await _run(worker, "add", "-", "--untrusted", *given, model=model, stdin=file)


@post("/models/{model:str}/load", status_code=200, summary="Load a model of the repository, or its changes", **ADMIN)
async def load_model(model: ModelName, worker: Worker) -> ModelInfo:
    """Let Triton load a model that lies in the repository."""
    with _changing(model, worker):
        return await _run(worker, "load", model=model)


@post("/models/{model:str}/unload", status_code=200, summary="Unload a model", **ADMIN)
async def unload_model(model: ModelName, worker: Worker) -> ModelInfo:
    """Let the embedded Triton unload a model, until it is loaded again or Triton starts again."""
    with _changing(model, worker):
        return await _run(worker, "unload", model=model)


@put("/models/{model:str}/default-version", summary="Choose the default version of a model", **ADMIN)
async def choose_version(model: ModelName, data: JSONBody[DefaultVersion], worker: Worker) -> ModelInfo:
    """Choose the version for requests that name none."""
    with _changing(model, worker):
        return await _run(worker, "use", model=model, version=data.version)


@delete("/models/{model:str}", summary="Remove an added model, or a version of it", **ADMIN)
async def remove_model(model: ModelName, worker: Worker, version: FromQuery[int | None] = None) -> None:
    """Remove all versions that were added, or one that is not the default one."""
    with _changing(model, worker):
        await _run(worker, "remove", model=model, version=version)


ROUTES = [add_model, load_model, unload_model, choose_version, remove_model]


@contextmanager
def _changing(model: str, worker: WorkerResources) -> Iterator[None]:
    check_model_name(model)
    table = worker.metrics.table
    column = table.column(_CHANGES)
    table.add(column, 1)
    try:
        if table.total(column) > 1:
            raise GatewayFull("another request changes models now", "models")
        yield
    finally:
        table.add(column, -1)


def _check_options(given: Pairs) -> list[tuple[str, str]]:
    for name, value in given:
        if name not in _OPTIONS:
            raise InvalidParameter(f"unknown parameter {name[:64]!r}; expected one of {', '.join(sorted(_OPTIONS))}")
        if [other for other, _ in given].count(name) > 1:
            raise InvalidParameter(f"{name} is given more than once")
        if not str(value).isprintable() or len(value) > _MAX_OPTION_LENGTH:
            raise InvalidParameter(f"{name}: expected a text of at most {_MAX_OPTION_LENGTH} characters")
    return [(name, str(value)) for name, value in given]


async def _run(
    worker: WorkerResources,
    command: str,
    *arguments: str,
    model: str,
    version: int | None = None,
    stdin: IO[bytes] | None = None,
) -> ModelInfo:
    named = [f"--name={model}"] if command == "add" else ["--", model if version is None else f"{model}:{version}"]
    # uvloop's own would run the hooks of Granian's forks.
    process = await asyncio.to_thread(
        subprocess.run,
        program.command("app", command, *arguments, *named),
        env=program.environment(),
        stdin=stdin or subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    output = [line[:_MAX_LINE_BYTES].decode(errors="replace") for line in process.stderr.splitlines()[-_MAX_LINES:]]
    messages = [line.removeprefix(_MESSAGE) for line in output if line.startswith(_MESSAGE)]  # libraries may write others
    if process.returncode == 0:
        for server in worker.tritons.servers:
            server.specs.forget(model)
        try:
            return msgspec.structs.replace(await describe_model(model, worker.pipeline), detail="; ".join(messages))
        except GatewayError:  # as long as a Triton has not loaded it
            return ModelInfo(model, "not_ready", detail="; ".join(messages))
    if not messages or not output[-1].startswith(_MESSAGE):
        raise RuntimeError(f"nereid {command} has ended with {process.returncode}: {output[-1:]}")
    match process.returncode:
        case Busy.exit_code:
            raise GatewayFull(messages[-1], "models")
        case NoSuchModel.exit_code:
            raise UnknownModel(messages[-1])
        case NotPossible.exit_code:
            raise ModelsNotManaged(messages[-1])
    raise ModelRefused(messages[-1])


async def _receive(request: AnyRequest, file: IO[bytes], max_bytes: int) -> list[tuple[str, str]]:
    content_type = header_of(request.scope, b"content-type")
    chunks = receive_parts(request, max_bytes)
    if media_type(content_type) != MULTIPART:
        async for chunk in chunks:
            await asyncio.to_thread(file.write, chunk)
        return []
    try:
        with PushMultipartParser(boundary_of(content_type), max_segment_count=len(_OPTIONS) + 1) as parser:
            return await _receive_form(parser, chunks, file)
    except ValueError as error:  # includes MultipartError and UnicodeError
        raise MalformedRequest("the form is not well formed, or has too many parts") from error


async def _receive_form(parser: PushMultipartParser, chunks: AsyncIterator[bytes], file: IO[bytes]) -> list[tuple[str, str]]:
    fields: list[tuple[str, bytearray]] = []
    files, is_file = 0, False
    async for chunk in chunks:
        for event in await asyncio.to_thread(list, parser.parse(chunk)):
            if isinstance(event, MultipartSegment):
                is_file = event.filename is not None
                files += is_file
                if files > 1:
                    raise MalformedRequest("the form has more than one file")
                if not is_file:
                    fields.append((event.name, bytearray()))
            elif event and is_file:
                await asyncio.to_thread(file.write, event)
            elif event:
                fields[-1][1].extend(event)
                if len(fields[-1][1]) > 4 * _MAX_OPTION_LENGTH:
                    raise MalformedRequest(f"a field of the form has more than {_MAX_OPTION_LENGTH} characters")
    return [(name, value.decode()) for name, value in fields]


async def receive_parts(request: AnyRequest, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the parts of the body, none if it is declared too large."""
    if int(header_of(request.scope, b"content-length") or "0") > max_bytes:
        raise body_too_large(max_bytes)
    time = asyncio.get_running_loop().time
    start, received = time(), 0
    while True:
        left = start + PAUSE_SECONDS + received / _MIN_BYTES_PER_SECOND - time()
        try:
            async with asyncio.timeout(min(left, PAUSE_SECONDS)):
                message = await request.receive()
        except TimeoutError:
            text = f"without pauses of more than {PAUSE_SECONDS:g} s, and on average with {_MIN_BYTES_PER_SECOND >> 10} KiB/s"
            raise BodyTimeout(f"a body has to arrive {text}") from None
        if message["type"] != "http.request":
            raise ClientGone("the client disconnected before the end of the body")
        received += len(message["body"])
        if received > max_bytes:
            raise body_too_large(max_bytes)
        yield message["body"]
        if not message["more_body"]:
            return
