"""The second model of a route: it is asked about a share of the images once their answers have left, and the answers compared."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from app.errors import GatewayError, GatewayFull
from app.model.reference import refer_to, split_reference
from app.pipeline.call import CallContext, DetectOptions, Question
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import TaskResult
from app.resilience.deadline import Deadline
from app.resilience.fairness import SHADOW, Caller
from app.resilience.memory import Reservation
from app.routing.comparison import Comparison, compare
from app.routing.kept import keep_picture
from app.routing.route import Route, Shadow, is_in_share
from app.telemetry.metrics import ANSWERS, Metrics
from app.telemetry.timing import Timing

LOG = structlog.get_logger()

# With a share of its own, it takes no place of requests. No API key has such a name.
_CALLER = Caller("shadow of a route", 0.5, has_share=True, priority=SHADOW)
_MAX_WAITING = 64  # in one worker


class _Image(NamedTuple):
    """An image and its answer; `call` is that of the second model, `infer_ms` the time of the first one, None if cached."""

    route: str
    shadow: Shadow
    data: bytes
    question: Question[Any]
    found: TaskResult
    infer_ms: float | None
    call: CallContext


class Shadows:
    """Asks the second models of routes, in one worker."""

    def __init__(self, pipeline: Pipeline, metrics: Metrics) -> None:
        self._pipeline, self._metrics = pipeline, metrics
        self._offered = Counter[str]()
        """Number of images by route."""
        # One at a time: with four, requests take 1.3 instead of 1.1 times as long (bench/results).
        self._turn = asyncio.Lock()
        self._waiting = 0
        """Number of images that are kept."""
        self._tasks = set[asyncio.Task[None]]()

    def offer(  # noqa: PLR0913, PLR0917 - the parts of an answered request
        self,
        name: str,
        route: Route,
        data: bytes,
        question: Question[Any],
        call: CallContext,
        found: Any,  # noqa: ANN401 - a TaskResult
    ) -> None:
        """Ask the second model of a route, after the answer has left, if the image belongs to the share.

        The file is kept until then, unless half of the memory for images is in use.
        """
        shadow = route.shadow
        if shadow is None:
            return
        self._offered[name] += 1
        if not is_in_share(self._offered[name], shadow.share):
            return
        budget = self._pipeline.admission.memory
        memory = budget.reserve(_CALLER)
        with suppress(GatewayFull):
            memory.add(len(data))
        if not memory.nbytes or 2 * budget.used_bytes > budget.limit_bytes or self._waiting >= _MAX_WAITING:
            memory.release()
            self._metrics.shadow_images.add(1, name, shadow.to, "dropped")
            return
        self._waiting += 1
        if isinstance(question, DetectOptions):  # only boxes are compared
            question, found = question._replace(masks="none"), found._replace(masks=None)
        own = CallContext(
            call.deadline,
            Timing(),
            f"{call.request_id}-shadow",
            _CALLER,
            is_batch=True,
            allows_truncated=call.allows_truncated,
            is_pinned=":" in shadow.to,
            uses_cache=False,
        )
        image = _Image(name, shadow, data, question, found, call.timing.stages.get("infer"), own)
        begin = partial(self._begin, image, memory)
        if call.after_answer is None:
            begin()
        else:
            call.after_answer.append(begin)

    async def close(self) -> None:
        """Cancel what is under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _begin(self, image: _Image, memory: Reservation) -> None:
        call = image.call._replace(deadline=Deadline.after(self._pipeline.limits.timeout_seconds))
        task = asyncio.create_task(self._run(image._replace(call=call)))
        self._tasks.add(task)
        task.add_done_callback(partial(self._end, memory))

    def _end(self, memory: Reservation, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._waiting -= 1
        memory.release()

    async def _run(self, image: _Image) -> None:
        route, model, result = image.route, image.shadow.to, "failed"
        try:
            async with self._turn:
                await self._ask(image)
            result = "compared"
        except GatewayFull:
            result = "dropped"
        except GatewayError as error:
            LOG.warning("a shadow failed", route=route, model=model, code=error.code, detail=error.detail)
        except Exception:
            LOG.exception("a shadow failed", route=route, model=model)
        self._metrics.shadow_images.add(1, route, model, result)

    async def _ask(self, image: _Image) -> None:
        """Ask the second model, compare and count, unless the gateway has other work; errors are those of `Pipeline.run`."""
        pipeline, call = self._pipeline, image.call
        if call.deadline.remaining <= 0 or not pipeline.admission.is_half_free():
            raise GatewayFull("the gateway has other work")
        model = pipeline.refer_to(*split_reference(image.shadow.to))
        second: TaskResult = await pipeline.run_model(model, image.data, image.question, call)
        # In a thread, because it takes milliseconds for hundreds of boxes.
        comparison = await pipeline.threads.run(partial(self._compare, image, second), call.deadline, turn=call.turn())
        self._count(image, second, comparison)

    def _compare(self, image: _Image, second: TaskResult) -> Comparison:
        """Compare, and keep a picture if the operator has named a folder for it."""
        found, folder = compare(image.found, second), image.shadow.keep
        if folder:
            try:
                with self._pipeline.admission.memory.reserve(_CALLER) as memory:
                    limits, name = self._pipeline.limits.pixels, f"{image.route} {found.agreement:.4f}"
                    keep_picture(Path(folder), name, image.data, (image.found, second), limits, memory.add)
            except (GatewayError, OSError) as error:
                LOG.warning("a picture was not kept", route=image.route, folder=folder, detail=str(error))
        return found

    def _count(self, image: _Image, second: TaskResult, found: Comparison) -> None:
        metrics = self._metrics
        against, model = (refer_to(each.spec.name, each.version) for each in (image.found, second))
        pair = image.route, model, against
        matched = Counter(label for label, _, _ in found.matches)
        for result, boxes in (("matched", matched), ("missing", found.missing), ("additional", found.additional)):
            for label, number in boxes.items():
                metrics.shadow_boxes.add(number, *pair, metrics.class_label(*pair, label), result)
        for name, iou, scores in found.matches:
            label = metrics.class_label(*pair, name)
            metrics.shadow_iou.observe(iou, *pair, label)
            for answer, score in zip(ANSWERS, scores, strict=True):
                metrics.shadow_score.observe(score, *pair, label, answer)
        for answer, milliseconds in zip(ANSWERS, (image.infer_ms, image.call.timing.stages["infer"]), strict=True):
            if milliseconds is not None:
                metrics.shadow_seconds.observe(milliseconds / 1e3, *pair, answer)
