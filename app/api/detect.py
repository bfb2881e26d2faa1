"""POST /detect, /classify and /predict/{model}: an image in, what a model says of it out."""

from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.enums import HttpMethod
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api import intake
from app.api.guards import GuardedRoute
from app.api.openapi import PROBLEMS, ClassifyOperation, DetectOperation, PredictOperation
from app.api.path_model import PathModel
from app.api.schema import ClassifyResponse, CocoResult, DetectResponse
from app.api.single_image import answer
from app.api.task_parameters import ClassifyParameters, DetectParameters
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
    return await answer(request, pipeline, DetectParameters)


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
    return await answer(request, pipeline, ClassifyParameters)


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
    return await answer(request, pipeline, path_model.kind or path_model, [("model", model)])
