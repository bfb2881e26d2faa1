"""Answer the requests of a dialect, with the checks and the limits of the gateway's own routes."""

import base64
import binascii
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from litestar import Request
from litestar.response.base import ASGIResponse

from app.api import intake, problems, single_image
from app.api.batch.body import ParsedBatch, refuse_large
from app.api.body import ParsedBody, needs_parsing
from app.api.client_watch import BodyLimits, ClientWatch
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import DialectParameters
from app.api.formats.answer import Answer
from app.api.guards import admit_key, guard_payload, guard_timing
from app.api.intake import Pairs
from app.api.metrics import count_image
from app.api.schema import Problem
from app.errors import GatewayError
from app.model.heads import DetectionHead
from app.model.spec import ModelSpec
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext, Detections
from app.telemetry.timing import Timing

P = TypeVar("P", bound=DialectParameters)
T = TypeVar("T")

_KEY_HEADERS = {b"authorization", b"x-api-key"}
_OK = 200

AnyRequest = Request[Any, Any, Any]


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
        choose=lambda wanted, _: lambda answer: respond(answer, wanted),
    )


async def detect_each(
    request: AnyRequest, worker: WorkerResources, kind: type[P], parse: Callable[[bytes, str, type[P]], ParsedBatch]
) -> tuple[list[Detections | Problem], P]:
    """Detect objects in each image of a request; arguments and errors as `answer_each`.

    Returns:
        What was found in each image, or why it failed; and the parameters.
    """

    async def pass_on(found: list[Detections | Problem], wanted: P, _: CallContext) -> tuple[list[Detections | Problem], P]:
        return found, wanted

    return await answer_each(request, worker, kind, parse, pass_on)


async def answer_each(
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBatch],
    respond: Callable[[list[Detections | Problem], P, CallContext], Awaitable[T]],
) -> T:
    """Answer a request with several images, as `/detect/batch` does. A single one is treated as by `/detect`.

    Args:
        request: Of a dialect.
        worker: Has the pipeline and the keys.
        kind: The parameters that query and body may have.
        parse: Takes images and parameters from a body; as `intake.receive` says.
        respond: Gets what was found in each image, or why it failed.

    Returns:
        What `respond` returns.

    Raises:
        GatewayError: As for a request to `/detect/batch`; with a single image, also why it failed.
    """
    await _admit(request, worker, kind, worker.deployment.batch_limits, is_batch=True)
    context, pipeline = context_of(request.scope), worker.pipeline
    with ClientWatch(request.receive, context.body_limits) as client:
        check = partial(_check_key, request, worker)
        content, wanted, call = await intake.receive(client, request.scope, pipeline, [], kind, parse, check)
        images = content.images
        refuse_large(images, worker.deployment.body_limits.max_bytes)
        try:
            if len(images) == 1 and isinstance(images[0], bytes):
                alone = await pipeline.run(images[0], wanted.options, call)
                found: list[Detections | Problem] = [alone]
            else:
                is_alone = len(images) == 1
                batch = await BatchRequest.open(pipeline, images, wanted.options, call)
                found = await _run(batch, worker, context, is_alone=is_alone)
        finally:
            model = wanted.options.model or pipeline.default_for(DetectionHead.task)
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        failed = sum(isinstance(each, Problem) for each in found)
        context.log_fields |= {"images": len(found), "failed": failed}
        return await respond(found, wanted, call)


async def _run(
    batch: BatchRequest, worker: WorkerResources, context: RequestContext, *, is_alone: bool
) -> list[Detections | Problem]:
    """Return what `detect_each` does; raise why an image failed that is alone."""
    found: dict[int, Detections | Problem] = {}
    failures: list[Exception] = []

    def note(index: int, result: Detections | Exception, timing: Timing) -> None:
        if isinstance(result, Exception) and is_alone:
            failures.append(result)
        elif isinstance(result, Exception):
            problem = problems.to_problem(result, context.request_id)
            found[index] = problem
            count_image(worker.metrics, timing, problem.status)
        else:
            found[index] = result
            count_image(worker.metrics, timing, _OK)

    async with batch.run(note) as done:
        for image in done:
            await image
    if batch.url_hosts:
        context.log_fields["url_hosts"] = batch.url_hosts
    if failures:
        raise failures.pop()
    return [found[index] for index in sorted(found)]


async def detectors(request: AnyRequest, worker: WorkerResources, key: str | None = None) -> list[ModelSpec]:
    """Return the detectors that can be used, by name, to a caller who may use them; `key` is that in the body, if any.

    Raises:
        GatewayError: The API key is missing or wrong; Triton does not answer.
    """
    require_key(request, worker, key)
    states = await worker.tritons.list_models()
    specs = [await _spec(worker, name) for name in sorted(states) if states[name].is_ready]
    return [spec for spec in specs if spec is not None and spec.head.task == DetectionHead.task]


async def _spec(worker: WorkerResources, name: str) -> ModelSpec | None:
    """Return the spec of a model; None if it cannot be used, as `/models` explains."""
    try:
        return await worker.pipeline.spec(name)
    except GatewayError:
        return None


def require_key(request: AnyRequest, worker: WorkerResources, in_body: str | None = None) -> None:
    """Reject a request without a valid key, if there are keys.

    Args:
        request: Its key is in a header, as `Bearer` or as user and password, or in the query as `api_key`.
        worker: Has the keys.
        in_body: The key in the body, which counts only if there is none elsewhere.

    Raises:
        Unauthorized: There is no key, or a wrong one.
        Forbidden: The key does not have the scope `detect`.
    """
    if worker.keys is None:
        return
    headers = [(name, _to_bearer(value)) for name, value in request.scope["headers"] if name in _KEY_HEADERS]
    given = _key_in_query(request) or in_body
    if not headers and given:
        headers = [(b"x-api-key", given.encode())]
    admit_key(worker.keys.identify(headers), "detect", worker.keys, context_of(request.scope))


def _key_in_query(request: AnyRequest) -> str:
    return dict(intake.query_of(request.scope)).get("api_key", "")


def _to_bearer(authorization: bytes) -> bytes:
    """Make `Bearer ID.SECRET` of a header with the user ID and the password SECRET; leave any other as it is."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(encoded.strip(), validate=True).replace(b":", b".", 1)
    except binascii.Error:
        return authorization


async def _admit(  # noqa: PLR0913 - what is known before the body
    request: AnyRequest,
    worker: WorkerResources,
    kind: type[DialectParameters],
    limits: BodyLimits,
    in_path: Pairs = (),
    *,
    is_batch: bool = False,
) -> None:
    """Reject a request before its body is received, if what is known by then is a reason."""
    if not kind.has_key_in_body or _key_in_query(request) or any(name in _KEY_HEADERS for name, _ in request.scope["headers"]):
        require_key(request, worker)
    guard_payload(limits)(request)
    pipeline = worker.pipeline
    known = dict([*intake.query_of(request.scope), *in_path])
    model = pipeline.refer_to(known.get("model") or pipeline.default_for(DetectionHead.task), known.get("version"))
    context = context_of(request.scope)
    if "model" in known or not needs_parsing(context.content_type):  # else the body may name another one
        pipeline.check_circuit(model)
    if pipeline.is_usable(model):
        await pipeline.admission.check(model, context.share, is_batch=is_batch)
    guard_timing(request)


def _check_key(request: AnyRequest, worker: WorkerResources, wanted: DialectParameters) -> None:
    require_key(request, worker, wanted.api_key)
