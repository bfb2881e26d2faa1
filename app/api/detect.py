"""POST /detect, /classify and /predict/{model}: an image in, what a model says of it out."""

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
from app.api.guards import GuardedRoute
from app.api.intake import LateKind
from app.api.openapi import PROBLEMS, ClassifyOperation, DetectOperation, PredictOperation
from app.api.parameters import ClassifyParameters, DetectParameters, Parameters
from app.api.path_model import PathModel
from app.api.schema import ClassifyResponse, CocoResult, DetectResponse
from app.api.tasks import FORMS
from app.pipeline.pipeline import Pipeline


def _responses(kind: Any, description: str) -> dict[int, ResponseSpec]:  # noqa: ANN401
    return {200: ResponseSpec(kind, description=description, generate_examples=False), **PROBLEMS}


@GuardedRoute(
    "/detect",
    http_method=HttpMethod.POST,
    summary="Detect objects in an image",
    operation_class=DetectOperation,
    responses=_responses(DetectResponse | list[CocoResult], "The detections"),
    status_code=200,
)
async def detect(request: Request[Any, Any, Any], pipeline: NamedDependency[Pipeline]) -> ASGIResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await _answer(request, pipeline, DetectParameters)


@GuardedRoute(
    "/classify",
    http_method=HttpMethod.POST,
    summary="Classify an image",
    operation_class=ClassifyOperation,
    responses=_responses(ClassifyResponse, "The classes"),
    status_code=200,
)
async def classify(request: Request[Any, Any, Any], pipeline: NamedDependency[Pipeline]) -> ASGIResponse:
    """Say what an image shows, by the default classifier, or by the one that the parameter `model` names."""
    return await _answer(request, pipeline, ClassifyParameters)


@GuardedRoute(
    "/predict/{model:str}",
    http_method=HttpMethod.POST,
    summary="Ask a given model about an image",
    operation_class=PredictOperation,
    responses=_responses(
        DetectResponse | list[CocoResult] | ClassifyResponse, "The detections of a detector, or the classes of a classifier"
    ),
    status_code=200,
)
async def predict(request: Request[Any, Any, Any], pipeline: NamedDependency[Pipeline], model: FromPath[str]) -> ASGIResponse:
    """Detect objects, or classify the image, with the model in the path: it answers as `/detect` or `/classify` does."""
    path_model = PathModel(model, intake.query_of(request.scope), pipeline)
    return await _answer(request, pipeline, path_model.kind or path_model, ("model", model))


async def _answer(
    request: Request[Any, Any, Any],
    pipeline: Pipeline,
    kind: type[Parameters] | LateKind[Parameters],
    *in_path: tuple[str, str],
) -> ASGIResponse:
    context = context_of(request.scope)
    with ClientWatch(request.receive, context.body_limits) as client:
        (image, _), wanted, call = await intake.receive(client, request.scope, pipeline, in_path, kind, body.parse_body)
        question, presentation = wanted.options, wanted.presentation
        form = FORMS[question.task]
        model = question.model or pipeline.default_for(question.task)
        chosen = form.formats.choose(presentation.format, context.accept)
        try:
            found = await pipeline.run(image, question, call)
        finally:
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        context.log_fields |= {"image_bytes": len(image), form.results: len(found.scores)}
        return await chosen.respond(Answer(found, image, presentation, context, call, pipeline))
