"""How a route asks about an image, or about each image of a batch."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar

from app.api.batch.body import refuse_large
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import Parameters
from app.cascade.definition import Cascade
from app.cascade.run import CascadeAnswer, run_cascade
from app.model.reference import refer_to, split_reference
from app.pipeline.batch_request import BatchRequest, Image
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.resilience.lease import Lease

P = TypeVar("P", bound=Parameters)
R = TypeVar("R")


class Asking(NamedTuple, Generic[P, R]):
    """How a route asks about an image."""

    first: Callable[[WorkerResources, P], str]
    ask: Callable[[WorkerResources, Pipeline, bytes, P, CallContext], Awaitable[R]]


MODEL: Asking[Any, Any] = Asking(
    lambda worker, wanted: refer_to(
        wanted.options.model or worker.pipeline.default_for(wanted.options.task), wanted.options.version
    ),
    lambda _, pipeline, image, wanted, call: pipeline.run(image, wanted.options, call),
)


def by_cascade(choose: Callable[[WorkerResources, P], Cascade]) -> Asking[P, CascadeAnswer]:
    """Ask the cascade that `choose` returns for the parameters of a request."""

    async def ask(worker: WorkerResources, pipeline: Pipeline, image: bytes, wanted: P, call: CallContext) -> CascadeAnswer:
        return await run_cascade(pipeline, choose(worker, wanted), image, call, worker.metrics)

    return Asking(lambda worker, wanted: choose(worker, wanted).model, ask)


async def open_batch(  # noqa: PLR0913, PLR0917 - the parts of a question
    worker: WorkerResources, pipeline: Pipeline, images: list[Image], wanted: P, call: CallContext, asking: Asking[P, R]
) -> BatchRequest[R]:
    """Open a batch of images, of which those that are too large fail; errors are those of `BatchRequest.open_with`."""
    refuse_large(images, worker.deployment.body_limits.max_bytes)
    if asking is MODEL:
        return await BatchRequest.open(pipeline, images, wanted.options, call)  # type: ignore[attr-defined]

    def ask(image: bytes, own_call: CallContext, _: Lease) -> Awaitable[R]:
        return asking.ask(worker, pipeline, image, wanted, own_call)

    call = call._replace(route_key=call.route_key or call.request_id)  # a route answers about all of them by the same model
    model = pipeline.refer_to(*split_reference(asking.first(worker, wanted)))
    slots = asyncio.Semaphore(2 * pipeline.limits.decode_threads)  # while some are decoded, models answer about others
    return await BatchRequest.open_with(pipeline, images, model, ask, call, slots=slots)
