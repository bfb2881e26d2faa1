"""A pool of several Tritons, which have different models."""

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import msgspec
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.spec import ModelSpec
from app.resilience.circuit_breaker import CircuitBreaker
from app.triton import backend
from app.triton import client as client_module
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.model_on_server import ModelOnServer
from app.triton.pool import TritonPool, choose
from app.triton.transport import Transport
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, config_with, serving
from tests.support import TABLE, captured_log, eventually
from tests.triton.conftest import Two

NO_MODEL = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
DOWN = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"
_DRAWS = 2000
_NO_SERVER: Any = None


def one_call(_: ModelSpec) -> float:
    return 1


async def found_at(two: Two) -> set[int]:
    """Return the indices of the Tritons that `find` chooses."""
    found = [two.pool.find(SPEC, one_call) for _ in range(100)]
    return {[server is served.server for server in two.servers].index(True) for served in found if served is not None}


async def ask_both(two: Two) -> None:
    """Read the spec of the model from both Tritons."""
    for server in two.servers:
        await server.specs.get("tiny")


async def noop() -> None:
    """A probe that does nothing."""


def open_circuit(server: TritonBackend) -> None:
    """Mark a Triton as one that does not run the model."""
    served = server.model("tiny")
    served.circuit = CircuitBreaker(TABLE, "tiny", server.address, noop)
    served.circuit.is_open = True


@pytest.mark.parametrize("has_it", [0, 1])
async def test_a_model_that_one_triton_has_is_found_there(two: Two, has_it: int) -> None:
    two.fakes[1 - has_it].model_refusal = NO_MODEL
    spec = await two.pool.spec("tiny")

    assert spec == SPEC
    assert two.pool.cached("tiny") is spec
    assert two.pool.has_had("tiny")
    assert await found_at(two) == {has_it}


async def test_a_model_is_described_by_a_triton_that_has_it_or_else_answers(two: Two) -> None:
    two.fakes[0].model_refusal = NO_MODEL
    await two.pool.spec("tiny")
    assert (await two.pool.describe("ModelMetadata", "tiny"))["name"] == "tiny"
    two.fakes[0].model_refusal, two.fakes[1].model_refusal = None, DOWN
    assert (await two.pool.describe("ModelMetadata", "tiny"))["name"] == "tiny"
    two.fakes[0].model_refusal = DOWN
    with pytest.raises(TritonUnavailable):
        await two.pool.describe("ModelMetadata", "tiny")


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for answers of Triton longer than any test takes."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 600.0)


@pytest.mark.usefixtures("_patience")
async def test_a_triton_that_hangs_delays_no_spec(two: Two) -> None:
    two.fakes[0].may_tell.clear()
    assert await two.pool.spec("tiny") == SPEC
    assert await found_at(two) == {1}
    two.fakes[0].may_tell.set()

    await eventually(lambda: two.servers[0].specs.has("tiny"))
    assert await found_at(two) == {0, 1}


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        ((NO_MODEL, NO_MODEL), UnknownModel),
        ((NO_MODEL, DOWN), TritonUnavailable),  # the other Triton may have the model
        ((DOWN, NO_MODEL), TritonUnavailable),
        ((NO_MODEL, NOT_LOADED), ModelNotReady),
        ((DOWN, NOT_LOADED), ModelNotReady),
    ],
)
async def test_the_error_that_says_most_is_raised(
    two: Two, refusals: tuple[tuple[grpc.StatusCode, str], ...], error: type[GatewayError]
) -> None:
    for fake, refusal in zip(two.fakes, refusals, strict=True):
        fake.model_refusal = refusal

    with pytest.raises(error):
        await two.pool.spec("tiny")


async def test_without_a_triton_nothing_is_found() -> None:
    pool = TritonPool(Transport("inline"))

    with pytest.raises(TritonUnavailable, match="no Triton is known"):
        await pool.spec("tiny")
    with pytest.raises(TritonUnavailable, match="no Triton is known"):
        await pool.list_models()
    assert not await pool.is_ready("tiny")
    assert pool.find(SPEC, one_call) is None


async def test_a_model_that_differs_is_not_used(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, backend)
    two.fakes[1].config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    await ask_both(two)

    assert two.pool.cached("tiny") == SPEC
    assert await found_at(two) == {0}
    assert [(call.kwargs["triton"], call.kwargs["model"]) for call in log] == [(two.fakes[1].url, "tiny")]


async def test_a_model_that_differs_is_used_while_the_first_does_not_run(two: Two) -> None:
    two.fakes[1].config = {**CONFIG, "parameters": {"labels": {"string_value": "person"}}}
    await ask_both(two)
    specs = [server.specs.known(SPEC) for server in two.servers]
    assert two.pool.cached("tiny") is specs[0]
    open_circuit(two.servers[0])
    assert two.pool.cached("tiny") is specs[1]
    found = two.pool.find(specs[1], one_call)
    assert found is not None
    assert found.server is two.servers[1]
    open_circuit(two.servers[1])

    assert two.pool.cached("tiny") is specs[0]


