"""POST /detect/batch and those of other tasks: the routes, their OpenAPI description, and the response in lines."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import OpenAPIType, RequestBody, Schema
from litestar.types import ASGIApp, Receive, Scope, Send

from app.api.answering import native
from app.api.answering.format import negotiate
from app.api.answering.responses import VARY, JsonResponse, LargeResponse
from app.api.answering.schema import CocoResult
from app.api.batch.answer import BatchResponse, ImagesAnswer, to_document, to_encoded_results, to_line, to_result
from app.api.batch.body import FIELDS, MAX_IMAGES, parse_batch, refuse_large
from app.api.context import PAUSE_SECONDS, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import ENCODED, describe_form, own_route
from app.api.parameters.tasks import FORMS, BatchParameters
from app.api.receiving import intake
from app.api.receiving.client_watch import ClientWatch
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED
from app.errors import ClientGone
from app.model.heads import Task
from app.pipeline.batch_request import BatchRequest
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.telemetry.timing import Timing

LINES = "application/x-ndjson"
"""The media type of a response in lines."""
MEDIA_TYPES = frozenset({MULTIPART, JSON, URLENCODED})


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


def _route(task: Task, path: str, summary: str) -> HTTPRouteHandler:
    kind = FORMS[task].batch
    assert kind is not None  # noqa: S101 - of tasks with batches only

    async def handle(request: Request[Any, Any, Any], worker: Worker, pipeline: WorkerPipeline) -> ASGIApp:
        """Ask about up to 64 images. Each image succeeds or fails on its own.

        The deadline is that of the whole batch; images that are not done by then fail with 504. Without `timeout_ms`, it is the
        default deadline of a single image, and a twentieth of it more for each further image, up to the maximum of `timeout_ms`.

        With `Accept: application/x-ndjson` the response has one line per image, sent as soon as the image is done, and a summary
        line. With `format=coco-results` the response is one list of COCO results; if any image fails, the request fails.
        """
        return await _handle_batch(request, worker, pipeline, kind)

    options: dict[str, Any] = {"task": task, "takes": "images", "media_types": MEDIA_TYPES, "summary": summary}
    response = BatchResponse | list[CocoResult]
    return own_route(
        path, handle, response, "What became of each image", kinds=(kind,), body=describe_images, contents=_LINES, **options
    )


async def _handle_batch(
    request: Request[Any, Any, Any], worker: WorkerResources, pipeline: Pipeline, kind: type[BatchParameters]
) -> ASGIApp:
    context = context_of(request.scope)
    with ExitStack() as stack:
        client = stack.enter_context(ClientWatch(request.receive, context.body_limits))
        media_type = negotiate(context.accept, (JSON, LINES))
        content, wanted, call = await intake.receive(client, request.scope, worker, [], kind, parse_batch)
        if wanted.format is not None:
            media_type = JSON
        names, image_ids = content.names, wanted.ids_of(len(content.images))
        encode: Callable[[int, Detections], bytes] = partial(to_result, names, wanted.boxes)
        if wanted.format == "coco-results":
            encode = partial(to_encoded_results, image_ids)
        elif media_type == LINES:
            encode = partial(to_line, names, wanted.boxes)
        memory = stack.enter_context(pipeline.admission.memory.reserve(call.caller, "the results of this batch"))

        async def convert(index: int, found: Detections) -> bytes:
            encoded = await native.convert(partial(encode, index, found), found, pipeline, call)
            memory.add(len(encoded) if native.is_large(found) else 0)
            return encoded

        answer: ImagesAnswer[Detections, bytes] = ImagesAnswer(len(names), convert, context, worker.metrics)
        stack.callback(answer.log)
        refuse_large(content.images, worker.deployment.body_limits.max_bytes)
        model = wanted.options.model or pipeline.default_for(wanted.options.task)
        try:
            batch = await BatchRequest.open(pipeline, content.images, wanted.options, call)
        finally:
            context.log_fields |= pipeline.log_fields(model)
        context.log_fields["image_bytes"] = sum(len(image) for image in content.images if isinstance(image, bytes))
        if media_type == LINES:
            if any(isinstance(image, str) for image in content.images):
                context.log_fields["url_hosts"] = batch.url_hosts

            async def report(index: int, found: Detections | Exception, timing: Timing) -> bytes:
                await answer.add(index, found, timing)
                return answer.converted.get(index) or to_line(names, wanted.boxes, index, answer.problems[index])

            return _respond_in_lines(batch.run(report), answer, stack.pop_all())
        await answer.run(batch)
        is_list = wanted.format == "coco-results"
        document = b"[%b]" % b",".join(filter(None, answer.all())) if is_list else to_document(answer, names)
        return LargeResponse(document, JSON, pipeline.admission.memory) if memory.nbytes else JsonResponse(document)


def _respond_in_lines(
    running: AbstractAsyncContextManager[Iterator[Awaitable[bytes]]], answer: ImagesAnswer[Detections, bytes], request: ExitStack
) -> ASGIApp:
    """Send a line for each image as soon as it is done, then a summary; stop if the client has gone or does not read for too long.

    `running` runs the batch and yields the lines; `request` is what must be closed when the response has ended.
    """

    async def respond(scope: Scope, _: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            with request:
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
    """Send a line; raise ClientGone if the client does not receive it in time."""
    try:
        async with asyncio.timeout(PAUSE_SECONDS):
            await send({"type": "http.response.body", "body": line, "more_body": more_body})
    except TimeoutError:
        raise ClientGone("the client does not read the response") from None


ROUTES = [
    _route("detection", "/detect/batch", "Detect objects in several images"),
    _route("segmentation", "/segment/batch", "Segment objects in several images"),
    _route("pose", "/pose/batch", "Estimate poses in several images"),
    _route("obb", "/obb/batch", "Detect oriented boxes in several images"),
]
