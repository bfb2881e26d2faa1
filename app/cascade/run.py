"""Run a cascade on an image: decode it once, ask the models of the steps, and collect what they answer."""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from copy import copy
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import structlog

from app.cascade.crops import cut_boxes, find_parts, place
from app.cascade.definition import MAX_CROPS, Cascade, Step
from app.errors import GatewayError, InferenceFailed, UnknownModel, UnsupportedModel
from app.imaging.patch import Patch
from app.model.heads import DetectionHead, TextDetectionHead
from app.model.reference import split_reference
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.call import CallContext, Question, question_for
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Classifications, StepResult
from app.resilience.deadline import Deadline
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

# Crops of a step that are under way at a time, at most: two large batches.
_MAX_AT_ONCE = 64
# From which on a part counts as upside down, as in RapidOCR. Source: TextClassifier in rapidocr/ch_ppocr_cls/main.py.
_CERTAIN = 0.9
_UPSIDE_DOWN = "180"

LOG = structlog.get_logger()


class StepAnswer(NamedTuple):
    """What a step has answered."""

    results: Sequence[StepResult] = ()
    """Of a step about the whole image the only one; of others one for each crop. Coordinates are in pixels of the whole image."""
    objects: Sequence[int] = ()
    """For each result the index of its object among those of the step `of`, ascending; empty for a step about the whole image.
    If that step is itself about crops, the objects of all its results count, one after the other."""
    error: GatewayError | None = None
    """Why there are no results: of this step, or of one that it needs."""


class CascadeAnswer(NamedTuple):
    """What a cascade has answered about an image."""

    width: int
    height: int
    """Size of the upright image, pixels."""
    steps: dict[str, StepAnswer]
    """By name, in the order of the definition."""
    truncated: bool
    """Whether there were more objects than could be cropped."""

    def require(self, name: str) -> StepAnswer:
        """Return the answer of a step; raise its error if it has one."""
        answer = self.steps[name]
        if answer.error is not None:
            raise copy(answer.error)  # the traceback of what is raised refers to frames that refer to this answer
        return answer


async def run_cascade(  # noqa: PLR0913 - the parts of a request
    pipeline: Pipeline,
    cascade: Cascade,
    image: bytes,
    call: CallContext,
    metrics: Metrics,
    *,
    question: Question[Any] | None = None,
    patch: Patch | None = None,
    hurried: Collection[str] = (),
) -> CascadeAnswer:
    """Ask the models of a cascade about an encoded image, or one that is decoded already, as `patch`.

    A step that fails does not keep others from answering, unless they need it; this fails if all about the whole image do.
    `question` is that of the first one, if it is not what the definition says. `hurried` steps have half of the time that is left.
    """
    call.timing.lap("model")
    # A route answers about all parts of an image by the same model.
    call = call._replace(route_key=call.route_key or call.request_id, stream="")
    async with pipeline.decoded(image, call) if patch is None else nullcontext(patch) as decoded:
        call.timing.begin("infer")
        run = _Run(pipeline, cascade, image, decoded, call, metrics)
        run.question, run.hurried = question, hurried
        async with asyncio.TaskGroup() as group:
            for name in cascade.steps:
                run.tasks[name] = group.create_task(run.answer(name))
        height, width = decoded.image.shape[:2]
    answers = {name: task.result() for name, task in run.tasks.items()}
    first = [answers[name] for name, step in cascade.steps.items() if step.of is None]
    if first[0].error is not None and all(answer.error is not None for answer in first):
        raise copy(first[0].error)
    call.timing.lap("infer")
    return CascadeAnswer(width, height, answers, run.truncated)