async def test_a_model_may_have_more_instances_elsewhere(two: Two) -> None:
    two.fakes[1].config = {**CONFIG, "max_batch_size": 0, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}
    await ask_both(two)
    for server in two.servers:
        server.model("tiny").begin(1)
    found = two.pool.find(SPEC, lambda spec: spec.instances)

    assert found is not None
    assert found.server is two.servers[1]
    assert two.pool.parallel_images(SPEC) == 4


async def test_a_triton_whose_circuit_is_open_gets_no_calls(two: Two) -> None:
    """If no other Triton works, calls are made nevertheless, because their errors are the answers."""
    await ask_both(two)
    open_circuit(two.servers[0])
    assert await found_at(two) == {1}
    assert two.pool.is_usable("tiny")
    open_circuit(two.servers[1])

    assert not two.pool.is_usable("tiny")
    assert two.pool.is_usable("other")
    assert await found_at(two) == {0, 1}


async def test_model_is_unusable_while_no_triton_that_has_it_works(two: Two) -> None:
    two.fakes[1].model_refusal = NO_MODEL
    await two.pool.spec("tiny")
    open_circuit(two.servers[0])

    assert not two.pool.is_usable("tiny")


async def test_retry_goes_only_to_another_triton_that_works(two: Two) -> None:
    """It must also accept batches of this size. Otherwise the same Triton has to be called again."""
    await ask_both(two)
    first, second = (server.model("tiny") for server in two.servers)
    assert two.pool.find_other(first, SPEC, SPEC.max_batch + 1) is None
    assert two.pool.find_other(first, SPEC, SPEC.max_batch) is second
    open_circuit(two.servers[1])

    assert two.pool.find_other(first, SPEC) is None


async def test_a_model_is_looked_for_where_it_was_not(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, "app.triton.backend", "app.triton.specs")
    two.fakes[1].model_refusal = NO_MODEL
    await two.pool.spec("tiny")
    with pytest.raises(UnknownModel):  # after this answer, no question is pending
        await two.servers[1].specs.get("tiny")
    clock.now += 1
    asked = two.fakes[1].config_reads
    await two.pool.refresh()
    await eventually(lambda: two.fakes[1].config_reads == asked + 1)
    for _ in range(3):
        await two.pool.refresh()
        await two.servers[1].client.read_server()  # answered after any question of the pool
    assert two.fakes[1].config_reads == asked + 1
    two.fakes[1].model_refusal = None
    clock.now += 6
    await two.pool.refresh()

    await eventually(lambda: two.servers[1].specs.has("tiny"))
    assert await found_at(two) == {0, 1}


async def test_a_model_that_may_have_changed_is_read_again_at_once(two: Two) -> None:
    await ask_both(two)
    two.pool.forget(two.servers[0].model("tiny"), "tiny")
    assert await found_at(two) == {1}

    await eventually(lambda: two.servers[0].specs.has("tiny"))


async def test_a_version_is_asked_of_the_triton_that_has_it(two: Two) -> None:
    two.fakes[1].model_versions = ["1", "2"]
    spec = await two.pool.spec("tiny:2")
    for server in two.servers:
        await server.look_for("tiny:2")
    found = [two.pool.find(spec, one_call) for _ in range(20)]

    assert {served.server for served in found if served is not None} == {two.servers[1]}
    assert two.pool.parallel_images(spec) == spec.parallel_images
    two.fakes[0].query_refusal = NO_MODEL
    with pytest.raises(UnknownVersion, match=r"versions that can be used: 1, 2$"):
        await two.pool.spec("tiny:3")


async def test_changed_models_are_read_again(two: Two) -> None:
    assert two.pool.default("tiny") is None
    for reference in ("tiny", "tiny:1"):
        await asyncio.gather(*(server.specs.get(reference) for server in two.servers))
    first, second = two.fakes
    first.config = second.config = config_with(labels="cat,dog", default_version="1")
    first.query_refusal = DOWN
    second.may_tell.clear()
    two.pool.read_again()
    assert two.pool.default("tiny") == SPEC
    second.may_tell.set()

    specs = two.servers[1].specs
    await eventually(lambda: SPEC not in {specs.cached("tiny"), specs.cached("tiny:1")})
    assert two.servers[0].specs.cached("tiny") == two.pool.default("tiny") == SPEC
    first.query_refusal, first.config = None, config_with(default_version="2")
    first.model_versions = ["1", "2"]
    two.pool.read_again()
    await eventually(lambda: two.pool.default("tiny") is None)


