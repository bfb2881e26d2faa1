"""Several Tritons, of which each has some models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import NamedTuple

import grpc
import msgspec
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.spec import ModelSpec
from app.resilience.circuit_breaker import CircuitBreaker
from app.triton import client as client_module
from app.triton import server as server_module
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.server import TritonServer
from app.triton.server_info import ModelState
from app.triton.transport import Transport
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, serving
from tests.support import captured_log, eventually

NO_MODEL = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
DOWN = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"


class Two(NamedTuple):
    pool: TritonPool
    fakes: list[FakeTriton]

    @property
    def servers(self) -> list[TritonServer]:
        return self.pool.servers


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    fakes = [FakeTriton(), FakeTriton()]
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(serving(fake))
        pool = TritonPool(Transport("inline"), [TritonServer(TritonClient(fake.url)) for fake in fakes])
        stack.push_async_callback(pool.close)
        assert await eventually(lambda: all(server.client.server for server in pool.servers))
        yield Two(pool, fakes)


def one_call(_: ModelSpec) -> float:
    return 1


async def found_at(two: Two) -> set[int]:
    """Return the numbers of the Tritons that calls may go to."""
    found = [two.pool.find(SPEC, one_call) for _ in range(100)]
    return {two.servers.index(served.server) for served in found if served is not None}


async def ask_both(two: Two) -> None:
    """Have the spec of the model read from both."""
    for server in two.servers:
        await server.specs.get("tiny")


async def noop() -> None: ...


def open_circuit(server: TritonServer) -> None:
    """Make a Triton count as one that does not run the model."""
    served = server.model("tiny")
    served.circuit = CircuitBreaker("tiny", noop)
    served.circuit.state = "open"


@pytest.mark.parametrize("has_it", [0, 1])
async def test_a_model_that_one_triton_has_is_found_there(two: Two, has_it: int) -> None:
    two.fakes[1 - has_it].model_refusal = NO_MODEL
    spec = await two.pool.spec("tiny")

    assert spec == SPEC
    assert two.pool.cached("tiny") is spec
    assert two.pool.has_had("tiny")
    assert await found_at(two) == {has_it}


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer of Triton for longer than any test."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 600.0)


@pytest.mark.usefixtures("_patience")
async def test_a_triton_that_hangs_delays_no_spec(two: Two) -> None:
    """The first answer is enough; the other Triton is used as soon as it tells."""
    two.fakes[0].may_tell.clear()
    assert await asyncio.wait_for(two.pool.spec("tiny"), 10) == SPEC
    assert await found_at(two) == {1}
    two.fakes[0].may_tell.set()

    assert await eventually(lambda: two.servers[0].specs.has("tiny"))
    assert await found_at(two) == {0, 1}


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        ((NO_MODEL, NO_MODEL), UnknownModel),
        ((NO_MODEL, DOWN), TritonUnavailable),  # that one may have it
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
    """A name may have no address yet."""
    pool = TritonPool(Transport("inline"))

    with pytest.raises(TritonUnavailable, match="no Triton is known"):
        await pool.spec("tiny")
    with pytest.raises(TritonUnavailable, match="no Triton is known"):
        await pool.list_models()
    assert not await pool.is_ready("tiny")
    assert pool.find(SPEC, one_call) is None


async def test_a_model_that_differs_is_not_used(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors have another shape, which is logged once; that of the first Triton counts."""
    log = captured_log(monkeypatch, server_module)
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
    """Each Triton gets as many calls as suit it, and the limit of requests is that of all."""
    two.fakes[1].config = {**CONFIG, "max_batch_size": 0, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}
    await ask_both(two)
    for server in two.servers:
        server.model("tiny").begin(1)
    found = two.pool.find(SPEC, lambda spec: spec.instances)

    assert found is not None
    assert found.server is two.servers[1]
    assert two.pool.parallel_images(SPEC) == 4


async def test_a_triton_gets_no_more_calls_than_it_may_have(two: Two) -> None:
    await ask_both(two)
    two.servers[0].model("tiny").begin(1)
    assert await found_at(two) == {1}
    two.servers[1].model("tiny").begin(1)

    assert two.pool.find(SPEC, one_call) is None


async def test_a_triton_whose_circuit_is_open_gets_no_calls(two: Two) -> None:
    """It gets none while another one works; without another one, callers get the errors of its calls."""
    await ask_both(two)
    open_circuit(two.servers[0])
    assert await found_at(two) == {1}
    assert two.pool.is_usable("tiny")
    open_circuit(two.servers[1])

    assert not two.pool.is_usable("tiny")
    assert two.pool.is_usable("other")
    assert await found_at(two) == {0, 1}


async def test_one_that_has_the_model_must_work(two: Two) -> None:
    """A working Triton without the model does not help."""
    two.fakes[1].model_refusal = NO_MODEL
    await two.pool.spec("tiny")
    open_circuit(two.servers[0])

    assert not two.pool.is_usable("tiny")


