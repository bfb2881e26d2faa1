"""Request handling that the dialects share."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from litestar.response.base import ASGIResponse

from app.api.answering import problems
from app.api.answering.format import ResponseInput
from app.api.batch.answer import copy_error, first_error
from app.api.batch.body import ParsedBatch, refuse_large
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.detect import handle_image
from app.api.dialects.dialect import AnyRequest, DialectParameters
from app.api.parameters.parse import Pairs
from app.api.receiving import intake
from app.api.receiving.body import ParsedBody
from app.api.receiving.client_watch import ClientWatch
from app.api.receiving.intake import Content, Received
from app.api.reports.metrics import count_batch_image
from app.model.heads import DetectionHead
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext, Detections
from app.telemetry.timing import Timing

C = TypeVar("C", bound=Content)
P = TypeVar("P", bound=DialectParameters)

_OK = 200


async def detect(  # noqa: PLR0913, PLR0917 - the parts of a dialect's request
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBody],
    respond: Callable[[ResponseInput[Detections], P], Awaitable[ASGIResponse]],
    in_path: Pairs = (),
) -> ASGIResponse:
    """Answer a request with one image.

    Args:
        request: The request.
        worker: The resources of the worker, with the pipeline and the keys.
        kind: The type of the parameters in query, body and path.
        parse: Extracts the image and the parameters from a body, as for `intake.receive`.
        respond: Makes the response from the detections.
        in_path: Parameters in the path.

    Raises:
        GatewayError: As for a request to `/detect`.
    """
    return await handle_image(
        request, worker, kind, in_path, parse=parse, choose=lambda wanted, *_: lambda given: respond(given, wanted)
    )


async def detect_each(
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBatch],
    respond: Callable[[list[Detections | Exception], P, CallContext], Awaitable[ASGIResponse]],
) -> ASGIResponse:
    """Answer a request with several images as `/detect/batch` does, or with a single image as `/detect` does.

    Args:
        request: The request.
        worker: The resources of the worker, with the pipeline and the keys.
        kind: The type of the parameters in query and body.
        parse: Extracts the images and the parameters from a body, as for `intake.receive`.
        respond: Makes the response from the detections or the error of each image.

    Raises:
        GatewayError: As for a request to `/detect/batch`; for a single image, also its own error.
    """
    context, pipeline = context_of(request.scope), worker.pipeline
    with ClientWatch(request.receive, context.body_limits) as client:
        content, wanted, call = await intake.receive(client, request.scope, worker, [], kind, parse)
        images = content.images
        refuse_large(images, worker.deployment.body_limits.max_bytes)
        try:
            if len(images) == 1 and isinstance(images[0], bytes):
                found: list[Detections | Exception] = [await pipeline.run(images[0], wanted.options, call)]
            else:
                batch = await BatchRequest.open(pipeline, images, wanted.options, call)
                found = await _run(batch, worker, context)
                if len(found) == 1:
                    require_all(found)
        finally:
            model = wanted.options.model or pipeline.default_for(DetectionHead.task)
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        failed = sum(isinstance(each, Exception) for each in found)
        context.log_fields |= {"images": len(found), "failed": failed}
        return await respond(found, wanted, call)


def require_all(found: Sequence[Detections | Exception]) -> list[Detections]:
    """Return the detections in all images.

    Raises:
        GatewayError: An image failed. It is the error of the first failed image, and its detail names the index.
    """
    errors = {index: each for index, each in enumerate(found) if isinstance(each, Exception)}
    if errors:
        raise first_error(errors, len(found))
    return [each for each in found if not isinstance(each, Exception)]


async def _run(batch: BatchRequest, worker: WorkerResources, context: RequestContext) -> list[Detections | Exception]:
    """Return the detections in each image, or its error."""
    found: dict[int, Detections | Exception] = {}

    def note(index: int, result: Detections | Exception, timing: Timing) -> None:
        if isinstance(result, Exception):
            found[index] = copy_error(result)
            count_batch_image(worker.metrics, timing, problems.to_problem(result, context.request_id).status)
        else:
            found[index] = result
            count_batch_image(worker.metrics, timing, _OK)

    async with batch.run(note) as done:
        for image in done:
            await image
    if batch.url_hosts:
        context.log_fields["url_hosts"] = batch.url_hosts
    return [found[index] for index in sorted(found)]


async def receive_text(
    request: AnyRequest, worker: WorkerResources, kind: type[P], parse: Callable[[bytes, str, type[P]], C]
) -> Received[C, P]:
    """Receive a request whose body contains no image; arguments as for `detect`.

    Raises:
        GatewayError: As for `intake.receive`.
    """
    with ClientWatch(request.receive, context_of(request.scope).body_limits) as client:
        return await intake.receive(client, request.scope, worker, [], kind, parse, may_be_empty=True)
