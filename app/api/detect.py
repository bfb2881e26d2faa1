"""POST /detect, /classify and /predict/{model}: an image in, what a model says of it out."""

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
from app.api.guards import GuardedRoute
from app.api.json_response import JsonResponse
from app.api.openapi import PROBLEMS, ClassifyOperation, DetectOperation, PredictOperation
from app.api.schema import ClassifyResponse, DetectResponse
from app.api.tasks import FORMS, TaskForm
from app.model.heads import ClassificationHead, DetectionHead
from app.pipeline.call import CallContext
from app.pipeline.detector import Detector
from app.resilience.deadline import Deadline

_DETECT = FORMS[DetectionHead.task]
_CLASSIFY = FORMS[ClassificationHead.task]


def _responses(kind: Any, description: str) -> dict[int, ResponseSpec]:  # noqa: ANN401
    return {200: ResponseSpec(kind, description=description, generate_examples=False), **PROBLEMS}


@GuardedRoute(
    "/detect",
    http_method=HttpMethod.POST,
    summary="Detect objects in an image",
    operation_class=DetectOperation,
    responses=_responses(DetectResponse, "The detections"),
    status_code=200,
)
async def detect(request: Request[Any, Any, Any], detector: NamedDependency[Detector]) -> JsonResponse:
    """Detect objects with the default model, or with the one that the parameter `model` names."""
    return await _answer(request, detector, _DETECT, [])


@GuardedRoute(
    "/classify",
    http_method=HttpMethod.POST,
    summary="Classify an image",
    operation_class=ClassifyOperation,
    responses=_responses(ClassifyResponse, "The classes"),
    status_code=200,
)
async def classify(request: Request[Any, Any, Any], detector: NamedDependency[Detector]) -> JsonResponse:
    """Say what an image shows, by the default classifier, or by the one that the parameter `model` names."""
    return await _answer(request, detector, _CLASSIFY, [])


@GuardedRoute(
    "/predict/{model:str}",
    http_method=HttpMethod.POST,
    summary="Ask a given model about an image",
    operation_class=PredictOperation,
    responses=_responses(DetectResponse | ClassifyResponse, "The detections of a detector, or the classes of a classifier"),
    status_code=200,
)
async def predict(request: Request[Any, Any, Any], detector: NamedDependency[Detector], model: FromPath[str]) -> JsonResponse:
    """Detect objects, or classify the image, with the model in the path: it answers as `/detect` or `/classify` does."""
    parameters.check_model_name(model)
    spec = await detector.prepare(model, Deadline.after(detector.timeout_seconds(None)))
    return await _answer(request, detector, FORMS[spec.head.task], [("model", model)])


async def _answer(
    request: Request[Any, Any, Any], detector: Detector, form: TaskForm, pairs: list[tuple[str, str]]
) -> JsonResponse:
    context = context_of(request.scope)
    query = request.scope["query_string"]
    if query:
        pairs = [*pairs, *parse_qsl(query.decode("latin-1"), keep_blank_values=True)]
    # An invalid query is rejected before the body is read.
    wanted = parameters.parse(pairs, form.parameters)
    seconds = detector.timeout_seconds(wanted.timeout_ms)
    with ClientWatch(request.receive, context.body_limits) as client:
        with detector.admission.start_upload() as upload:
            image = await client.read_body(upload)
            context.is_body_received = True
            received_at = monotonic()
            if body.needs_parsing(context.content_type):
                parse = partial(body.parse_body, image, context.content_type)
                image, more = await detector.run_in_thread(parse, Deadline(received_at + seconds), upload)
                wanted = parameters.parse([*pairs, *more], form.parameters)
                seconds = detector.timeout_seconds(wanted.timeout_ms)
        context.timing.lap("read")
        # Triton would export spans of a trace that is not sampled, too.
        trace = context.trace if context.trace is not None and context.trace.is_sampled else None
        call = CallContext(Deadline(received_at + seconds), context.timing, context.request_id, context.share, trace)
        question = wanted.options
        model = question.model or detector.default_for(question.task)
        try:
            found = await detector.run(image, question, call)
        finally:
            if detector.is_known(model):
                context.log_fields["model"] = model
    context.log_fields |= {"image_bytes": len(image), form.results: len(found.scores)}
    response = form.respond(found, wanted, context.timing.total, context.request_id)
    return JsonResponse(msgspec.json.encode(response))