async def test_another_triton_is_one_that_works(two: Two) -> None:
    """It must have room for another call; if there is no other, the same one is asked again."""
    await ask_both(two)
    first, second = (server.model("tiny") for server in two.servers)
    second.begin(1)
    assert two.pool.find(SPEC, one_call, besides=first) is None
    second.calls = 0
    assert two.pool.find(SPEC, one_call, besides=first) is second
    open_circuit(two.servers[1])

    assert two.pool.find(SPEC, one_call, besides=first) is None


async def test_a_model_is_looked_for_where_it_was_not(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been loaded: the Triton is asked every few seconds while another one has the model."""
    clock = Clock(monkeypatch, "app.triton.server")
    two.fakes[1].model_refusal = NO_MODEL
    await two.pool.spec("tiny")
    with pytest.raises(UnknownModel):  # once that has been heard, too, nobody is asking
        await two.servers[1].specs.get("tiny")
    asked = two.fakes[1].config_reads
    await two.pool.refresh()
    assert await eventually(lambda: two.fakes[1].config_reads == asked + 1)
    for _ in range(3):
        await two.pool.refresh()
        await two.servers[1].client.read_server()  # which comes after what the pool would ask
    assert two.fakes[1].config_reads == asked + 1
    two.fakes[1].model_refusal = None
    clock.now += 6
    await two.pool.refresh()

    assert await eventually(lambda: two.servers[1].specs.has("tiny"))
    assert await found_at(two) == {0, 1}


async def test_a_model_that_may_have_changed_is_read_again_at_once(two: Two) -> None:
    await ask_both(two)
    two.pool.forget(two.servers[0].model("tiny"), "tiny")
    assert await found_at(two) == {1}

    assert await eventually(lambda: two.servers[0].specs.has("tiny"))


async def test_the_versions_of_a_model_are_those_of_all_tritons(two: Two) -> None:
    two.fakes[0].index = [("a", "1", "READY", ""), ("a", "2", "UNAVAILABLE", "unloaded")]
    two.fakes[1].index = [("a", "3", "READY", ""), ("a", "1", "READY", "")]

    assert (await two.pool.list_models())["a"] == ModelState("READY", "", frozenset({"1", "3"}))


async def test_a_version_is_asked_of_the_triton_that_has_it(two: Two) -> None:
    """Though both have the model. One that none has is unknown, and not the model, which one of them lacks now."""
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


async def test_models_of_all_tritons_are_listed(two: Two) -> None:
    """One is ready if it is ready anywhere; a Triton that does not answer hides nothing."""
    two.fakes[0].index = [("a", "1", "READY", ""), ("b", "1", "UNAVAILABLE", "no weights")]
    two.fakes[1].index = [("b", "1", "READY", ""), ("c", "1", "UNAVAILABLE", "")]
    listed = await two.pool.list_models()
    assert {name: state.is_ready for name, state in listed.items()} == {"a": True, "b": True, "c": False}
    assert {name: state.reason for name, state in listed.items()} == {"a": "", "b": "", "c": ""}
    two.fakes[0].query_refusal = DOWN
    assert (await two.pool.list_models()).keys() == {"b", "c"}
    two.fakes[1].query_refusal = DOWN

    with pytest.raises(TritonUnavailable):
        await two.pool.list_models()


@pytest.mark.usefixtures("_patience")
async def test_the_pool_is_ready_if_one_triton_is(two: Two) -> None:
    assert await two.pool.is_ready("tiny")
    two.fakes[0].may_tell.clear()
    assert await asyncio.wait_for(two.pool.is_ready("tiny"), 10)
    two.fakes[0].may_tell.set()
    open_circuit(two.servers[1])
    assert await two.pool.is_ready("tiny")
    two.fakes[0].is_model_ready = False

    assert not await two.pool.is_ready("tiny")


@pytest.mark.usefixtures("_patience")
async def test_a_triton_that_is_gone_and_does_not_answer_delays_nothing(two: Two) -> None:
    """Its arenas are unmapped and its connection is closed beside what is done regularly, and before the pool has closed."""
    gone, fake = two.servers[0], two.fakes[0]
    transport = Transport("auto", gone.regions)
    pool = TritonPool(transport)
    pool.leaving.append(gone)
    two.pool.servers.remove(gone)
    await transport.prepare(4096)
    assert len(fake.regions) == 1
    fake.may_map.clear()
    async with asyncio.timeout(10):
        await pool.refresh()
    assert not pool.leaving
    fake.may_map.set()
    await pool.close()

    assert not fake.regions
    with pytest.raises(grpc.aio.UsageError, match="closed"):
        await gone.client.is_ready("tiny")
    await transport.close()


async def test_one_triton_is_used_whatever_is_known_of_it() -> None:
    """There is no choice: no spec is compared, and its errors are those of the callers."""
    fake = FakeTriton()
    async with serving(fake):
        pool = TritonPool(Transport("inline"), [TritonServer(TritonClient(fake.url))])
        open_circuit(pool.servers[0])
        assert pool.find(msgspec.structs.replace(SPEC, name="other"), one_call) is pool.servers[0].model("other")
        assert not pool.is_usable("tiny")
        assert pool.parallel_images(SPEC) == SPEC.parallel_images
        await pool.close()
