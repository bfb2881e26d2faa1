"""A pool of several Tritons, which have different models."""

import asyncio
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.spec import ModelSpec
from app.triton import client as client_module
from app.triton.backend import TritonBackend
from app.triton.model_on_server import ModelOnServer
from app.triton.pool import TritonPool, choose
from app.triton.transport import Transport
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, SPEC, config_with
from tests.support import eventually, in_cycles
from tests.triton.conftest import Two

Refusal = tuple[grpc.StatusCode, str]
NO_MODEL = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
DOWN = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"
_NO_SERVER: Any = None


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers of Triton longer than any test takes."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 600.0)


def one_call(_: ModelSpec) -> float:
    return 1


def found_at(two: Two, spec: ModelSpec = SPEC) -> set[int]:
    """Return the indices of the Tritons that `find` chooses."""
    found = [two.pool.find(spec, one_call) for _ in range(100)]
    return {[server is served.server for server in two.servers].index(True) for served in found if served is not None}


async def ask_both(two: Two, *models: str) -> None:
    """Read the specs of models from both Tritons."""
    for model in models or ("tiny",):
        await asyncio.gather(*(server.specs.get(model) for server in two.servers))


def open_circuit(server: TritonBackend) -> None:
    """Mark a Triton as one that does not run the model."""
    circuit: Any = SimpleNamespace(is_closed=False, close=partial(asyncio.sleep, 0))
    server.model("tiny").circuit = circuit


@pytest.mark.parametrize("has_it", [0, 1])
async def test_model_that_a_triton_has_is_found_there_and_looked_for_elsewhere(
    two: Two, has_it: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, "app.triton.backend", "app.triton.specs")
    fake, other = two.fakes[has_it], two.fakes[1 - has_it]
    other.model_refusal = NO_MODEL
    spec = await two.pool.spec("tiny")
    assert two.pool.cached("tiny") is spec
    assert found_at(two) == {has_it}
    assert (await two.pool.describe("ModelMetadata", "tiny"))["name"] == "tiny"
    other.model_refusal, fake.model_refusal = NO_MODEL, DOWN
    with pytest.raises(GatewayError):
        await two.pool.describe("ModelMetadata", "tiny")
    specs = two.servers[1 - has_it].specs
    with pytest.raises(UnknownModel):  # after this answer, no question is pending
        await specs.get("tiny")
    asked = other.config_reads
    for _ in range(4):
        clock.now += 1
        await two.pool.refresh()
        await eventually(lambda: other.config_reads > asked)
        await two.servers[1 - has_it].client.read_server()  # answered after any question of the pool
    other.model_refusal = fake.model_refusal = None
    clock.now += 6
    assert other.config_reads == asked + 1
    await two.pool.refresh()
    await eventually(lambda: specs.has("tiny"))
    assert found_at(two) == {0, 1}

    two.pool.forget(two.servers[has_it].model("tiny"), "tiny")  # it may have changed, and is read at once
    assert found_at(two) == {1 - has_it}
    await eventually(lambda: two.servers[has_it].specs.has("tiny"))


async def test_triton_that_hangs_delays_nothing(two: Two) -> None:
    two.fakes[0].may_tell.clear()
    assert await two.pool.spec("tiny") == SPEC
    assert await two.pool.is_ready("tiny")
    assert found_at(two) == {1}
    two.fakes[0].may_tell.set()


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        ((NO_MODEL, NO_MODEL), UnknownModel),
        ((NO_MODEL, None), UnknownVersion),
        ((NO_MODEL, DOWN), TritonUnavailable),  # the other Triton may have the model
        ((DOWN, NO_MODEL), TritonUnavailable),
        ((DOWN, NOT_LOADED), ModelNotReady),
    ],
)
async def test_error_that_says_most_is_raised(two: Two, refusals: tuple[Refusal | None, ...], error: type[GatewayError]) -> None:
    """It leaves no reference cycle, which would keep an image."""
    for fake, refusal in zip(two.fakes, refusals, strict=True):
        fake.model_refusal = refusal
    with in_cycles(GatewayError) as kept:
        with pytest.raises(error):
            await two.pool.spec("tiny:3")
        await asyncio.sleep(0)

    assert kept == []


async def test_without_a_triton_nothing_is_found() -> None:
    pool = TritonPool(Transport("inline"))
    for question in (pool.spec("tiny"), pool.list_models()):
        with pytest.raises(TritonUnavailable, match="no Triton is known"):
            await question
    assert not await pool.is_ready("tiny")
    assert pool.find(SPEC, one_call) is None


async def test_model_that_differs_is_used_only_while_the_first_does_not_run(two: Two) -> None:
    two.fakes[1].config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    await ask_both(two)
    specs = [server.specs.known(SPEC) for server in two.servers]
    assert two.pool.cached("tiny") is specs[0]
    assert found_at(two, specs[0]) == {0}
    open_circuit(two.servers[0])
    assert two.pool.cached("tiny") is specs[1]
    assert found_at(two, specs[1]) == {1}
    open_circuit(two.servers[1])

    assert two.pool.cached("tiny") is specs[0]


