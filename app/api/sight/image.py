"""Answer a request about one image by a cascade, or by whatever else takes an encoded image."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import UNSET, UnsetType

from app.api.answering import drawn
from app.api.answering.format import ResponseInput, negotiate
from app.api.answering.native import respond_in_thread
from app.api.answering.schema import ImageSize
from app.api.context import RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import own_route, pictures_of
from app.api.parameters.parse import Parameters
from app.api.receiving import body, intake
from app.api.receiving.client_watch import ClientWatch
from app.api.receiving.content_type import JSON
from app.cascade.definition import Cascade
from app.cascade.run import CascadeAnswer, run_cascade
from app.model.heads import DetectionHead, Task
from app.model.reference import refer_to, split_reference
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections

_PICTURES = pictures_of(DetectionHead.task)

P = TypeVar("P", bound=Parameters)
R = TypeVar("R")


class Placed(msgspec.Struct, kw_only=True):
    """What is said of an image, with its place if it is one of a batch."""

    filename: str | UnsetType | None = UNSET
    image_index: int | UnsetType = UNSET
    """Position in the request, from 0."""

    def totals(self) -> Mapping[str, int]:
        """Return what the image adds to the sums over a batch."""
        return {}


class Answer(Placed, kw_only=True):
    """What every answer about an image has: in a batch its place there, otherwise time and id of the request."""

    image: ImageSize
    truncated: bool = False
    """Whether there was more in the image than a request is answered about."""
    total_time_ms: float | UnsetType = UNSET
    request_id: str | UnsetType = UNSET

    def complete(self, context: RequestContext) -> "Answer":
        """Set what the answer to a request about one image ends with; return the answer."""
        self.total_time_ms, self.request_id = round(context.timing.total, 2), context.request_id
        return self


class Asking(NamedTuple, Generic[P, R]):
    """How a route asks about an image."""

    first: Callable[[WorkerResources, P], str]
    """Returns the reference of the model that is asked first."""
    ask: Callable[[WorkerResources, Pipeline, bytes, P, CallContext], Awaitable[R]]


MODEL: Asking[Any, Any] = Asking(
    lambda worker, wanted: refer_to(
        wanted.options.model or worker.pipeline.default_for(wanted.options.task), wanted.options.version
    ),
    lambda _, pipeline, image, wanted, call: pipeline.run(image, wanted.options, call),
)
"""Asks the model that the parameters name, or the default model of their task."""


def by_cascade(choose: Callable[[WorkerResources, P], Cascade]) -> Asking[P, CascadeAnswer]:
    """Ask the cascade that `choose` returns for the parameters of a request."""

    async def ask(worker: WorkerResources, pipeline: Pipeline, image: bytes, wanted: P, call: CallContext) -> CascadeAnswer:
        return await run_cascade(pipeline, choose(worker, wanted), image, call, worker.metrics)

    return Asking(lambda worker, wanted: choose(worker, wanted).model, ask)


def image_route(  # noqa: PLR0913 - the properties of a route
    path: str,
    task: Task | None,
    kind: type[P],
    asking: Asking[P, R],
    to_answer: Callable[[P, R], Answer],
    *,
    response: type[Answer],
    check: Callable[[WorkerResources], object] = lambda _: None,
    to_objects: Callable[[P, R], Detections] | None = None,
    **described: Any,  # noqa: ANN401 - for OpenAPI
) -> HTTPRouteHandler:
    """Make a route for one image, in any of the forms that the gateway's own routes accept, with parameters of a kind.

    `task` is that of the model that is asked first; None for one that is the default of no task. `to_answer` is called in a thread,
    and may raise a GatewayError, as may `check`, before the body is received. `to_objects` returns what is drawn on the image if
    `Accept` prefers a picture; None if there are no pictures.
    """
    pictures = _PICTURES if to_objects else {}

    async def handle(request: Request[Any, Any, Any], worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        check(worker)
        context = context_of(request.scope)
        accepted = negotiate(context.accept, (JSON, *pictures))
        with ClientWatch(request.receive, context.body_limits) as client:
            content, wanted, call = await intake.receive(client, request.scope, worker, [], kind, body.parse_body)
            name, _ = split_reference(asking.first(worker, wanted))
            context.log_fields |= {"image_bytes": len(content.image), **pipeline.log_fields(name)}
            found = await asking.ask(worker, pipeline, content.image, wanted, call)
            if to_objects and accepted != JSON:
                drawing = ResponseInput(to_objects(wanted, found), content.image, wanted, context, call, pipeline)
                return await drawn.IMAGE.respond(drawing)
            counts: dict[str, int] = {}

            def describe() -> Answer:
                answer = to_answer(wanted, found).complete(context)
                counts.update(counts_of(answer))
                return answer

            response = await respond_in_thread(describe, pipeline, call)
            context.log_fields |= counts
            return response

    return own_route(path, handle, response, "The answer", kinds=(kind,), contents=pictures, task=task, **described)


def counts_of(answer: msgspec.Struct) -> dict[str, int]:
    """Return the numbers in the fields `num_*` of an answer by what they count, for the log."""
    names = [name for name in answer.__struct_fields__ if name.startswith("num_")]
    return {name.removeprefix("num_"): getattr(answer, name) for name in names}