async def test_models_of_all_tritons_are_listed(two: Two) -> None:
    two.fakes[0].index = [("a", "1", "READY", ""), ("a", "2", "UNAVAILABLE", "unloaded"), ("b", "1", "UNAVAILABLE", "no weights")]
    two.fakes[1].index = [("a", "3", "READY", ""), ("a", "1", "READY", ""), ("b", "1", "READY", ""), ("c", "1", "UNAVAILABLE", "")]
    listed = await two.pool.list_models()
    assert {name: state.is_ready for name, state in listed.items()} == {"a": True, "b": True, "c": False}
    assert {name: state.reason for name, state in listed.items()} == {"a": "", "b": "", "c": ""}
    assert listed["a"].versions == {"1", "3"}
    two.fakes[0].query_refusal = DOWN
    assert (await two.pool.list_models()).keys() == {"a", "b", "c"}
    two.fakes[1].query_refusal = DOWN

    with pytest.raises(TritonUnavailable):
        await two.pool.list_models()


@pytest.mark.usefixtures("_patience")
async def test_the_pool_is_ready_if_one_triton_is(two: Two) -> None:
    assert await two.pool.is_ready("tiny")
    two.fakes[0].may_tell.clear()
    assert await two.pool.is_ready("tiny")
    two.fakes[0].may_tell.set()
    open_circuit(two.servers[1])
    assert await two.pool.is_ready("tiny")
    two.fakes[0].is_model_ready = False

    assert not await two.pool.is_ready("tiny")


@pytest.mark.usefixtures("_patience")
async def test_a_triton_that_is_gone_and_does_not_answer_delays_nothing(two: Two) -> None:
    gone, fake = two.servers[0], two.fakes[0]
    transport = Transport("auto", gone.regions)
    pool = TritonPool(transport)
    pool.leaving.append(gone)
    two.pool.servers.remove(gone)
    await transport.prepare(4096)
    assert len(fake.regions) == 1
    fake.may_map.clear()
    await pool.refresh()
    assert not pool.leaving
    fake.may_map.set()
    await pool.close()

    assert not fake.regions
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        await gone.client.is_ready("tiny")
    await transport.close()


async def test_only_triton_is_used_whatever_is_known_of_it() -> None:
    fake = FakeTriton()
    async with serving(fake):
        pool = TritonPool(Transport("inline"), [TritonBackend(TritonClient(fake.url), TABLE)])
        open_circuit(pool.servers[0])
        assert pool.find(msgspec.structs.replace(SPEC, name="other"), one_call) is pool.servers[0].model("other")
        assert not pool.is_usable("tiny")
        assert pool.parallel_images(SPEC) == SPEC.parallel_images
        await pool.close()


def served(clock: Clock, images: int, speed: float = 0.0) -> ModelOnServer:
    """Make a model with images in flight, and with a measured speed in images per second."""
    made = ModelOnServer(_NO_SERVER)
    if speed:
        made.begin(1)
        began_at = clock.now
        clock.now += 1 / speed
        made.note_answer(1, began_at)
        made.calls = made.images = 0
    if images:
        made.begin(images)
    return made


def shares(candidates: list[ModelOnServer]) -> list[float]:
    """Return the fraction of choices that each candidate gets."""
    counted = Counter(candidates.index(choose(candidates)) for _ in range(_DRAWS))
    return [counted[index] / _DRAWS for index in range(len(candidates))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    random.seed(1)
    return Clock(monkeypatch, "app.triton.model_on_server")


def test_triton_that_fails_at_once_does_not_attract_every_call(clock: Clock) -> None:
    broken = served(clock, 0)
    broken.begin(1)
    clock.now += 0.001
    broken.note_answer(0, clock.now - 0.001)
    broken.calls = broken.images = 0

    assert shares([broken, served(clock, 4, 100)]) == [0, 1]


def test_triton_with_the_fewest_images_is_chosen(clock: Clock) -> None:
    assert shares([served(clock, 3), served(clock, 2)]) == [0, 1]
    assert shares([served(clock, 3, 100), served(clock, 2, 100)]) == [0, 1]
    assert shares([served(clock, 3, 1000), served(clock, 2)]) == [0, 1]


def test_slower_triton_may_have_fewer_images(clock: Clock) -> None:
    assert shares([served(clock, 9, 100), served(clock, 2, 20)]) == [1, 0]
    assert shares([served(clock, 15, 100), served(clock, 2, 20)]) == [0, 1]


def test_idle_tritons_are_chosen_by_their_speed(clock: Clock) -> None:
    """The slower one is chosen sometimes, because it may have become faster."""
    assert shares([served(clock, 0, 90), served(clock, 0, 10)]) == pytest.approx([0.9, 0.1], abs=0.05)
    assert shares([served(clock, 0), served(clock, 0)]) == pytest.approx([0.5, 0.5], abs=0.05)


def test_two_tritons_are_drawn_of_many(clock: Clock) -> None:
    """The one with the most images is never chosen, each other one sometimes: not all workers choose the same one."""
    found = shares([served(clock, images) for images in (0, 1, 2, 3)])

    assert found == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)
