"""The second model of a route gets a share of the images after their answers have left, and its answers are compared."""

import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Classifications, Detections, Embedding, TaskResult
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.worker_table import WorkerTable
from app.routing.canary import CanaryWatch
from app.routing.comparison import compare
from app.routing.route import Route, Shadow
from app.routing.router import Router
from app.routing.shadow import Shadows
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.support import LIMITS, SCENE, eventually, in_cycles
from tests.world import World, open_world

NEAR = [0, 8, 16, 20, 0.5, 1]
FIRST, SECOND = [[0, 8, 16, 24, 0.75, 1], [20, 12, 30, 22, 0.5, 0]], [NEAR, [2, 12, 12, 22, 0.5, 0]]
OPTIONS = DetectOptions("door", 0.25, None, 100)


class TwoModels(FakeTriton):
    def __init__(self) -> None:
        super().__init__()
        self.boxes = {"tiny": FIRST, "big": SECOND}
        self.held = {"abc-shadow"}

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        await super().ModelInfer(request, context)
        answer = infer_response(output0=np.array(self.boxes[request.model_name], np.float32))
        answer.model_version = "1"
        return answer


class Door:
    def __init__(self, world: World, triton: TwoModels, table: WorkerTable) -> None:
        self.world, self.triton = world, triton
        self.metrics = Metrics(table, "0")
        self.shadows = Shadows(world.pipeline, self.metrics)
        self._known: dict[str, Route] = {}
        self.put(Shadow("big", 1.0))
        routes: Any = SimpleNamespace(known=self._known)
        world.pipeline.router = Router(routes, world.pipeline, self.metrics, CanaryWatch(routes, self.metrics), self.shadows)

    def put(self, shadow: Shadow) -> None:
        self._known["door"] = Route("tiny", shadow=shadow)

    async def ask(self, after: list[Callable[[], object]] | None = None) -> Detections:
        return await self.world.pipeline.run(SCENE, OPTIONS, CallContext(Deadline.after(1e6), Timing(), "abc", after_answer=after))

    @property
    def asked(self) -> int:
        return sum(request.model_name == "big" for request in self.triton.requests)

    @property
    def results(self) -> dict[str, int]:
        return {result: int(images) for result, images in self.read("api_shadow_images_total").items()}

    def read(self, metric: str) -> dict[str, float]:
        """Return the values of a metric by the labels that are not always the same."""
        samples = [sample for family in self.metrics.collect() for sample in family.samples if sample.name == metric]
        labels = ("answer", "class", "result")
        return {" ".join(one.labels[name] for name in labels if name in one.labels): one.value for one in samples}

    async def until(self, **results: int) -> None:
        """Wait for these results of shadows, after which they hold nothing."""
        await eventually(lambda: self.results == results)
        await eventually(lambda: self.world.used_bytes == 0)


@pytest.fixture
async def door(table: WorkerTable) -> AsyncIterator[Door]:
    triton = TwoModels()
    async with open_world(triton, mode="inline") as world:
        made = Door(world, triton, table)
        yield made
        triton.may_answer.set()
        await made.shadows.close()


async def test_second_model_is_asked_after_the_answer_and_compared_in_metrics(door: Door) -> None:
    after: list[Callable[[], object]] = []
    found = await door.ask(after=after)
    await door.world.round_trip()
    assert found.scores.tolist() == [0.75, 0.5]
    assert (door.asked, door.world.used_bytes) == (0, len(SCENE))
    (begin,) = after
    begin()
    await door.until(compared=1)

    assert door.asked == 1
    assert door.read("api_shadow_boxes_total") == {"1 matched": 1, "0 missing": 1, "0 additional": 1}
    assert door.read("api_shadow_iou_sum") == {"1": 0.75}
    assert door.read("api_shadow_score_sum") == {"given 1": 0.75, "shadow 1": 0.5}
    assert door.read("api_shadow_infer_seconds_count") == {"given": 1, "shadow": 1}
    paces = {name: queue.pace() for name, queue in door.world.admission.queues.items()}
    assert paces["tiny"] > 0 == paces["big"]  # its durations set no limit, because it waits for all else