async def test_triton_whose_circuit_is_open_gets_no_calls_and_no_retries(two: Two) -> None:
    """If no other Triton works, calls are made nevertheless, because their errors are the answers."""
    await ask_both(two)
    first, second = (server.model("tiny") for server in two.servers)
    assert two.pool.find_other(first, SPEC, SPEC.max_batch + 1) is None
    assert two.pool.find_other(first, SPEC, SPEC.max_batch) is second
    open_circuit(two.servers[1])
    assert two.pool.find_other(first, SPEC) is None
    assert found_at(two) == {0}
    assert two.pool.is_usable("tiny")
    assert await two.pool.is_ready("tiny")
    two.fakes[0].is_model_ready = False
    assert not await two.pool.is_ready("tiny")
    two.servers[1].specs.forget("tiny")
    open_circuit(two.servers[0])
    second.circuit = None
    assert (two.pool.is_usable("tiny"), two.pool.is_usable("other")) == (False, True)  # the other one does not have it
    assert found_at(two) == {0}


async def test_versions_and_instances_may_differ_between_tritons(two: Two) -> None:
    more = {"max_batch_size": 0, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}
    two.fakes[1].model_versions, two.fakes[1].config = ["1", "2"], {**CONFIG, **more}
    for server in two.servers:
        for model in ("tiny:1", "tiny:2"):
            await server.look_for(model)
    one, newer = await two.pool.spec("tiny:1"), await two.pool.spec("tiny:2")
    assert found_at(two, newer) == {1}
    assert [two.pool.parallel_images(spec) for spec in (one, newer)] == [4, 3]
    for server in two.servers:
        server.model("tiny:1").begin(1)
    found = two.pool.find(one, lambda spec: spec.instances)
    assert found is not None
    assert found.server is two.servers[1]


async def test_changed_models_are_read_again(two: Two) -> None:
    """The default version is not known while Tritons differ."""
    assert two.pool.default("tiny") is None
    await ask_both(two)
    for fake in two.fakes:
        fake.config = config_with(labels="cat,dog")
    two.pool.read_again()
    assert two.pool.default("tiny") == SPEC
    await eventually(lambda: all(server.specs.cached("tiny") != SPEC for server in two.servers))
    two.fakes[0].model_versions = ["1", "2"]
    two.pool.read_again()
    await eventually(lambda: two.pool.default("tiny") is None)


async def test_models_of_all_tritons_are_listed(two: Two) -> None:
    two.fakes[0].index = [
        ("a", "1", "READY", ""),
        ("a", "2", "UNAVAILABLE", "unloaded"),
        ("b", "1", "UNAVAILABLE", "no\tweights\nAt"),
    ]
    two.fakes[1].index = [("a", "3", "READY", ""), ("d", "1", "UNAVAILABLE", ""), ("d", "2", "READY", ""), ("c", "", "", "")]
    listed = await two.pool.list_models()
    states = {name: (state.is_ready, state.reason) for name, state in listed.items()}
    assert states == {"a": (True, ""), "b": (False, "no weights"), "c": (False, ""), "d": (True, "")}
    assert listed["a"].versions == {"1", "3"}
    two.fakes[0].query_refusal = DOWN
    assert (await two.pool.list_models()).keys() == {"a", "c", "d"}
    two.fakes[1].query_refusal = DOWN
    with pytest.raises(TritonUnavailable):
        await two.pool.list_models()


async def test_only_triton_is_used_whatever_is_known_of_it(two: Two) -> None:
    (server,) = two.pool.servers[:] = two.servers[:1]
    open_circuit(server)
    assert two.pool.find(msgspec.structs.replace(SPEC, name="other"), one_call) is server.model("other")
    assert not two.pool.is_usable("tiny")
    assert two.pool.parallel_images(SPEC) == SPEC.parallel_images


NEW, FAILS_AT_ONCE = 0.0, -1.0


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ([(3, NEW), (2, NEW)], [0, 1]),
        ([(3, 100), (2, 100)], [0, 1]),
        ([(3, 1000), (2, NEW)], [0, 1]),
        ([(9, 100), (2, 20)], [1, 0]),  # a slower one may have fewer images
        ([(15, 100), (2, 20)], [0, 1]),
        ([(0, 90), (0, 10)], [0.9, 0.1]),  # the slower one may have become faster
        ([(0, NEW), (0, NEW)], [0.5, 0.5]),
        ([(0, FAILS_AT_ONCE), (4, 100)], [0, 1]),
        ([(0, NEW), (1, NEW), (2, NEW), (3, NEW)], [1 / 2, 1 / 3, 1 / 6, 0]),  # not all workers choose the same one
    ],
)
def test_triton_that_would_finish_first_is_chosen(
    monkeypatch: pytest.MonkeyPatch, candidates: list[tuple[int, float]], shares: list[float]
) -> None:
    """By images in flight, and measured speed in images per second."""
    clock = Clock(monkeypatch, "app.triton.model_on_server")
    random.seed(1)
    made = [ModelOnServer(_NO_SERVER) for _ in candidates]
    for served, (images, speed) in zip(made, candidates, strict=True):
        if speed:
            served.begin(1)
            clock.now += max(1 / speed, 0.001)
            served.note_answer(int(speed > 0), clock.now - max(1 / speed, 0.001))
            served.calls = served.images = 0
        if images:
            served.begin(images)
    chosen = Counter(made.index(choose(made)) for _ in range(2000))

    assert [chosen[index] / 2000 for index in range(len(made))] == pytest.approx(shares, abs=0.05)
