"""Routes for several images, each of which succeeds or fails on its own: POST /detect/batch and those of other tasks."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIType, RequestBody, Schema
from litestar.types import ASGIApp, Receive, Scope, Send

from app.api.answering import native
from app.api.answering.format import negotiate
from app.api.answering.responses import VARY, JsonResponse, LargeResponse
from app.api.answering.schema import CocoResult, Problem
from app.api.batch.answer import BatchResponse, ImagesAnswer, Placed, to_document, to_encoded_results, to_line, to_result
from app.api.batch.asking import MODEL, Asking, P, R, open_batch
from app.api.batch.body import FIELDS, MAX_IMAGES, parse_batch
from app.api.context import PAUSE_SECONDS, AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.documentation.openapi import ENCODED, describe_form, own_route
from app.api.parameters.tasks import FORMS, BatchParameters
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED
from app.api.receiving.intake import Receiving
from app.errors import ClientGone
from app.model.heads import Task
from app.model.reference import split_reference
from app.pipeline.results import Detections
from app.telemetry.timing import Timing

LINES = "application/x-ndjson"
MEDIA_TYPES = frozenset({MULTIPART, JSON, URLENCODED})
_DESCRIPTION = """Up to 64 images; each succeeds or fails on its own. The deadline is that of the whole batch; images that are not
done by then fail with 504. Without `timeout_ms`, it is the default deadline of a single image, and a twentieth of it more for each
further image, up to the maximum of `timeout_ms`."""
_OF_DETECTIONS = f"""{_DESCRIPTION}

