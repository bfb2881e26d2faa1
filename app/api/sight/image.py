"""Answer a request about one image by a cascade, or by whatever else takes an encoded image."""

from collections.abc import Callable
from typing import Any

from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import UNSET, UnsetType

from app.api.answering import drawn
from app.api.answering.format import ResponseInput, negotiate
from app.api.answering.native import respond_in_thread
from app.api.answering.schema import ImageSize
from app.api.batch.answer import Placed
from app.api.batch.asking import Asking, P, R
from app.api.context import AnyRequest, RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import own_route, pictures_of
from app.api.receiving.body import parse_body
from app.api.receiving.content_type import JSON
from app.api.receiving.intake import Receiving
from app.model.heads import DetectionHead, Task
from app.model.reference import split_reference
from app.pipeline.results import Detections

_PICTURES = pictures_of(DetectionHead.task)


class Answer(Placed, kw_only=True):
    """What every answer about an image has: in a batch its place there, otherwise time and id of the request."""

    image: ImageSize
    truncated: bool = False
    total_time_ms: float | UnsetType = UNSET
    request_id: str | UnsetType = UNSET

    def complete(self, context: RequestContext) -> "Answer":
        """Set what the answer to a request about one image ends with; return the answer."""
        self.total_time_ms, self.request_id = round(context.timing.total, 2), context.request_id
        return self


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
    """Make a route for one image; `to_answer` runs in a thread, `check` before the body is received, `to_objects` for a picture."""
    pictures = _PICTURES if to_objects else {}

    async def handle(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        check(worker)
        accepted = negotiate(context_of(request.scope).accept, (JSON, *pictures))
        async with Receiving(request, worker, kind, parse_body) as (context, content, wanted, call):
            name, _ = split_reference(asking.first(worker, wanted))
            context.log_fields |= {"image_bytes": len(content.image), **pipeline.log_fields(name)}
            found = await asking.ask(worker, pipeline, content.image, wanted, call)
            if to_objects and accepted != JSON:
                drawing = ResponseInput(to_objects(wanted, found), content.image, wanted, context, call, pipeline)
                return await drawn.IMAGE.respond(drawing)

            def describe() -> Answer:
                answer = to_answer(wanted, found).complete(context)
                counted = [name for name in answer.__struct_fields__ if name.startswith("num_")]
                context.log_fields |= {name.removeprefix("num_"): getattr(answer, name) for name in counted}
                return answer

            return await respond_in_thread(describe, pipeline, call)

    return own_route(path, handle, response, "The answer", kinds=(kind,), contents=pictures, task=task, **described)
