"""Answer a request with one image, whatever the task and however the answer is written."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from litestar import Request
from litestar.response.base import ASGIResponse

from app.api import body, intake
from app.api.body import ParsedBody
from app.api.client_watch import ClientWatch
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.formats.answer import Answer
from app.api.intake import LateKind, Pairs
from app.api.parameters import Parameters
from app.api.tasks import FORMS
from app.model.heads import Task

P = TypeVar("P", bound=Parameters)

Respond = Callable[[Answer[Any]], Awaitable[ASGIResponse]]
"""Makes the response; raises a GatewayError if it cannot."""


def choose_format(wanted: Parameters, task: Task, context: RequestContext) -> Respond:
    """Choose the format that parameters or `Accept` name; raises NotAcceptable if there is none."""
    return FORMS[task].formats.choose(wanted.presentation.format, context.accept).respond


async def answer(  # noqa: PLR0913 - what a request consists of
    request: Request[Any, Any, Any],
    worker: WorkerResources,
    kind: type[P] | LateKind[P],
    in_path: Pairs = (),
    *,
    parse: Callable[[bytes, str, type[P]], ParsedBody] | None = None,
    choose: Callable[[P, Task, RequestContext], Respond] = choose_format,
) -> ASGIResponse:
    """Answer a request, unless its client leaves.

    Args:
        request: Whose body limits its context has.
        worker: Has the pipeline, which answers the question about the image.
        kind: The parameters that it may have.
        in_path: Parameters in the path.
        parse: As `intake.receive` says; None for what all of the gateway's own routes accept.
        choose: Chooses how to respond, before anything is done with the image.

    Raises:
        GatewayError: As `intake.receive`, `choose`, `Pipeline.run` and the response say.
    """
    context, pipeline = context_of(request.scope), worker.pipeline
    with ClientWatch(request.receive, context.body_limits) as client:
        received = await intake.receive(client, request.scope, worker, in_path, kind, parse or body.parse_body)
        image, wanted, call = received.content.image, received.wanted, received.call
        question = wanted.options
        respond = choose(wanted, question.task, context)
        model = question.model or pipeline.default_for(question.task)
        try:
            found = await pipeline.run(image, question, call)
        finally:
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        context.log_fields |= {"image_bytes": len(image), FORMS[question.task].results: len(found.scores)}
        return await respond(Answer(found, image, wanted.presentation, context, call, pipeline))
