"""A pool of several Tritons, which have different models: who is in it, who is chosen, who is fast or silent."""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion
from app.model.spec import ModelSpec
from app.triton import client as client_module
from app.triton import membership as membership_module
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.membership import Membership, Target, resolve
from app.triton.model_on_server import InFlightCall, ModelOnServer
from app.triton.pool import TritonPool, choose
from app.triton.silence import Silence
from app.triton.transport import Transport
from tests.fakes.clock import Clock
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, serving
from tests.support import TABLE, eventually, in_cycles
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


async def test_model_that_a_triton_has_is_found_there_and_looked_for_elsewhere(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, has_it = Clock(monkeypatch, "app.triton.backend", "app.triton.specs"), 1
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


@pytest.mark.parametrize(
    ("refusals", "error"),
    [
        ((NO_MODEL, NO_MODEL), UnknownModel),
        ((NO_MODEL, None), UnknownVersion),
        ((DOWN, NO_MODEL), TritonUnavailable),  # the other Triton may have the model
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


NEW, FAILS_AT_ONCE = 0.0, -1.0


@pytest.mark.parametrize(
    ("candidates", "shares"),
    [
        ([(3, 100), (2, 100)], [0, 1]),
        ([(3, 1000), (2, NEW)], [0, 1]),
        ([(9, 100), (2, 20)], [1, 0]),  # a slower one may have fewer images
        ([(0, 90), (0, 10)], [0.9, 0.1]),  # the slower one may have become faster
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


class Names(dict[str, list[str]]):
    """Replaces the system's resolver: IP addresses by name."""

    asked = 0

    def __call__(self, host: str, port: int, *_: object, **__: object) -> list[Any]:
        self.asked += 1
        if host not in self:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names)
    return names


@pytest.fixture
async def pool() -> AsyncIterator[TritonPool]:
    made = TritonPool(Transport("inline"))
    yield made
    await made.close()


def connect(target: Target) -> TritonBackend:
    return TritonBackend(TritonClient(target.address, host=target.host, ips=target.ips), TABLE)


def addresses(pool: TritonPool) -> list[str]:
    return [server.address for server in pool.servers]


@pytest.mark.parametrize(
    ("address", "targets"),
    [
        ("192.0.2.1:8001", [Target("192.0.2.1:8001")]),
        ("[2001:db8::7]:8001", [Target("[2001:db8::7]:8001")]),
        ("unix:/run/triton", [Target("unix:/run/triton")]),
        ("gpu:8001", [Target("gpu:8001", ips=("2001:db8::7", "192.0.2.2", "192.0.2.1"))]),  # in the resolver's order
        ("dns:///gpu:8001", [Target(f"{ip}:8001", "gpu") for ip in ("192.0.2.1", "192.0.2.2", "[2001:db8::7]")]),
    ],
)
async def test_address_is_one_triton_or_as_many_as_its_name_has(names: Names, address: str, targets: list[Target]) -> None:
    names["gpu"] = ["2001:db8::7", "192.0.2.2", "192.0.2.1", "2001:db8::7"]

    assert await resolve(address) == targets
    assert names.asked == ("gpu" in address)


async def test_name_that_has_moved_is_followed(names: Names, pool: TritonPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that fails takes no Triton away. While one cannot be reached, names are resolved sooner."""
    clock = Clock(monkeypatch, "app.triton.membership")
    monkeypatch.setattr(membership_module, "_SOON_SECONDS", 0.01)
    async with serving(FakeTriton()) as port:
        running = asyncio.create_task(Membership(pool, [f"gpu:{port}"], connect).run())
        names["gpu"] = ["127.0.0.9"]
        await eventually(lambda: addresses(pool) == [f"gpu:{port}"])
        del names["gpu"]
        asked = names.asked
        await eventually(lambda: names.asked > asked + 2)
        assert addresses(pool) == [f"gpu:{port}"]
        names["gpu"] = ["::1", "127.0.0.1"]  # the first one that answers is used

        await eventually(lambda: pool.servers[0].client.server is not None)
        for _ in range(2):
            await asyncio.sleep(0.1)
            asked = names.asked
            await asyncio.sleep(0.1)
            assert names.asked == asked
            clock.now += 5
            await eventually(lambda asked=asked: names.asked > asked)  # type: ignore[misc]
        running.cancel()
    await Membership(pool, ["192.0.2.9:8001"], connect).run()  # has nothing to resolve


async def test_tritons_come_and_go_with_the_addresses_of_a_name_once_their_calls_have_ended(names: Names, pool: TritonPool) -> None:
    names["gpus"] = ["192.0.2.1", "192.0.2.2"]
    membership = Membership(pool, ["192.0.2.9:8001", "dns:///gpus:8001", "192.0.2.1:8001"], connect)
    await membership.refresh()
    assert addresses(pool) == ["192.0.2.9:8001", "192.0.2.1:8001", "192.0.2.2:8001"]
    stays, _, gone = pool.servers
    served = gone.model("tiny")
    served.begin(2)
    names["gpus"] = ["192.0.2.3"]
    await membership.refresh()
    await pool.refresh()
    assert addresses(pool) == ["192.0.2.9:8001", "192.0.2.1:8001", "192.0.2.3:8001"]
    assert pool.servers[0] is stays
    assert pool.leaving == [gone]
    found = pool.find(SPEC, lambda _: 1)
    assert found is not None
    assert found.server in pool.servers
    served.images = 0
    await pool.refresh()

    assert pool.leaving == []


HANG_SECONDS = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.model_on_server", "app.triton.silence")


@pytest.fixture
def served(clock: Clock) -> ModelOnServer:
    assert clock.now
    return ModelOnServer(_NO_SERVER)


def answer(served: ModelOnServer, clock: Clock, seconds: float, *answers: int) -> None:
    """Simulate calls that take this long, each with so many images; 0 for one that fails."""
    in_flight = [(InFlightCall(served, images or 1), images) for images in answers or (1,)]
    clock.now += seconds
    for call, images in in_flight:
        served.note_answer(images, call.began_at)
        call.end()


def test_speed_is_that_while_calls_are_under_way(served: ModelOnServer, clock: Clock) -> None:
    assert served.speed == 0
    for _ in range(3):
        answer(served, clock, 0.1, 4)
        clock.now += 60
    assert served.speed == pytest.approx(40)
    served.forget_speed()
    answer(served, clock, 0.1, 1, 1)
    assert served.speed == pytest.approx(20, rel=0.1)
    for _ in range(100):
        answer(served, clock, 0.01)
    for _ in range(5):  # the latest calls count most
        answer(served, clock, 0.1)
    assert served.speed < 25


def test_calls_from_before_a_pause_say_nothing(served: ModelOnServer, clock: Clock) -> None:
    """Such calls end when a stopped Triton continues, and neither show its speed nor make others late."""
    hung = [InFlightCall(served, 1) for _ in range(2)]
    clock.now += 12
    circuit: Any = SimpleNamespace(is_closed=False)
    served.circuit = circuit
    served.note_answer(1, hung[0].began_at)
    served.forget_speed()
    served.note_answer(1, hung[1].began_at)
    assert served.speed == 0
    for call in hung:
        call.end()
    circuit.is_closed = True
    InFlightCall(served, 1)

    assert served.may_answer_within(0.6)


@pytest.mark.parametrize(
    ("call_seconds", "images", "silent_after"),
    [
        (0.001, 1, 0.5),  # a fast Triton may pause
        (0.1, 10, 2.0),  # ten images take ten times as long
        (0.1, 1000, 2.5),  # at most half of `HANG_SECONDS`
        (4.0, 1, 6.0),  # unless each call takes longer; also after it was left out
        (0, 1, 2.5),  # it never answered
    ],
)
def test_triton_is_silent_when_a_call_takes_much_longer_than_usual(
    served: ModelOnServer, clock: Clock, call_seconds: float, images: int, silent_after: float
) -> None:
    if call_seconds:
        answer(served, clock, call_seconds)
    if call_seconds == 4:
        served.forget_speed()
    assert not served.is_silent(HANG_SECONDS)
    served.begin(images)
    clock.now += silent_after - 0.01
    assert not served.is_silent(HANG_SECONDS)
    clock.now += 0.02

    assert served.is_silent(HANG_SECONDS)


class Client:
    """Answers once it may."""

    address = "silent:8001"

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def read_server(self) -> None:
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("answered_after", "pause", "missed_after", "is_silent"),
    [
        (0.01, 0, 0.35, True),  # a deadline of 0.6 s, asked after 0.25 s
        (0.5, 0, 0.9, False),  # its CPU is used by others
        (0.5, 11, 0.35, True),  # it was, but not lately
        (12, 0, 0.35, True),  # it was stopped, not slow
    ],
)
async def test_triton_is_silent_soon_unless_it_was_slow_lately(
    clock: Clock, answered_after: float, pause: float, missed_after: float, *, is_silent: bool
) -> None:
    """A missed deadline is counted in any case, so that nobody is told that the gateway is full."""
    client: Any = Client()
    silence = Silence(client, TABLE)
    silence.ask(clock.now, lambda: None)
    clock.now += answered_after
    client.may_answer.set()
    await asyncio.sleep(0)
    client.may_answer.clear()
    clock.now += pause

    silence.ask(clock.now, lambda: None)
    await asyncio.sleep(0)
    clock.now += missed_after
    assert silence.note_missed() is is_silent
    assert silence.missed == 1
    await silence.stop()
    assert silence.missed == 0
