"""Which model of a route answers, and what happens when it fails."""

import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from app.errors import CircuitOpen, DeadlinePassed, InvalidParameter, TritonUnavailable, UnknownVersion
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.worker_table import WorkerTable
from app.routing.route import Canary, Route, Shadow
from app.routing.router import Choice, Router
from app.routing.routes import Routes
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from app.triton.status import NotLoadedYet
from tests.fakes.triton import FakeTriton, config_with, infer_response
from tests.support import SCENE, eventually
from tests.world import OPTIONS, World, open_world

NAME = "detector"
SICK = grpc.StatusCode.UNAVAILABLE, "Server is stopping"


class Versions(FakeTriton):
    """Has versions 1 to 3 of models, of which it cannot run or does not have some."""

    def __init__(self) -> None:
        super().__init__()
        self.model_versions = ["1", "2", "3"]
        self.answer = infer_response(output0=np.array([[0, 0, 8, 8, 0.75, 1], [2, 2, 6, 6, 0.5, 0]], np.float32))
        self.labels: dict[str, str] = {}
        """Labels by version; others have none."""
        self.sick: set[str] = set()
        self.missing: set[str] = set()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if {request.model_name, f"{request.model_name}:{request.model_version or 3}"} & self.sick:
            self.requests.append(request)
            await context.abort(*SICK)
        return await super().ModelInfer(request, context)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if labels := self.labels.get(request.version):
            self.config = config_with(labels=labels)
        return await super().ModelConfig(request, context)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.name in self.missing:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        return await super().ModelMetadata(request, context)

    @property
    def asked(self) -> list[str]:
        """The references of the models that were to run; the gateway may have tried each more than once."""
        requests = [request for request in self.requests if request.id != "probe"]
        asked = [f"{request.model_name}:{request.model_version or 3}" for request in requests]
        return [reference for reference, _ in itertools.groupby(asked)]


class Notes:
    """Records what canaries and shadows get."""

    def __init__(self) -> None:
        self.noted: list[tuple[bool, bool]] = []
        self.offered: list[tuple[str, bytes, object]] = []
        self.is_withdrawn = False

    def note(self, name: str, route: Route, seconds: float | None, *, is_canary: bool) -> None:
        assert (name, route.canary is not None) == (NAME, True)
        assert seconds is None or seconds > 0
        self.noted.append((is_canary, seconds is None))

    def withdrawn(self, name: str, _: Route) -> str:
        assert name == NAME
        return "it failed" if self.is_withdrawn else ""

    async def refresh(self) -> None: ...

    def offer(self, name: str, route: Route, data: bytes, question: Any, call: CallContext, found: object) -> None:  # noqa: ANN401, PLR0913, PLR0917
        if route.shadow:
            assert (name, question, call.request_id[:2]) == (NAME, OPTIONS._replace(model=NAME), "id")
            self.offered.append((name, data, found))


def context(seconds: float = 30, key: str = "") -> CallContext:
    return CallContext(Deadline.after(seconds), Timing(), "id", route_key=key)


class Routed:
    def __init__(self, world: World, fake: Versions, path: Path, metrics: Metrics) -> None:
        self.world, self.fake, self.notes, self.metrics = world, fake, Notes(), metrics
        notes: Any = self.notes
        self.router = Router(Routes(path), world.pipeline, metrics, notes, notes)
        world.pipeline.router = self.router

    def put(self, to: str = "tiny:2", **others: Any) -> None:  # noqa: ANN401
        self.router.routes.put(NAME, Route(to, **others))

    async def ask(self, data: bytes = SCENE, seconds: float = 30, key: str = "", **options: Any) -> Detections:  # noqa: ANN401
        return await self.world.pipeline.run(data, OPTIONS._replace(model=NAME, **options), context(seconds, key))

    async def versions(self, requests: int, **options: Any) -> str:  # noqa: ANN401
        return "".join([(await self.ask(**options)).version for _ in range(requests)])

    def choose(self, key: str = "") -> Choice:
        choice = self.router.choose(NAME, context(key=key))
        assert choice is not None
        return choice

    @property
    def counted(self) -> dict[tuple[str, ...], float]:
        samples = [one for family in self.metrics.collect() for one in family.samples if one.name == "api_route_requests_total"]
        return {tuple(one.labels[name] for name in ("model", "part", "status")): one.value for one in samples if one.value}


