"""Interface of a dialect, and what all dialects share: their parameters, and how their requests are received and answered."""

from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope, Scope
from msgspec import Meta

from app.api.answering import problems
from app.api.answering.format import Respond, ResponseInput
from app.api.answering.native import respond_json
from app.api.answering.problems import WriteError
from app.api.answering.schema import Problem
from app.api.batch.answer import ImagesAnswer
from app.api.batch.asking import MODEL, Asking, by_cascade, open_batch
from app.api.batch.body import ParsedBatch, refuse_large
from app.api.caller.check import require_key
from app.api.context import AnyRequest
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import ModelParameters
from app.api.receiving.content_type import JSON
from app.api.receiving.intake import Receiving
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.errors import GatewayError
from app.model.heads import HEADS, DetectionHead, Task
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, DetectOptions, Reader
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections

P = TypeVar("P", bound="DialectParameters")


READING: Asking[Any, CascadeAnswer] = by_cascade(lambda worker, _: named_cascade(worker, "ocr", "lines", "text"))


class Dialect(NamedTuple):
    """The interface of another detection service."""

    name: str
    handlers: Sequence[HTTPRouteHandler]
    write_error: Callable[[Problem], Any] = lambda problem: {"error": problem.detail}
    statuses: Mapping[int, int] = {}
    """Replacements of the gateway's error statuses that clients of the other service would not understand."""
    applies: Mapping[str, Callable[[HTTPScope], bool]] = {}
    """Predicates, by path that the gateway or another dialect also has: whether a request belongs to this dialect."""


def load(names: Iterable[str]) -> list[Dialect]:
    """Return the dialects of these names."""
    return [import_module(f"app.api.dialects.{name}").DIALECT for name in names]


def error_writer(dialects: Sequence[Dialect]) -> WriteError:
    """Return a function that encodes a problem in the format of the request's dialect, or in the gateway's own format."""
    by_name = {dialect.name: dialect for dialect in dialects}

    def write(problem: Problem, scope: Scope) -> tuple[int, str, bytes]:
        dialect = by_name.get(scope["path"].removeprefix("/").partition("/")[0])
        if dialect is None:
            return problems.write(problem)
        problem = msgspec.structs.replace(problem, status=dialect.statuses.get(problem.status, problem.status))
        return problem.status, JSON, msgspec.json.encode(dialect.write_error(problem))

    return write


class OptionsByModel(DetectOptions):
    """Options of a detection whose task is that of the model; `task` only chooses the default model."""

    __slots__ = ()
    tasks: ClassVar[Container[Task]] = HEADS

    def reader(self, spec: ModelSpec) -> Reader[Detections]:
        """Return the reader of detections; errors are those of `DetectOptions.reader`."""
        task = spec.head.task if spec.head.task in self.tasks else DetectionHead.task  # which it will be found not to have
        return DetectOptions.reader(self._replace(task=task), spec)


class DialectParameters(ModelParameters, frozen=True, kw_only=True):
    """Parameters of every dialect. Unknown parameters are ignored."""

    ignores_unknown: ClassVar[bool] = True
    api_key: Annotated[str | None, Meta(description="The API key, if no header has it.")] = None


def by_json(describe: Callable[[ResponseInput[Any]], object]) -> Respond:
    """Respond with the JSON of what `describe` returns."""

    async def respond(given: ResponseInput[Any]) -> ASGIResponse:
        return await respond_json(partial(describe, given), given.found, given.pipeline, given.call)

    return respond


async def answer_each(  # noqa: PLR0913, PLR0917 - the parts of a dialect's request
    request: AnyRequest,
    worker: WorkerResources,
    pipeline: Pipeline,
    kind: type[P],
    parse: Callable[[bytes, str, type[P]], ParsedBatch],
    respond: Callable[[ImagesAnswer[Any, Any], P, CallContext], Awaitable[ASGIResponse]],
    asking: Asking[Any, Any] = MODEL,
) -> ASGIResponse:
    """Answer a request as `/detect/batch` does; one with a single image as `/detect` does, with the error of the image."""

    async def keep(_: int, found: Any) -> Any:  # noqa: ANN401 - of any task
        if isinstance(found, Detections):
            memory.add(sum(len(mask.encoded or b"") + sum(part.nbytes for part in mask.parts) for mask in found.masks or ()))
        return found

    async with Receiving(request, worker, kind, parse) as (context, content, wanted, call):
        images = content.images
        refuse_large(images, worker.deployment.body_limits.max_bytes)
        answer: ImagesAnswer[Any, Any] = ImagesAnswer(content.names, keep, context, worker.metrics)
        is_single = len(images) == 1
        with pipeline.admission.memory.reserve(call.caller, "the masks of these images") as memory:
            try:
                if is_single and isinstance(images[0], bytes):
                    await answer.keep(0, await asking.ask(worker, pipeline, images[0], wanted, call))
                else:
                    await answer.run(await open_batch(worker, pipeline, images, wanted, call, asking))
                    if is_single:
                        answer.all()
            finally:
                context.log_fields |= pipeline.log_fields(split_reference(asking.first(worker, wanted))[0])
            answer.log()
            return await respond(answer, wanted, call)


async def detectors(
    request: AnyRequest, worker: WorkerResources, pipeline: Pipeline, tasks: Container[Task] = ("detection",)
) -> list[ModelSpec]:
    """Return the available models with these tasks, sorted by name, after checking the caller's key."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    states = await pipeline.tritons.list_models()
    specs = []
    for name in sorted(name for name, state in states.items() if state.is_ready):
        with suppress(GatewayError):  # it cannot be used; `/models` reports the reason
            specs.append(await pipeline.spec(name))
    return [spec for spec in specs if spec.head.task in tasks]