async def test_shadow_is_dropped_while_the_gateway_fills(door: Door) -> None:
    await door.ask()
    await door.until(compared=1)
    permits = [await door.world.admit() for _ in range(int(door.world.queue.limit) // 2)]
    await door.ask()
    await door.until(compared=1, dropped=1)
    for permit in permits:
        permit.release()
    await door.ask()
    await door.until(compared=2, dropped=1)
    budget = door.world.admission.memory
    with budget.reserve(ANYBODY) as memory:
        memory.add(budget.limit_bytes // 2)
        await door.ask()
        assert door.results == {"compared": 2, "dropped": 2}
        assert budget.used_bytes == memory.nbytes


async def test_failure_is_counted_and_leaves_nothing_behind(door: Door) -> None:
    """The image is freed at once, not when the garbage collector finds its error."""
    door.triton.next_refusals = [None, (grpc.StatusCode.INVALID_ARGUMENT, "no")]
    with in_cycles(Detections) as kept:
        found = await door.ask()
        await door.until(failed=1)
        assert len(found.scores) == 2
        del found

    assert kept == []


async def test_single_shadow_is_under_way_while_up_to_63_wait(door: Door) -> None:
    """Also for their answers to leave."""
    door.triton.may_answer.clear()
    after: list[Callable[[], object]] = []
    for _ in range(70):
        await door.ask(after=after)
    assert door.results == {"dropped": 6}
    assert door.world.used_bytes == 64 * len(SCENE)
    for begin in after:
        begin()
    await eventually(lambda: door.triton.running == 1)
    await door.world.round_trip()
    assert door.triton.most_running == 1
    await door.world.time.skip(LIMITS.timeout_seconds)
    await eventually(lambda: door.results == {"dropped": 69, "failed": 1})
    door.triton.may_answer.set()  # Triton may use what it has got until it answers
    await door.until(dropped=69, failed=1)
    await door.ask()
    await door.until(dropped=69, failed=1, compared=1)


async def test_pictures_that_differ_most_are_kept(door: Door, tmp_path: Path) -> None:
    door.put(Shadow("big", 1.0, str(tmp_path)))
    (tmp_path / "other 0.0000 x.jpg").touch()
    nothing: list[float] = [0] * 6
    half = [NEAR, nothing]
    for boxes in [FIRST, *[SECOND] * 9, half, [nothing, nothing], half]:
        door.triton.boxes["big"] = boxes
        before = sum(door.results.values())
        await door.ask()
        await door.until(compared=before + 1)

    kept = sorted(tmp_path.glob("door*"))  # noqa: ASYNC240
    assert [path.name.split()[1] for path in kept] == [*["0.0000"] * 2, *["0.3333"] * 18]
    assert [path.name.split()[3] for path in kept] == ["given.jpg", "shadow.jpg"] * 10
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in kept)
    given, shadow = (np.asarray(Image.open(path)).astype(int) for path in kept[:2])
    assert np.abs(given[16, :16] - shadow[16, :16]).max() > 64  # only the first answer has a box there
    assert (tmp_path / "other 0.0000 x.jpg").exists()


ANIMALS = msgspec.structs.replace(SPEC, labels=("cat", "dog"))
OTHERS = msgspec.structs.replace(SPEC, labels=("bird", "cat"))
Box = tuple[tuple[float, ...], float, int]
"""A box, its score and its class."""
PLACE, AWAY = (0, 0, 10, 10), (20, 20, 30, 30)
NOTHING: Box = ((5, 5, 5, 5), 0.5, 0)


def found_boxes(*boxes: Box, spec: ModelSpec = ANIMALS) -> Detections:
    places, scores, class_ids = zip(*boxes, strict=True) if boxes else ((), (), ())
    return Detections(
        np.array(places, np.float32).reshape(-1, 4), np.array(scores, np.float32), np.array(class_ids, np.int32), 40, 40, spec, "1"
    )


def classified(*class_ids: int, spec: ModelSpec = ANIMALS) -> Classifications:
    return Classifications(np.array(class_ids, np.int32), np.array([0.75, 0.25][: len(class_ids)], np.float32), 40, 40, spec, "1")


def described(*vector: float) -> Embedding:
    return Embedding(np.array(vector, np.float32), 1.0, 40, 40, ANIMALS, "1")


def test_answers_agree_by_overlap_first_class_or_cosine() -> None:
    rows: list[tuple[TaskResult, TaskResult, float]] = [
        (classified(0, 1), classified(0), 1),
        (classified(0, 1), classified(1, 0), 0),
        (classified(0), classified(1, spec=OTHERS), 1),  # by name: the same class may have another number in another model
        (described(1, 0), described(0.6, 0.8), 1),
        (described(1, 0), described(1, 0, 0), 0),
        (found_boxes((PLACE, 0.75, 0)), found_boxes((PLACE, 0.75, 1), spec=OTHERS), 1),
        (found_boxes((AWAY, 0.5, 1)), found_boxes((AWAY, 0.25, 0)), 0),
        (found_boxes(NOTHING), found_boxes(NOTHING), 0),  # boxes without area match nothing
        (found_boxes((PLACE, 0.5, 0)), found_boxes(((0, 0, 10, 5), 0.5, 0)), 1),  # from half of the union on
        (found_boxes((PLACE, 0.5, 0)), found_boxes(((0, 0, 10, 4.9), 0.5, 0)), 0),
    ]
    for first, second, agreement in rows:
        assert compare(first, second).agreement == agreement
