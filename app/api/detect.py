"""POST /detect and POST /predict/{model}: an image in, detections out."""

from functools import partial
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from litestar import Request
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath

from app.api import body, parameters
from app.api.client_watch import ClientWatch
from app.api.context import context_of
from app.api.fetching import fetch_image
from app.api.formatting import to_response
from app.api.guards import GuardedRoute
from app.api.json_response import JsonResponse
from app.api.openapi import PROBLEMS, DetectOperation
from app.api.schema import DetectResponse
from app.errors import MalformedRequest
from app.pipeline.call import CallContext
from app.pipeline.detector import Detector
from app.resilience.deadline import Deadline

_RESPONSES = {200: ResponseSpec(DetectResponse, description="The detections", generate_examples=False), **PROBLEMS}


@GuardedRoute(
    "/detect",
    http_method=HttpMethod.POST,
    summary="Detect objects in an image",
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def detect(request: Request[Any, Any, Any], detector: NamedDependency[Detector]) -> JsonResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await _detect(request, detector, [])


@GuardedRoute(
    "/predict/{model:str}",
    http_method=HttpMethod.POST,
    summary="Detect objects in an image with a given model",
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def predict(request: Request[Any, Any, Any], detector: NamedDependency[Detector], model: FromPath[str]) -> JsonResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, detector, [("model", model)])


async def _detect(request: Request[Any, Any, Any], detector: Detector, pairs: list[tuple[str, str]]) -> JsonResponse:
    context = context_of(request.scope)
    query = request.scope["query_string"]
    if query:
        pairs = [*pairs, *parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
    # An invalid query is rejected before the body is read.
    wanted = parameters.parse(pairs)
    seconds = detector.timeout_seconds(wanted.timeout_ms)
    with ClientWatch(request.receive, context.body_limits) as client:
        with detector.admission.start_upload() as upload:
            image = await client.read_body(upload, may_be_empty=wanted.url is not None)
            context.is_body_received = True
            received_at = monotonic()
            if wanted.url is None and body.needs_parsing(context.content_type):
                parse = partial(body.parse_body, image, context.content_type)
                image, more = await detector.run_in_thread(parse, Deadline(received_at + seconds), upload)
                wanted = parameters.parse([*pairs, *more])
                seconds = detector.timeout_seconds(wanted.timeout_ms)
            context.timing.lap("read")
            if wanted.url is not None:
                if image:
                    raise MalformedRequest("send either an image or a url, not both")
                image = await fetch_image(wanted.url, detector.fetcher, upload, Deadline(received_at + seconds), context)
        # Triton would export spans of a trace that is not sampled, too.
        trace = context.trace if context.trace is not None and context.trace.is_sampled else None
        call = CallContext(Deadline(received_at + seconds), context.timing, context.request_id, context.share, trace)
        model = wanted.options.model or detector.default_model
        try:
            found = await detector.detect(image, wanted.options, call)
        finally:
            if detector.is_known(model):
                context.log_fields["model"] = model
    context.log_fields |= {"image_bytes": len(image), "detections": len(found.scores)}
    response = to_response(found, wanted.boxes, context.timing.total, context.request_id)
    return JsonResponse(msgspec.json.encode(response))