@pytest.fixture
async def routed(tmp_path: Path, table: WorkerTable) -> AsyncIterator[Routed]:
    fake = Versions()
    async with open_world(fake, mode="inline") as world:
        yield Routed(world, fake, tmp_path / "routes.toml", Metrics(table, "0"))


async def test_share_is_exact(routed: Routed) -> None:
    share = 0.29
    routed.put(canary=Canary("tiny:3", share))
    parts = [routed.choose().part for _ in range(2000)]

    counts = [parts[:count].count("canary") for count in range(0, 2001, 100)]
    assert counts == [math.floor(round(count * share, 6)) for count in range(0, 2001, 100)]
    assert set(parts) <= {"canary", "default"}


async def test_key_decides_alone(routed: Routed) -> None:
    keys = [f"camera-{number}" for number in range(10_000)]
    canaries = {}
    for share in (0.05, 0.3):
        routed.put(canary=Canary("tiny:3", share))
        chosen = {key for key in keys if routed.choose(key).part == "canary"}
        assert chosen == {key for key in reversed(keys) if routed.choose(key).part == "canary"}
        assert abs(len(chosen) - share * 10_000) <= 3 * math.sqrt(10_000 * share * (1 - share))
        canaries[share] = chosen
    assert canaries[0.05] < canaries[0.3]

    assert await routed.versions(3, key=min(canaries[0.05])) == "333"
    assert await routed.versions(3, key=min(set(keys) - canaries[0.3])) == "222"


async def test_request_for_a_version_gets_it(routed: Routed) -> None:
    """It never gets the canary, tells nothing about the route's models, and makes no metric: there are many numbers."""
    routed.put(canary=Canary("tiny:3", 1), shadow=Shadow("big", 0.5), fallback="tiny:3")
    assert await routed.versions(2, version=1) == "11"
    assert await batch(routed, 2, version=1) == ["1"] * 2
    routed.fake.sick = {"tiny:1"}
    with pytest.raises(TritonUnavailable):
        await routed.ask(version=1)
    with pytest.raises(UnknownVersion, match="tiny has no version 7"):
        await routed.ask(version=7)

    assert routed.world.pipeline.refer_to(NAME, 1) == "tiny:1"
    assert routed.counted == {}
    assert not routed.notes.noted
    assert not routed.notes.offered


@pytest.mark.parametrize(
    ("what", "noted"),
    [
        ("is sick", [(True, True), (False, False)] * 2),
        ("is missing", [(True, True), (False, False)] * 2),
        ("is being loaded", [(False, False)] * 2),  # otherwise many requests during the load would have it withdrawn
        ("is not asked in time", [(False, False)] * 2),
        ("is withdrawn", [(False, False)] * 2),
    ],
)
async def test_default_answers_when_the_canary_cannot(
    routed: Routed, monkeypatch: pytest.MonkeyPatch, what: str, noted: list[tuple[bool, bool]]
) -> None:
    routed.put(canary=Canary("tiny:3", 1), shadow=Shadow("big", 0.5))
    run_model = routed.world.pipeline.run_model

    async def fail(model: str, *others: Any) -> Any:  # noqa: ANN401
        if model == "tiny:2":
            return await run_model(model, *others)
        raise (NotLoadedYet if what == "is being loaded" else TurnMissed)("the model is not asked")

    if what == "is sick":
        routed.fake.sick = {"tiny:3"}
    elif what == "is missing":
        routed.fake.missing = {"new"}
        routed.put(canary=Canary("new", 1), shadow=Shadow("big", 0.5))
    elif what == "is withdrawn":
        assert await routed.versions(1) == "3"
        routed.notes.is_withdrawn = True
        routed.notes.noted.clear()
    else:
        monkeypatch.setattr(routed.world.pipeline, "run_model", fail)

    assert await routed.versions(2) == "22"
    assert routed.notes.noted == noted
    assert [(name, data) for name, data, _ in routed.notes.offered] == [(NAME, SCENE)] * 2
    assert routed.counted["tiny:2", "default", "200"] == 2


