"""POST /detect and POST /predict/{model}: an image in, detections out."""

from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api import body, intake
from app.api.client_watch import ClientWatch
from app.api.context import context_of
from app.api.formats.answer import Answer
from app.api.formats.choice import choose
from app.api.guards import GuardedRoute
from app.api.openapi import PROBLEMS, DetectOperation
from app.api.parameters import DetectParameters
from app.api.schema import CocoResult, DetectResponse
from app.pipeline.detector import Detector

_RESPONSES = {
    200: ResponseSpec(DetectResponse | list[CocoResult], description="The detections", generate_examples=False),
    **PROBLEMS,
}


@GuardedRoute(
    "/detect",
    http_method=HttpMethod.POST,
    summary="Detect objects in an image",
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def detect(request: Request[Any, Any, Any], detector: NamedDependency[Detector]) -> ASGIResponse:
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
async def predict(request: Request[Any, Any, Any], detector: NamedDependency[Detector], model: FromPath[str]) -> ASGIResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, detector, [("model", model)])


async def _detect(request: Request[Any, Any, Any], detector: Detector, pairs: list[tuple[str, str]]) -> ASGIResponse:
    context = context_of(request.scope)
    with ClientWatch(request.receive, context.body_limits) as client:
        (image, _), wanted, call = await intake.receive(client, request.scope, detector, pairs, DetectParameters, body.parse_body)
        model = wanted.options.model or detector.default_model
        chosen = choose(wanted.format, context.accept)
        try:
            found = await detector.detect(image, wanted.options, call)
        finally:
            if detector.is_known(model):
                context.log_fields["model"] = model
        context.log_fields |= {"image_bytes": len(image), "detections": len(found.scores)}
        return await chosen.respond(Answer(found, image, wanted.boxes, wanted.image_id, context, call, detector))
