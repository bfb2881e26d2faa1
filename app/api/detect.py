"""POST /detect, /classify and /predict/{model}: routes that run a model on one image."""

from collections.abc import Callable
from typing import Any, TypeVar

from litestar import Request
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api.answering.format import Respond, ResponseInput, select
from app.api.answering.schema import ClassifyResponse, CocoResult, DetectResponse
from app.api.context import context_of
from app.api.dependencies import Worker, WorkerResources
from app.api.documentation.openapi import PROBLEMS, describe, operation_for
from app.api.parameters.parse import Pairs, Parameters
from app.api.parameters.tasks import FORMS, ClassifyParameters, DetectParameters, PathModel
from app.api.receiving import body, intake
from app.api.receiving.body import ParsedBody
from app.api.receiving.client_watch import ClientWatch
from app.api.routes import ModelRoute
from app.model.heads import ClassificationHead, DetectionHead

P = TypeVar("P", bound=Parameters)


@ModelRoute(
    "/detect",
    summary="Detect objects in an image",
    operation_class=operation_for(DetectionHead.task),
    responses={**describe(200, DetectResponse | list[CocoResult], "The detections"), **PROBLEMS},
)
async def detect(request: Request[Any, Any, Any], worker: Worker) -> ASGIResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await handle_image(request, worker, DetectParameters)


@ModelRoute(
    "/classify",
    task=ClassificationHead.task,
    summary="Classify an image",
    operation_class=operation_for(ClassificationHead.task),
    responses={**describe(200, ClassifyResponse, "The classes"), **PROBLEMS},
)
async def classify(request: Request[Any, Any, Any], worker: Worker) -> ASGIResponse:
    """Classify an image with the default classifier, or with the one that the parameter `model` names."""
    return await handle_image(request, worker, ClassifyParameters)


@ModelRoute(
    "/predict/{model:str}",
    summary="Ask a given model about an image",
    operation_class=operation_for(*FORMS),
    responses={
        **describe(
            200,
            DetectResponse | list[CocoResult] | ClassifyResponse,
            "The detections of a detector, or the classes of a classifier",
        ),
        **PROBLEMS,
    },
)
async def predict(request: Request[Any, Any, Any], worker: Worker, model: FromPath[str]) -> ASGIResponse:
    """Detect objects or classify the image with the model in the path. The response is that of `/detect` or `/classify`."""
    path_model = PathModel(model, intake.query_of(request.scope), worker.pipeline)
    return await handle_image(request, worker, path_model.kind or path_model, [("model", model)])


ROUTES = [detect, classify, predict]


async def handle_image(  # noqa: PLR0913 - the parts of a request
    request: Request[Any, Any, Any],
    worker: WorkerResources,
    kind: type[P] | PathModel,
    in_path: Pairs = (),
    *,
    parse: Callable[[bytes, str, type[P]], ParsedBody] | None = None,
    respond: Respond | None = None,
) -> ASGIResponse:
    """Answer a request with parameters of a kind in path, query and body, unless its client disconnects.

    `parse` is that of `intake.receive`, by default for the bodies that all of the gateway's own routes accept; `respond` is by
    default that of the format that the parameters or `Accept` choose; NotAcceptable is raised before the image is processed.
    """
    context, pipeline = context_of(request.scope), worker.pipeline
    with ClientWatch(request.receive, context.body_limits) as client:
        received = await intake.receive(client, request.scope, worker, in_path, kind, parse or body.parse_body)
        image, call = received.content.image, received.call
        wanted: Any = received.wanted
        question = wanted.options
        respond = respond or select(FORMS[question.task].formats, wanted.format, context.accept).respond
        model = question.model or pipeline.default_for(question.task)
        try:
            found = await pipeline.run(image, question, call)
        finally:
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        context.log_fields |= {"image_bytes": len(image), FORMS[question.task].results: len(found.scores)}
        return await respond(ResponseInput(found, image, wanted, context, call, pipeline))