@pytest.mark.parametrize(("usual", "noted"), [(30, []), (0.1, [(True, True)])])
async def test_deadline_of_a_caller_that_gives_little_time_is_no_failure_of_the_canary(
    routed: Routed, usual: float, noted: list[tuple[bool, bool]]
) -> None:
    """Otherwise one that chooses `timeout_ms` and `X-Route-Key` could have any canary withdrawn. The default is not tried then."""
    routed.put(canary=Canary("tiny:3", 1))
    await routed.ask()
    routed.notes.noted.clear()
    routed.fake.requests.clear()
    routed.world.pipeline.limits = routed.world.pipeline.limits._replace(timeout_seconds=usual)
    routed.fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await routed.ask(seconds=0.06)
    routed.fake.may_answer.set()

    assert routed.notes.noted == noted
    assert routed.fake.asked == ["tiny:3"]
    assert {part for _, part, _ in routed.counted} == {"canary"}


async def test_default_answers_what_the_canary_lacks(routed: Routed) -> None:
    """That the canary lacks a class is no failure; that the default lacks it, too, is the caller's mistake."""
    routed.fake.labels = {"2": "cat,dog", "3": "cat,fox"}
    routed.put(canary=Canary("tiny:3", 1))
    assert (await routed.ask(classes=["dog"])).version == "2"
    assert (await routed.ask(classes=["fox"])).version == "3"
    with pytest.raises(InvalidParameter):
        await routed.ask(classes=["cow"])
    assert routed.notes.noted == [(False, False), (True, False)]


async def test_fallback_answers_while_the_circuit_is_open(routed: Routed) -> None:
    """Without one, that is an error."""
    routed.put(fallback="other:1")
    routed.fake.sick = {"tiny:2"}
    outcomes = []
    for _ in range(7):
        try:
            outcomes.append((await routed.ask()).spec.reference)
        except TritonUnavailable:
            outcomes.append("failed")
    assert outcomes == ["failed"] * 4 + ["other:1"] * 3
    assert routed.world.pipeline.refer_to(NAME, None) == "other:1"
    assert routed.world.pipeline.refer_to(NAME, 2) == "tiny:2"
    routed.fake.sick.add("tiny:3")
    routed.put(canary=Canary("tiny:3", 1), fallback="other:1")
    assert await routed.versions(1) == "1"
    assert routed.notes.noted == [(True, True)]
    routed.put()
    with pytest.raises(CircuitOpen):
        await routed.ask()
    routed.fake.sick.clear()

    await eventually(lambda: routed.world.pipeline.tritons.is_usable("tiny:2"))
    routed.put(fallback="other:1")
    assert (await routed.ask()).version == "2"


async def batch(routed: Routed, images: int, **options: Any) -> list[str]:  # noqa: ANN401
    opened = await BatchRequest.open(routed.world.pipeline, [SCENE] * images, OPTIONS._replace(model=NAME, **options), context())
    outcomes = []

    async def report(_: int, found: Detections | Exception, __: Timing) -> None:
        outcomes.append(found.version if isinstance(found, Detections) else getattr(found, "code", repr(found)))

    async with opened.run(report) as done:
        for each in done:
            await each
    return outcomes


async def test_batch_goes_to_one_model_and_what_fails_to_another_like_single_images(routed: Routed) -> None:
    routed.put(canary=Canary("tiny:3", 0.5), shadow=Shadow("big", 0.5))
    assert [await batch(routed, 3) for _ in range(4)] == [["2"] * 3, ["3"] * 3] * 2
    assert Counter(routed.notes.noted) == {(False, False): 6, (True, False): 6}
    assert len(routed.notes.offered) == 6
    routed.fake.sick = {"tiny:3"}
    routed.put(canary=Canary("tiny:3", 1))
    assert await batch(routed, 3) == ["2"] * 3
    routed.fake.missing = {"new"}
    routed.put(canary=Canary("new", 1))
    assert await batch(routed, 3) == ["2"] * 3
    routed.put(fallback="other:1")
    routed.fake.sick.add("tiny:2")
    for _ in range(5):
        with pytest.raises(TritonUnavailable):
            await routed.ask(version=2)
    routed.fake.requests.clear()

    assert await batch(routed, 2) == ["1"] * 2
    assert set(routed.fake.asked) == {"other:1"}
