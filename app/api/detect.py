"""POST /detect and POST /predict/{model}: an image in, detections out."""

from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from litestar import Request, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api import body, parameters
from app.api.context import context_of
from app.api.formatting import to_response
from app.api.guards import combine_guards, guard_payload, guard_timing
from app.api.openapi import PROBLEMS, DetectOperation
from app.api.schema import DetectResponse
from app.pipeline.detector import Detector

_GUARDS = [combine_guards(guard_payload, guard_timing)]
_RESPONSES = {200: ResponseSpec(DetectResponse, description="The detections", generate_examples=False), **PROBLEMS}


@post(
    "/detect",
    summary="Detect objects in an image",
    guards=_GUARDS,
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def detect(request: Request[Any, Any, Any], detector: NamedDependency[Detector]) -> ASGIResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await _detect(request, detector, [])


@post(
    "/predict/{model:str}",
    summary="Detect objects in an image with a given model",
    guards=_GUARDS,
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def predict(request: Request[Any, Any, Any], detector: NamedDependency[Detector], model: FromPath[str]) -> ASGIResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, detector, [("model", model)])


async def _detect(request: Request[Any, Any, Any], detector: Detector, pairs: list[tuple[str, str]]) -> ASGIResponse:
    context = context_of(request.scope)
    pairs = [*pairs, *parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)]
    wanted = parameters.parse(pairs)  # an invalid query is rejected before the body is read
    image = data = await body.read_body(request)
    deadline = detector.deadline()
    if body.needs_parsing(context.content_type):
        image, more = await detector.run_in_thread(partial(body.parse_upload, data, context.content_type), deadline)
        wanted = parameters.parse([*pairs, *more])
    context.timing.lap("read")
    found = await detector.detect(image, wanted.options, deadline=deadline, timing=context.timing, request_id=context.request_id)
    context.log_fields |= {"model": found.spec.name, "image_bytes": len(image), "detections": len(found.scores)}
    response = to_response(found, wanted.boxes, context.timing.total, context.request_id)
    return ASGIResponse(body=msgspec.json.encode(response))
