"""Tritons that answer wrongly are found by the golden picture, and nobody else is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.errors import CircuitOpen
from app.pipeline.examiner import Examiner
from app.triton.status import WrongAnswer
from tests.fakes.triton import CONFIG, FakeTriton, config_with, infer_response
from tests.pipeline.conftest import FAILED, FULL, RESTRICTED
from tests.support import eventually
from tests.world import World

RIGHT = np.array([[2, 2, 12, 22, 0.9, 0], [20, 10, 30, 30, 0.7, 1]], np.float32)
MOVED = RIGHT * [2, 2, 2, 2, 1, 1]
ZEROS = RIGHT * 0


class OneModel(FakeTriton):
    """Has `tiny` only, and answers as it is well; tests set the attributes."""

    knows_picture = True

    def __init__(self) -> None:
        super().__init__()
        self.index = [("tiny", "1", "READY", "")]
        self.rows: Any = [RIGHT]
        """Answers in turn, as of several instances."""
        self.is_restricted = False

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.model_name == "hanging":
            await asyncio.Event().wait()
        self.answer = infer_response(output0=np.asarray(self.rows[len(self.requests) % len(self.rows)], np.float32))
        return await super().ModelInfer(request, context)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.is_restricted:
            await context.abort(*RESTRICTED)
        return await super().ModelStatistics(request, context)

    @property
    def questions(self) -> int:
        return sum(request.id == "golden" for request in self.requests)


class Examined:
    def __init__(self, world: World) -> None:
        assert isinstance(world.fake, OneModel)
        self.world, self.fake = world, world.fake
        batcher: Any = world.batchers.default_factory
        self.examiner: Examiner = batcher.args[0].examiner

    async def asked(self, seconds: int) -> int:
        """Let time pass; return how often the first Triton was asked meanwhile."""
        before = self.fake.questions
        for step in [5] * (seconds // 5) + [1] * (seconds % 5):
            await self.world.time.skip(step)
            await self.settle()
        return self.fake.questions - before

    async def settle(self) -> None:
        await eventually(lambda: all(task.done() for task in self.examiner.tasks.values()))
        await self.world.round_trip()

    @property
    def wrong(self) -> list[bool]:
        return [server.is_wrong("tiny") for server in self.world.pool.servers]


pytestmark = pytest.mark.world(OneModel, mode="inline", max_calls=10)


@pytest.fixture
async def examined(world: World) -> AsyncIterator[Examined]:
    await world.until_known()
    made = Examined(world)
    running = asyncio.create_task(made.examiner.run(lambda: {"tiny"}))
    await asyncio.sleep(0)
    await made.settle()
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_default_model_is_asked_at_its_start_and_every_minute(examined: Examined) -> None:
    """The first answer, which was the same twice, is what later ones are compared with. A single wrong one decides nothing."""
    assert examined.fake.questions == 2
    assert await examined.asked(30) == 0  # real time passes, too
    assert await examined.asked(35) == 1
    examined.fake.next_refusals = [FAILED, None]
    assert await examined.asked(61) == 2
    examined.fake.refusal = FULL  # which says nothing of the model
    await examined.asked(61)
    assert examined.wrong == [False]


@pytest.mark.parametrize(("rows", "is_restricted"), [(ZEROS, True), (MOVED, False)])
async def test_wrong_answer_leaves_the_model_out_until_two_are_right(
    examined: Examined, rows: np.ndarray, *, is_restricted: bool
) -> None:
    """Also of a Triton that does not tell its statistics."""
    examined.fake.is_restricted = is_restricted
    examined.fake.rows = [rows]
    await examined.asked(61)
    assert examined.wrong == [True]
    with pytest.raises(CircuitOpen, match="answers wrongly"):
        examined.world.pipeline.check_circuit("tiny")
    assert any([await examined.asked(1) for _ in range(20)])  # a question is several RPCs, which take real time
    assert examined.wrong == [True]
    examined.fake.rows = [RIGHT]
    questions = examined.fake.questions
    for _ in range(20):
        if examined.wrong[0]:
            await examined.asked(1)

    assert examined.wrong == [False]
    assert examined.fake.questions >= questions + 2
    await examined.world.infer()


@pytest.mark.parametrize("change", ["version", "count of inferences", "varies"])
async def test_another_answer_of_another_model_is_not_wrong(examined: Examined, change: str) -> None:
    """Only Triton's count, which begins anew, tells that a model that `add` has not made was loaded again."""
    fake = examined.fake
    if change == "version":
        fake.model_versions = ["1", "2"]
    elif change == "count of inferences":
        fake.statistics.model_stats.add(name="tiny", version="1", inference_count=100)
        await examined.asked(61)
        fake.statistics.model_stats[0].inference_count = 7
    else:
        fake.config = config_with(licence="another config")
        fake.rows = [RIGHT, MOVED]
        await examined.world.server.specs.read("tiny")
        await examined.asked(70)
    fake.rows = [MOVED]
    await examined.asked(130)

    assert examined.wrong == [False]


async def test_answer_under_way_of_a_wrong_model_is_nobodys(examined: Examined) -> None:
    examined.world.hold()
    (asking,) = await examined.world.start()
    examined.world.server.model("tiny").circuit.open_for_wrong_answers("zeros")  # type: ignore[union-attr]
    examined.world.let_answer()

    with pytest.raises(WrongAnswer):
        await asking


class TwoInstances(OneModel):
    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG | {"instance_group": [{"name": "cpu", "kind": "KIND_CPU", "count": 2}]}


@pytest.mark.world(TwoInstances, mode="inline", max_calls=10)
async def test_model_with_one_sick_instance_is_left_out(examined: Examined) -> None:
    examined.fake.rows = [ZEROS, RIGHT]
    await examined.asked(125)
    assert examined.wrong == [True]
    await examined.asked(30)

    assert examined.wrong == [True]
