"""Answer the requests of a dialect, with the checks and the limits of the gateway's own routes."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from litestar.response.base import ASGIResponse

from app.api import intake, problems, single_image
from app.api.batch import failures
from app.api.batch.body import ParsedBatch, refuse_large
from app.api.body import ParsedBody, needs_parsing
from app.api.client_watch import BodyLimits, ClientWatch
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import AnyRequest, DialectParameters
from app.api.dialects.key import has_key, require_key
from app.api.formats.answer import Answer
from app.api.guards import guard_payload, guard_timing
from app.api.intake import Content, Pairs, Received
from app.api.metrics import count_image
from app.api.parameters import MODEL_NAMES
from app.model.heads import DetectionHead
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext, Detections
from app.telemetry.timing import Timing

C = TypeVar("C", bound=Content)
P = TypeVar("P", bound=DialectParameters)

_OK = 200
_SMALL_BYTES = 1 << 16


async def detect(  # noqa: PLR0913, PLR0917 - what a dialect says of a request
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBody],
    respond: Callable[[Answer[Detections], P], Awaitable[ASGIResponse]],
    in_path: Pairs = (),
) -> ASGIResponse:
    """Answer a request with one image.

    Args:
        request: Of a dialect.
        worker: Has the pipeline and the keys.
        kind: The parameters that query, body and path may have.
        parse: Takes image and parameters from a body; as `intake.receive` says.
        respond: Describes what was found.
        in_path: Parameters in the path.

    Raises:
        GatewayError: As for a request to `/detect`.
    """
    await _admit(request, worker, kind, worker.deployment.body_limits, in_path)
    return await single_image.answer(
        request,
        worker.pipeline,
        kind,
        in_path,
        parse=parse,
        check=partial(_check_key, request, worker),
        choose=lambda wanted, *_: lambda answer: respond(answer, wanted),
    )


async def detect_each(
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBatch],
    respond: Callable[[list[Detections | Exception], P, CallContext], Awaitable[ASGIResponse]],
) -> ASGIResponse:
    """Answer a request with several images, as `/detect/batch` does. A single one is treated as by `/detect`.

    Args:
        request: Of a dialect.
        worker: Has the pipeline and the keys.
        kind: The parameters that query and body may have.
        parse: Takes images and parameters from a body; as `intake.receive` says.
        respond: Describes what was found in each image, or why it failed.

    Raises:
        GatewayError: As for a request to `/detect/batch`; with a single image, also why it failed.
    """
    await _admit(request, worker, kind, worker.deployment.batch_limits)
    context, pipeline = context_of(request.scope), worker.pipeline
    with ClientWatch(request.receive, context.body_limits) as client:
        check = partial(_check_key, request, worker)
        content, wanted, call = await intake.receive(client, request.scope, pipeline, [], kind, parse, check)
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
    """Return what was found in all images.

    Raises:
        GatewayError: An image failed: the first one's error, which says which image it is.
    """
    errors = {index: each for index, each in enumerate(found) if isinstance(each, Exception)}
    if errors:
        raise failures.first_of(errors, len(found))
    return [each for each in found if not isinstance(each, Exception)]


async def _run(batch: BatchRequest, worker: WorkerResources, context: RequestContext) -> list[Detections | Exception]:
    """Return what was found in each image, or why it failed."""
    found: dict[int, Detections | Exception] = {}

    def note(index: int, result: Detections | Exception, timing: Timing) -> None:
        if isinstance(result, Exception):
            found[index] = failures.keep(result)
            count_image(worker.metrics, timing, problems.to_problem(result, context.request_id).status)
        else:
            found[index] = result
            count_image(worker.metrics, timing, _OK)

    async with batch.run(note) as done:
        for image in done:
            await image
    if batch.url_hosts:
        context.log_fields["url_hosts"] = batch.url_hosts
    return [found[index] for index in sorted(found)]


async def receive_small(
    request: AnyRequest, worker: WorkerResources, kind: type[P], parse: Callable[[bytes, str, type[P]], C]
) -> Received[C, P]:
    """Receive a request whose body has no image; arguments as those of `detect`.

    Raises:
        GatewayError: As `intake.receive` and `require_key` say.
    """
    limits = worker.deployment.body_limits._replace(max_bytes=_SMALL_BYTES)
    if not kind.has_key_in_body or has_key(request):
        require_key(request, worker)
    guard_payload(limits)(request)
    with ClientWatch(request.receive, limits) as client:
        return await intake.receive(client, request.scope, worker.pipeline, [], kind, parse, partial(_check_key, request, worker))


async def _admit(
    request: AnyRequest, worker: WorkerResources, kind: type[DialectParameters], limits: BodyLimits, in_path: Pairs = ()
) -> None:
    """Reject a request before its body is received, if what is known by then is a reason."""
    context, pipeline = context_of(request.scope), worker.pipeline
    known = dict([*intake.query_of(request.scope), *in_path])
    name = next((known[name] for name in MODEL_NAMES if name in known), "")
    model = pipeline.refer_to(name or pipeline.default_for(DetectionHead.task), known.get("version"))
    is_anonymous = worker.keys is not None and kind.has_key_in_body and not has_key(request)
    if not is_anonymous:
        require_key(request, worker)
    # As long as nobody knows whose body it is, it may be as large as one image, and nothing is told of a model.
    guard_payload(worker.deployment.body_limits if is_anonymous else limits)(request)
    if not is_anonymous and (name or not needs_parsing(context.content_type)):  # else the body may name another one
        pipeline.check_circuit(model)
    if pipeline.is_usable(model):
        await pipeline.admission.check(model, context.share)
    guard_timing(request)


def _check_key(request: AnyRequest, worker: WorkerResources, wanted: DialectParameters) -> None:
    if wanted.has_key_in_body and not has_key(request):  # else it has been checked
        require_key(request, worker, wanted.api_key)
