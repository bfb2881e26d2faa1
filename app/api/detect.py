"""POST /detect, /classify, /segment, /pose, /obb, /embed/image and /predict/{model}: routes that run a model on one image."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope

from app.api.answering import steps
from app.api.answering.format import Respond, ResponseInput, select
from app.api.answering.schema import ClassifyResponse, CocoResult, DetectResponse, EmbedResponse
from app.api.beside import SearchProcess
from app.api.caller.check import require_scope
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import own_route, pictures_of
from app.api.parameters.parse import Pairs, Parameters
from app.api.parameters.tasks import FORMS, EmbedParameters, PathCascade, PathModel
from app.api.receiving import body
from app.api.receiving.body import ParsedBody
from app.api.receiving.intake import Receiving, query_of
from app.cascade.definition import Cascade
from app.cascade.run import run_cascade
from app.errors import NotOffered
from app.model.heads import Task
from app.model.reference import refer_to
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import count

P = TypeVar("P", bound=Parameters)


def _route(
    task: Task, path: str, summary: str, description: str, results: object = DetectResponse | list[CocoResult]
) -> HTTPRouteHandler:

    async def handle(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        return await handle_image(request, worker, pipeline, FORMS[task].parameters)

    return own_route(
        path,
        handle,
        results,
        f"The {FORMS[task].results}",
        kinds=(FORMS[task].parameters,),
        contents=pictures_of(task),
        has_streams=True,
        task=task,
        summary=summary,
        description=f"{description}, with the default model for this, or with the one that the parameter `model` names.",
    )


async def predict(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str]) -> ASGIResponse:
    """Ask the model in the path. The response is that of the route for its task, such as `/detect` or `/classify`.

    For a cascade, it is that of its first model: each detection has what each of the later steps says of it, by the step's name.
    """
    if (cascade := worker.catalog.own(model)) is not None:
        path_cascade = PathCascade(cascade, query_of(request.scope), pipeline)
        return await handle_image(
            request, worker, pipeline, path_cascade.kind or path_cascade, path_cascade.in_path, cascade=cascade
        )
    path_model = PathModel(model, query_of(request.scope), pipeline)
    return await handle_image(request, worker, pipeline, path_model.kind or path_model, [("model", model)])


ROUTES = [
    _route("detection", "/detect", "Detect objects in an image", "Detect objects"),
    _route("classification", "/classify", "Classify an image", "Classify an image", ClassifyResponse),
    _route("segmentation", "/segment", "Segment objects in an image", "Detect objects and their masks"),
    _route("pose", "/pose", "Estimate poses in an image", "Detect objects and their keypoints"),
    _route("obb", "/obb", "Detect oriented boxes in an image", "Detect objects and their oriented boxes"),
    own_route(
        "/predict/{model:str}",
        predict,
        DetectResponse | list[CocoResult] | ClassifyResponse | EmbedResponse,
        "The classes of a classifier, the vector of an embedding model, or the detections of another model",
        kinds=tuple(form.parameters for form in FORMS.values()),
        contents=pictures_of(*FORMS),
        has_streams=True,
        summary="Ask a given model about an image",
    ),
]

EMBED = _route("embedding", "/embed/image", "Describe an image by a vector", "Describe an image by a vector", EmbedResponse)


async def handle_image(  # noqa: PLR0913 - the parts of a request
    request: AnyRequest,
    worker: WorkerResources,
    pipeline: Pipeline,
    kind: type[P] | PathModel,
    in_path: Pairs = (),
    *,
    parse: Callable[[bytes, str, type[P]], ParsedBody] | None = None,
    respond: Respond | None = None,
    cascade: Cascade | None = None,
) -> ASGIResponse:
    """Answer a request with parameters of a kind in path, query and body, unless its client disconnects.

    Without `respond`, parameters or `Accept` choose the format; NotAcceptable comes before the image is processed. Of a `cascade`,
    `kind` and `in_path` are those of its first model.
    """
    async with Receiving(request, worker, kind, parse or body.parse_body, in_path) as (context, content, received, call):
        wanted: Any = received  # has what its task has
        image, question = content.image, wanted.options
        if getattr(wanted, "index", False):
            wanted = await _index(request.scope, worker, wanted, image, call)
        respond = respond or select(FORMS[question.task].formats, wanted.format, context.accept).respond
        add_steps = None
        try:
            if cascade is None:
                found = await pipeline.run(image, question, call)
            else:
                answer = await run_cascade(pipeline, cascade, image, call, worker.metrics, question=question)
                found, add_steps = steps.to_objects(cascade, answer), partial(steps.add_steps, cascade, answer, wanted.boxes)
        finally:
            if "model" not in context.log_fields:  # named in the body, or loaded for this request
                context.log_fields |= pipeline.log_fields(question.model or pipeline.default_for(question.task))
        if "route_name" in context.log_fields:
            context.log_fields["model"] = refer_to(found.spec.name, found.version)
        context.log_fields |= {"image_bytes": len(image), FORMS[question.task].results: count(found)}
        return await respond(ResponseInput(found, image, wanted, context, call, pipeline, add_steps))


async def _index(
    scope: HTTPScope, worker: WorkerResources, wanted: EmbedParameters, image: bytes, call: CallContext
) -> EmbedParameters:
    if worker.search is None:
        raise NotOffered("this gateway keeps no vectors; `nereid serve --search` turns that on, or send index=false")
    require_scope(context_of(scope), worker.keys, "ingest")
    search = cast("SearchProcess", worker.search)
    # The default may be longer than what callers may ask for, and to the process this worker is a caller.
    seconds = min(max(call.deadline.remaining, 0.001), worker.deployment.limits.max_timeout_seconds)
    image_id = await search.keep_vector(image, wanted.image_id, scope, seconds)
    return msgspec.structs.replace(wanted, image_id=image_id)
