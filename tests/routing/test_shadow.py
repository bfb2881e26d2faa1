"""The second model of a route gets a share of the images after their answers have left, and disturbs no request."""

import asyncio
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.worker_table import WorkerTable
from app.routing import shadow as shadow_module
from app.routing.canary import CanaryWatch
from app.routing.comparison import Comparison, compare
from app.routing.route import Route, Shadow
from app.routing.router import Router
from app.routing.shadow import Shadows
from app.telemetry.metrics import Metrics, render
from app.telemetry.timing import Timing
from tests.fakes.triton import FakeTriton, infer_response
from tests.scrape import read_samples
from tests.support import LIMITS, SCENE, captured_log, eventually, in_cycles
from tests.world import World, open_world

NEAR = [0, 8, 16, 20, 0.5, 1]
FIRST, SECOND = [[0, 8, 16, 24, 0.75, 1], [20, 12, 30, 22, 0.5, 0]], [NEAR, [2, 12, 12, 22, 0.5, 0]]
OPTIONS = DetectOptions("door", 0.25, None, 100)


class TwoModels(FakeTriton):
    """Has `tiny`, and `big`, which answers once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = {"tiny": FIRST, "big": SECOND}
        self.fails = False
        """Whether `big` does."""

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.requests.append(request)
        if request.model_name == "big":
            self.running += 1
            self.most_running = max(self.running, self.most_running)
            try:
                await self.may_answer.wait()
            finally:
                self.running -= 1
            if self.fails:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        answer = infer_response(output0=np.array(self.boxes[request.model_name], np.float32))
        answer.model_version = "1"
        return answer


class Door:
    """A route to `tiny` whose shadow is `big`."""

    def __init__(self, world: World, triton: TwoModels, table: WorkerTable, share: float = 1.0, keep: str = "") -> None:
        self.world, self.triton = world, triton
        self.metrics = Metrics(table, "0")
        self.shadows = Shadows(world.pipeline, self.metrics)
        routes: Any = SimpleNamespace(known={"door": Route("tiny", shadow=Shadow("big", share, keep))})
        world.pipeline.router = Router(routes, world.pipeline, self.metrics, CanaryWatch(routes, self.metrics), self.shadows)

    async def ask(self, data: bytes = SCENE, after: list[Callable[[], object]] | None = None) -> Detections:
        return await self.world.pipeline.run(data, OPTIONS, CallContext(Deadline.after(30), Timing(), "abc", after_answer=after))

    @property
    def asked(self) -> int:
        """How often `big` was."""
        return sum(request.model_name == "big" for request in self.triton.requests)

    @property
    def results(self) -> dict[str, int]:
        return {key.split('"')[3]: int(value) for key, value in self.read("api_shadow_images_total").items()}

    def read(self, metric: str) -> dict[str, float]:
        """Return the values of a metric by the labels that are not always the same."""
        found = read_samples(render(self.metrics.collect(), "")[0].decode())
        rest = ('against="tiny:1",', 'model="big:1",', ',route="door"', 'route="door",')
        values = {}
        for name, value in found.items():
            if name.startswith(f"{metric}{{"):
                for part in rest:
                    name = name.replace(part, "")  # noqa: PLW2901
                values[name.removeprefix(metric)] = value
        return values

    async def until(self, **results: int) -> None:
        """Wait for these results of shadows, after which they hold nothing."""
        await eventually(lambda: self.results == results)
        await eventually(lambda: self.world.used_bytes == 0)


@pytest.fixture
def triton() -> TwoModels:
    return TwoModels()


@pytest.fixture
async def world(triton: TwoModels) -> AsyncIterator[World]:
    async with open_world(triton, mode="inline") as made:
        yield made


@pytest.fixture
async def door(world: World, triton: TwoModels, table: WorkerTable) -> AsyncIterator[Door]:
    made = Door(world, triton, table)
    yield made
    triton.may_answer.set()
    await made.shadows.close()


async def test_the_second_model_is_asked_after_the_answer(door: Door) -> None:
    after: list[Callable[[], object]] = []
    found = await door.ask(after=after)
    await door.world.round_trip()

    assert found.scores.tolist() == [0.75, 0.5]
    assert door.asked == 0
    assert door.world.used_bytes == len(SCENE)
    (begin,) = after
    begin()
    await door.until(compared=1)
    assert door.asked == 1


async def test_the_answers_are_compared_in_metrics(door: Door) -> None:
    await door.ask()
    await door.until(compared=1)

    assert door.read("api_shadow_boxes_total") == {
        '{class="1",result="matched"}': 1,
        '{class="0",result="missing"}': 1,
        '{class="0",result="additional"}': 1,
    }
    assert door.read("api_shadow_iou_sum") == {'{class="1"}': 0.75}
    assert door.read("api_shadow_score_sum") == {'{answer="given",class="1"}': 0.75, '{answer="shadow",class="1"}': 0.5}
    assert door.read("api_shadow_infer_seconds_count") == {'{answer="given"}': 1, '{answer="shadow"}': 1}


async def test_the_share_is_exact(world: World, triton: TwoModels, table: WorkerTable) -> None:
    door = Door(world, triton, table, share=0.29)
    for _ in range(20):
        await door.ask()
    await door.until(compared=5)


async def test_images_of_batches_are_compared(door: Door) -> None:
    after: list[Callable[[], object]] = []
    call = CallContext(Deadline.after(30), Timing(), "abc", after_answer=after)
    batch = await BatchRequest.open(door.world.pipeline, [SCENE, b"junk", SCENE], OPTIONS, call)
    async with batch.run(lambda _, found, __: asyncio.sleep(0, found)) as done:
        kinds = [type(await image).__name__ for image in done]

    assert sorted(kinds) == ["Detections", "Detections", "UnsupportedFormat"]
    assert (len(after), door.asked) == (2, 0)
    for begin in after:
        begin()
    await door.until(compared=2)


async def test_durations_of_a_shadow_set_no_limit(door: Door) -> None:
    """A shadow waits for all else."""
    await door.ask()
    await door.until(compared=1)

    paces = {name: queue.pace() for name, queue in door.world.admission.queues.items()}
    assert paces["tiny"] > 0 == paces["big"]


async def test_shadow_is_dropped_while_the_gateway_fills(door: Door) -> None:
    await door.ask()
    await door.until(compared=1)
    queue = door.world.queue
    permits = [await door.world.admit() for _ in range(int(queue.limit) // 2)]
    await door.ask()
    await door.until(compared=1, dropped=1)
    for permit in permits:
        permit.release()
    await door.ask()
    await door.until(compared=2, dropped=1)


async def test_shadow_is_dropped_while_memory_is_needed(door: Door) -> None:
    budget = door.world.admission.memory
    with budget.reserve(ANYBODY) as memory:
        memory.add(budget.limit_bytes // 2)
        await door.ask()
        assert door.results == {"dropped": 1}
        assert budget.used_bytes == memory.nbytes
    assert door.asked == 0


async def test_a_failing_model_is_counted(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, shadow_module)
    door.triton.fails = True
    found = await door.ask()
    await door.until(failed=1)

    assert len(found.scores) == 2
    (line,) = log
    assert (line.method_name, line.kwargs["route"], line.kwargs["model"]) == ("warning", "door", "big")
    assert line.kwargs["code"] == "inference_failed"


async def test_a_failure_leaves_nothing_behind(door: Door) -> None:
    """The image is freed at once, not when the garbage collector finds its error."""
    door.triton.fails = True
    with in_cycles(Detections) as kept:
        await door.ask()
        await door.until(failed=1)

    assert kept == []


async def test_a_defect_is_counted_too(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, shadow_module)
    monkeypatch.setattr(shadow_module, "compare", lambda *_: 1 / 0)
    await door.ask()
    await door.until(failed=1)

    assert [line.method_name for line in log] == ["exception"]


async def test_few_images_wait_for_their_answers_to_leave(door: Door) -> None:
    after: list[Callable[[], object]] = []
    for _ in range(70):
        await door.ask(after=after)
    assert door.results == {"dropped": 6}
    assert door.world.used_bytes == 64 * len(SCENE)
    for begin in after:
        begin()

    await door.until(dropped=6, compared=64)


async def test_single_shadow_is_under_way_while_up_to_63_wait(door: Door) -> None:
    door.triton.may_answer.clear()
    for _ in range(70):
        await door.ask()
    await eventually(lambda: door.triton.running == 1)
    await door.world.round_trip()

    assert door.triton.most_running == 1
    assert door.results == {"dropped": 6}
    await door.world.time.skip(LIMITS.timeout_seconds)
    await eventually(lambda: door.results == {"dropped": 69, "failed": 1})
    door.triton.may_answer.set()  # Triton may use what it has got until it answers
    await door.until(dropped=69, failed=1)


async def test_shadows_end_with_the_worker(door: Door) -> None:
    door.triton.may_answer.clear()
    await door.ask()
    await eventually(lambda: door.triton.running == 1)
    await door.shadows.close()

    door.triton.may_answer.set()
    await eventually(lambda: door.world.used_bytes == 0)
    assert door.results == {}


async def test_the_pictures_that_differ_most_are_kept(world: World, triton: TwoModels, table: WorkerTable, tmp_path: Path) -> None:
    door = Door(world, triton, table, keep=str(tmp_path))
    (tmp_path / "other 0.0000 x.jpg").touch()
    nothing: list[float] = [0] * 6
    half = [NEAR, nothing]
    for boxes in [FIRST, *[SECOND] * 9, half, [nothing, nothing], half]:
        triton.boxes["big"] = boxes
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


async def test_masks_are_not_kept(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take far more memory than boxes, and are not compared."""
    kept: list[object] = []

    def note(*answers: Any) -> Comparison:  # noqa: ANN401
        kept.extend(each.masks for each in answers)
        return compare(*answers)

    monkeypatch.setattr(shadow_module, "compare", note)
    masks: Any = [[(0, 0), (8, 0), (8, 8)]]
    found = (await door.ask())._replace(masks=masks)
    call = CallContext(Deadline.after(30), Timing(), "abc")
    door.shadows.offer("door", Route("tiny", shadow=Shadow("big", 1.0)), SCENE, OPTIONS, call, found)
    await door.until(compared=2)

    assert kept == [None] * 4


async def test_a_picture_that_cannot_be_kept_changes_nothing_else(
    world: World, triton: TwoModels, table: WorkerTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, shadow_module)
    door = Door(world, triton, table, keep=str(tmp_path / "missing"))
    await door.ask()
    await door.until(compared=1)

    assert [line.kwargs["route"] for line in log] == ["door"]


async def test_an_unfinished_picture_is_removed(
    world: World, triton: TwoModels, table: WorkerTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    door = Door(world, triton, table, keep=str(tmp_path))
    await door.ask()
    await door.until(compared=1)

    assert not list(tmp_path.iterdir())  # noqa: ASYNC240