With `Accept: {LINES}` the response has one line per image, sent as soon as the image is done, and a summary line. With
`format=coco-results` the response is one list of COCO results; if any image fails, the request fails."""
_LINES = {
    LINES: Schema(
        type=OpenAPIType.STRING,
        description="A JSON object in each line: the images as they are done, then a summary, whose "
        "`status` is that of the JSON document",
    )
}
_HEADERS = [
    (b"content-type", LINES.encode()),
    (b"x-accel-buffering", b"no"),  # otherwise NGINX buffers the lines
    VARY,
]


def describe_images(fields: dict[str, Schema]) -> RequestBody:
    """Describe the body with the images and these parameters."""
    file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream")
    images = Schema(type=OpenAPIType.ARRAY, min_items=1, max_items=MAX_IMAGES, description="The images")
    return RequestBody(
        required=True,
        description=f"Up to {MAX_IMAGES} images: as form fields {', '.join(FIELDS)}, or in JSON.",
        content={
            kind: describe_form({"images": replace(images, items=image), **fields}, ["images"])
            for kind, image in ((MULTIPART, file), (JSON, ENCODED))
        },
    )


class Writer(NamedTuple):
    """Writes the response to a batch."""

    encode: Callable[[int, Any], tuple[bytes, Mapping[str, int]]]
    """Encodes the result of the image with an index; also returns what it adds to the sums over the batch."""
    finish: Callable[[ImagesAnswer[Any, bytes]], bytes]
    encode_failure: Callable[[int, Problem], bytes] | None = None
    """Encodes the error of an image as a line; None for a response that is one document."""


MakeWriter = Callable[[P, Sequence[str | None], str], Writer]
"""Makes the writer from the parameters, the file names, and the media type, which is JSON or one of the contents of the route."""


def by_answers(to_answer: Callable[[P, R], Placed], to_document: Callable[..., msgspec.Struct]) -> MakeWriter[P]:
    """Write an answer about each image; `to_document` gets the fields of `Documents`, and the totals of the answers."""

    def make(wanted: P, names: Sequence[str | None], _: str) -> Writer:
        def encode(index: int, found: R) -> tuple[bytes, Mapping[str, int]]:
            result = to_answer(wanted, found)
            result.image_index, result.filename = index, names[index]
            return msgspec.json.encode(result), result.totals()

        def finish(answer: ImagesAnswer[R, bytes]) -> bytes:
            return msgspec.json.encode(to_document(**answer.document(), **answer.totals))

        return Writer(encode, finish)

    return make


def images_route(  # noqa: PLR0913 - the properties of a route
    path: str,
    task: Task,
    kind: type[P],
    asking: Asking[P, R],
    make_writer: MakeWriter[P],
    *,
    contents: Mapping[str, Schema] | None = None,
    **described: Any,  # noqa: ANN401 - for OpenAPI
) -> HTTPRouteHandler:
    """Make a route for several images, of which a bounded number is asked about at a time."""

    async def handle(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIApp:
        accept = context_of(request.scope).accept
        media_type = negotiate(accept, (JSON, *contents)) if contents else JSON
        async with AsyncExitStack() as stack:
            received = await stack.enter_async_context(Receiving(request, worker, kind, parse_batch))
            context, content, wanted, call = received
            images, writer = content.images, make_writer(wanted, content.names, media_type)
            memory = stack.enter_context(pipeline.admission.memory.reserve(call.caller, "the results of this batch"))

            totals = Counter[str]()

            async def convert(index: int, found: R) -> bytes:
                work = partial(writer.encode, index, found)
                if not isinstance(found, Detections) or native.is_large(found):
                    turn = call._replace(is_batch=True).turn()
                    encoded, counts = await pipeline.threads.run(work, call.deadline, turn=turn)
                    memory.add(len(encoded))
                else:
                    encoded, counts = work()
                totals.update(counts)
                return encoded

            answer: ImagesAnswer[R, bytes] = ImagesAnswer(content.names, convert, context, worker.metrics)
            answer.totals = totals  # `convert` must not refer to the answer: a cycle would keep the results
            stack.callback(answer.log)
            context.log_fields["image_bytes"] = sum(len(image) for image in images if isinstance(image, bytes))
            try:
                batch = await open_batch(worker, pipeline, images, wanted, call, asking)
            finally:
                context.log_fields |= pipeline.log_fields(split_reference(asking.first(worker, wanted))[0])
            if (encode_failure := writer.encode_failure) is not None:
                context.log_fields |= {"url_hosts": batch.url_hosts} if any(isinstance(image, str) for image in images) else {}

                async def report(index: int, found: R | Exception, timing: Timing) -> bytes:
                    await answer.add(index, found, timing)
                    return answer.converted.get(index) or encode_failure(index, answer.problems[index])

                return _respond_in_lines(batch.run(report), answer, stack.pop_all())
            await answer.run(batch)
            document = writer.finish(answer)
            return LargeResponse(document, JSON, pipeline.admission.memory) if memory.nbytes else JsonResponse(document)

    described = {"description": _DESCRIPTION, "task": task, "takes": "images", "media_types": MEDIA_TYPES, **described}
    described |= {"kinds": (kind,), "body": describe_images, "contents": contents}
    return own_route(path, handle, says="What became of each image", **described)


def _respond_in_lines(
    running: AbstractAsyncContextManager[Iterator[Awaitable[bytes]]], answer: ImagesAnswer[Any, bytes], request: AsyncExitStack
) -> ASGIApp:
    """Send a line for each image that `running` yields, then a summary; `request` is closed when the response has ended."""

    async def respond(scope: Scope, _: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            async with request:
                async with running as done:
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    for line in done:
                        await _send_line(send, await line)
                await _send_line(send, msgspec.json.encode(answer.summary() | {"model": answer.model}) + b"\n", more_body=False)
        except ClientGone:
            if not context.status:
                raise
            context.is_client_gone = True

    return respond


async def _send_line(send: Send, line: bytes, *, more_body: bool = True) -> None:
    try:
        async with asyncio.timeout(PAUSE_SECONDS):
            await send({"type": "http.response.body", "body": line, "more_body": more_body})
    except TimeoutError:
        raise ClientGone("the client does not read the response") from None


def _write_detections(wanted: BatchParameters, names: Sequence[str | None], media_type: str) -> Writer:
    image_ids = wanted.ids_of(len(names))
    if wanted.format == "coco-results":
        return Writer(
            lambda *given: (to_encoded_results(image_ids, *given), {}),
            lambda answer: b"[%b]" % b",".join(filter(None, answer.all())),
        )
    if wanted.format is None and media_type == LINES:
        to_text = partial(to_line, names, wanted.boxes)
        return Writer(lambda *given: (to_text(*given), {}), to_document, to_text)
    return Writer(lambda *given: (to_result(names, wanted.boxes, *given), {}), to_document)


def _route(task: Task, path: str, summary: str) -> HTTPRouteHandler:
    kind = FORMS[task].batch
    assert kind is not None  # noqa: S101 - of tasks with batches only
    response = BatchResponse | list[CocoResult]
    described: dict[str, Any] = {"response": response, "summary": summary, "description": _OF_DETECTIONS}
    return images_route(path, task, kind, MODEL, _write_detections, contents=_LINES, **described)


ROUTES = [
    _route("detection", "/detect/batch", "Detect objects in several images"),
    _route("segmentation", "/segment/batch", "Segment objects in several images"),
    _route("pose", "/pose/batch", "Estimate poses in several images"),
    _route("obb", "/obb/batch", "Detect oriented boxes in several images"),
]
