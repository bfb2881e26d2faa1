"""POST /detect, /classify and /predict/{model}: an image in, what a model says of it out."""

from typing import Any

from litestar import Request
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api import intake
from app.api.dependencies import WorkerResources
from app.api.openapi import PROBLEMS, ClassifyOperation, DetectOperation, PredictOperation
from app.api.path_model import PathModel
from app.api.routes import ModelRoute
from app.api.schema import ClassifyResponse, CocoResult, DetectResponse
from app.api.single_image import answer
from app.api.task_parameters import ClassifyParameters, DetectParameters
from app.model.heads import ClassificationHead


def _responses(kind: Any, description: str) -> dict[int, ResponseSpec]:  # noqa: ANN401
    return {200: ResponseSpec(kind, description=description, generate_examples=False), **PROBLEMS}


@ModelRoute(
    "/detect",
    summary="Detect objects in an image",
    operation_class=DetectOperation,
    responses=_responses(DetectResponse | list[CocoResult], "The detections"),
)
async def detect(request: Request[Any, Any, Any], worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await answer(request, worker, DetectParameters)


@ModelRoute(
    "/classify",
    task=ClassificationHead.task,
    summary="Classify an image",
    operation_class=ClassifyOperation,
    responses=_responses(ClassifyResponse, "The classes"),
)
async def classify(request: Request[Any, Any, Any], worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Say what an image shows, by the default classifier, or by the one that the parameter `model` names."""
    return await answer(request, worker, ClassifyParameters)


@ModelRoute(
    "/predict/{model:str}",
    summary="Ask a given model about an image",
    operation_class=PredictOperation,
    responses=_responses(
        DetectResponse | list[CocoResult] | ClassifyResponse, "The detections of a detector, or the classes of a classifier"
    ),
)
async def predict(request: Request[Any, Any, Any], worker: NamedDependency[WorkerResources], model: FromPath[str]) -> ASGIResponse:
    """Detect objects, or classify the image, with the model in the path: it answers as `/detect` or `/classify` does."""
    path_model = PathModel(model, intake.query_of(request.scope), worker.pipeline)
    return await answer(request, worker, path_model.kind or path_model, [("model", model)])
