"""Answer a request about several images; each succeeds or fails on its own, and a bounded number is asked about at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from app.api.answering.responses import LargeResponse
from app.api.batch.answer import ImagesAnswer
from app.api.batch.body import parse_batch, refuse_large
from app.api.batch.route import MEDIA_TYPES, describe_images
from app.api.context import context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import own_route
from app.api.receiving import intake
from app.api.receiving.client_watch import ClientWatch
from app.api.receiving.content_type import JSON
from app.api.sight.image import MODEL, Asking, P, Placed, R
from app.model.heads import Task
from app.model.reference import split_reference
from app.pipeline.batch_request import BatchRequest, Image
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.resilience.lease import Lease

_DESCRIPTION = """Up to 64 images; each succeeds or fails on its own. The deadline is that of the whole batch; images that are not
done by then fail with 504. Without `timeout_ms`, it is the default deadline of a single image, and a twentieth of it more for each
further image, up to the maximum of `timeout_ms`."""


async def open_batch(  # noqa: PLR0913, PLR0917 - the parts of a question
    worker: WorkerResources, pipeline: Pipeline, images: list[Image], wanted: P, call: CallContext, asking: Asking[P, R]
) -> BatchRequest[R]:
    """Open a batch of images, of which those that are too large fail; errors are those of `BatchRequest.open_with`."""
    refuse_large(images, worker.deployment.body_limits.max_bytes)
    if asking is MODEL:
        return await BatchRequest.open(pipeline, images, wanted.options, call)  # type: ignore[attr-defined]

    def ask(image: bytes, own_call: CallContext, _: Lease) -> Awaitable[R]:
        return asking.ask(worker, pipeline, image, wanted, own_call)

    call = call._replace(route_key=call.route_key or call.request_id)  # a route answers about all of them by the same model
    model = pipeline.refer_to(*split_reference(asking.first(worker, wanted)))
    slots = asyncio.Semaphore(2 * pipeline.limits.decode_threads)  # while some are decoded, models answer about others
    return await BatchRequest.open_with(pipeline, images, model, ask, call, slots=slots)


def images_route(  # noqa: PLR0913, PLR0917 - the properties of a route
    path: str,
    task: Task,
    kind: type[P],
    asking: Asking[P, R],
    to_answer: Callable[[P, R], Placed],
    to_document: Callable[..., msgspec.Struct],
    *,
    response: type[msgspec.Struct],
    summary: str,
) -> HTTPRouteHandler:
    """Make a route for several images, in any of the forms that `/detect/batch` accepts; arguments are those of `image_route`.

    `to_document` makes the response from the fields of `Documents`, which the results add totals to.
    """

    async def handle(request: Request[Any, Any, Any], worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        context = context_of(request.scope)
        with (
            ClientWatch(request.receive, context.body_limits) as client,
            pipeline.admission.memory.reserve(context.caller, "the results of this batch") as memory,
        ):
            content, wanted, call = await intake.receive(client, request.scope, worker, [], kind, parse_batch)
            names = content.names
            context.log_fields |= pipeline.log_fields(split_reference(asking.first(worker, wanted))[0])
            context.log_fields["image_bytes"] = sum(len(image) for image in content.images if isinstance(image, bytes))

            async def convert(index: int, found: R) -> bytes:
                def encode() -> tuple[bytes, Mapping[str, int]]:
                    result = to_answer(wanted, found)
                    result.image_index, result.filename = index, names[index]
                    return msgspec.json.encode(result), result.totals()

                encoded, counts = await pipeline.threads.run(encode, call.deadline, turn=call._replace(is_batch=True).turn())
                memory.add(len(encoded))
                answer.totals.update(counts)
                return encoded

            answer: ImagesAnswer[R, bytes] = ImagesAnswer(len(names), convert, context, worker.metrics)
            await answer.run(await open_batch(worker, pipeline, content.images, wanted, call, asking))
            answer.log()
            results = [msgspec.Raw(result) for _, result in sorted(answer.converted.items())]
            document = to_document(results=results, failures=answer.failures(names), **answer.summary(), **answer.totals)
            return LargeResponse(msgspec.json.encode(document), JSON, pipeline.admission.memory)

    options: dict[str, Any] = {
        "task": task,
        "takes": "images",
        "media_types": MEDIA_TYPES,
        "summary": summary,
        "description": _DESCRIPTION,
    }
    return own_route(path, handle, response, "What became of each image", kinds=(kind,), body=describe_images, **options)