class _Run:
    def __init__(  # noqa: PLR0913, PLR0917 - those of `run_cascade`, and the decoded image
        self, pipeline: Pipeline, cascade: Cascade, image: bytes, decoded: Patch, call: CallContext, metrics: Metrics
    ) -> None:
        self.tasks: dict[str, asyncio.Task[StepAnswer]] = {}
        """Steps by name. Those that need others wait for them."""
        self.truncated = False
        self.question: Question[Any] | None = None
        """That of the first step, if it is not what the definition says."""
        self.hurried: Collection[str] = ()
        self._pipeline, self._cascade, self._call, self._metrics = pipeline, cascade, call, metrics
        self._image, self._decoded = image, decoded
        self._parts: set[tuple[str | None, str, float, int]] = set()
        """The parts of the image that are cropped, each once, however many steps are about it."""

    async def answer(self, name: str) -> StepAnswer:
        step = self._cascade.steps[name]
        needed = [await self.tasks[other] for other in (step.of, step.turned_by) if other is not None]
        for answer in needed:
            if answer.error is not None:
                return answer
        began, call = perf_counter(), self._call._replace(request_id=f"{self._call.request_id}-{name}")
        if name in self.hurried:
            call = call._replace(deadline=Deadline.after(call.deadline.remaining / 2))
        try:
            return await self._ask(step, call, *needed)
        except GatewayError as error:
            failure = error
        except Exception:
            LOG.exception("a step of a cascade failed unexpectedly", cascade=self._cascade.name, step=name)
            failure = InferenceFailed(f"the step {name} failed unexpectedly")
        finally:
            self._metrics.step_seconds.observe(self._call.timing.end_step(name, began) / 1e3, self._cascade.name, name)
        # A model that is not there is missing for each image, and the answers say so.
        log = LOG.debug if isinstance(failure, UnknownModel) else LOG.warning
        log("a step of a cascade failed", cascade=self._cascade.name, step=name, model=step.model, code=failure.code)
        failure.__cause__ = failure.__context__ = failure.__traceback__ = None  # their frames refer to the image
        return StepAnswer(error=failure)

    async def _ask(
        self, step: Step, call: CallContext, found: StepAnswer | None = None, turning: StepAnswer | None = None
    ) -> StepAnswer:
        pipeline = self._pipeline
        name, version = split_reference(step.model)
        spec = await pipeline.prepare(pipeline.refer_to(name, version), call.deadline, call.caller)
        is_first = step is next(iter(self._cascade.steps.values()))
        asked = question_for(spec, step.confidence, top_k=step.top_k, model=name, version=int(version) if version else None)
        question = (is_first and self.question) or asked
        if found is None:
            # Who decodes files itself is asked about the file.
            data = self._image if spec.input_format is InputFormat.FILE else self._decoded
            return StepAnswer([await pipeline.run(data, question, call._replace(timing=Timing()))])
        is_turned = step.crop != "box" or step.turned_by is not None
        if is_turned and isinstance(spec.head, DetectionHead | TextDetectionHead):
            raise UnsupportedModel(f"{spec.name} finds objects, whose place is unknown in crops that are turned or straightened")
        parts = self._crop(step, spec, found)
        for index in parts.keys() & _upside_down(turning):
            parts[index] = parts[index]._replace(half_turn=True)
        return StepAnswer(await ask_about_each(pipeline, list(parts.values()), spec, question, call), list(parts))

    def _crop(self, step: Step, spec: ModelSpec, found: StepAnswer) -> dict[int, Patch]:
        parts = find_parts(self._decoded, found.results, step, spec)
        chosen: dict[int, Patch] = {}
        for index in np.argsort([-rank for rank, _ in parts], kind="stable").tolist():
            if (part := parts[index][1]) is None:
                continue
            key = step.of, step.crop, step.margin, index
            if len(self._parts) >= MAX_CROPS and key not in self._parts:
                self.truncated = True  # others may have been cropped for a step with another order
                continue
            if len(chosen) >= step.max_crops:
                self.truncated = True
                break
            self._parts.add(key)
            chosen[index] = part
        return dict(sorted(chosen.items()))


async def ask_about_boxes(
    pipeline: Pipeline, image: bytes, boxes: Sequence[Sequence[float]], question: Question[Any], call: CallContext
) -> tuple[int, int, list[StepResult]]:
    """Ask about the part of an image in each box, x1 y1 x2 y2 as fractions of it; return its width and height, and the answers."""
    call = call._replace(route_key=call.route_key or call.request_id, stream="")  # as for a cascade
    name = question.model or pipeline.default_for(question.task)
    spec = await pipeline.prepare(pipeline.refer_to(name, question.version), call.deadline, call.caller)
    question.reader(spec)  # rejects another task before the image is decoded
    async with pipeline.decoded(image, call) as decoded:
        results = await ask_about_each(pipeline, cut_boxes(decoded, boxes), spec, question, call)
        height, width = decoded.image.shape[:2]
    call.timing.lap("infer")
    return width, height, results


async def ask_about_each(
    pipeline: Pipeline, parts: Sequence[Patch], spec: ModelSpec, question: Question[Any], call: CallContext
) -> list[StepResult]:
    """Ask about parts of an image, so many at a time that they fill batches, and leave half of the places to others.

    Errors are those of `Pipeline.run`; coordinates are in pixels of the whole image.
    """
    results: list[Any] = [None] * len(parts)
    left = iter(enumerate(parts))

    async def ask() -> None:
        for index, part in left:
            own = call._replace(is_later_step=True, timing=Timing())
            results[index] = place(await pipeline.run(part, question, own), part)

    parallel = pipeline.tritons.parallel_images(spec)
    places = pipeline.admission.limit(spec.name, parallel) // 2
    tasks = [asyncio.create_task(ask()) for _ in range(max(1, min(len(parts), places, 2 * parallel, _MAX_AT_ONCE)))]
    try:
        await asyncio.gather(*tasks)  # a task group's error would refer to itself, and so keep the image
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return results


def _upside_down(turning: StepAnswer | None) -> set[int]:
    if turning is None:
        return set()
    found = set()
    for index, result in zip(turning.objects, turning.results, strict=True):
        if not isinstance(result, Classifications):
            raise UnsupportedModel(f"{result.spec.name} does not tell which objects are upside down: it is no classifier")
        if len(result.scores) and result.scores[0] >= _CERTAIN and result.spec.class_name(int(result.class_ids[0])) == _UPSIDE_DOWN:
            found.add(index)
    return found
