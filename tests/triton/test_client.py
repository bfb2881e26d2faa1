"""The RPCs of the client, and what it knows about the server."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from app.errors import (
    GatewayError,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
    UnknownModel,
    UnknownVersion,
)
from app.telemetry.trace_context import TraceContext
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.server_info import ModelState, ServerInfo
from app.triton.shared_memory import Arena
from app.triton.status import Disconnected, Unanswered, Unreachable
from tests.fakes.triton import SPEC, FakeTriton, infer_response, serving, serving_bytes
from tests.faults.relay import relay
from tests.support import eventually, free_port

IMAGE = np.zeros(SPEC.image_shape, np.uint8)
SILENCE = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"

Fake = tuple[FakeTriton, TritonClient]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(2 * IMAGE.nbytes)
    yield made
    made.close()


@pytest.fixture
async def alone() -> AsyncIterator[TritonClient]:
    client = TritonClient(f"127.0.0.1:{free_port()}")
    yield client
    await client.close()


@pytest.mark.parametrize(
    ("version", "survives"),
    [("2.51.0", False), ("2.59.0", False), ("2.59.1", True), ("2.60.0dev", True), ("3.0.0", True), ("2", False), ("", False)],
)
def test_only_a_new_triton_survives_a_cancelled_inference(version: str, survives: bool) -> None:  # noqa: FBT001
    """Older versions can crash; a version that cannot be parsed counts as old."""
    assert ServerInfo(version).survives_cancel is survives


@pytest.mark.parametrize("version", ["2.51.0", "2.59.1", ""])
async def test_the_version_is_read_from_the_server(fake_triton: Fake, version: str) -> None:
    fake, client = fake_triton
    fake.version, fake.extensions = version, ["statistics"]

    assert await client.read_server() == ServerInfo(version, ("statistics",))


async def test_asking_for_the_version_does_not_change_what_is_known(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.version = "2.59.1"
    await eventually(lambda: client.server == ServerInfo("2.59.1"))
    fake.version = "2.51.0"

    assert await client.read_server() == ServerInfo("2.51.0")
    assert client.server == ServerInfo("2.59.1")


async def test_a_lost_connection_makes_the_server_unknown_until_the_next_one() -> None:
    """Triton may come back with another version, which is read again without a request."""
    fake = FakeTriton()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        assert client.server is None
        await eventually(lambda: client.server == ServerInfo("2.51.0"))
    await eventually(lambda: client.server is None)

    fake.version = "2.59.1"
    async with serving(fake, port):
        await eventually(lambda: client.server == ServerInfo("2.59.1"))
        await client.close()


async def test_a_server_that_does_not_tell_its_version_is_asked_again(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may still be starting."""
    fake, client = fake_triton
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake.query_refusal = SILENCE
    await eventually(lambda: fake.server_reads > 0)
    assert client.server is None

    fake.query_refusal = None
    await eventually(lambda: client.server == ServerInfo("2.51.0"))


async def test_a_client_that_never_connected_can_be_closed(alone: TritonClient) -> None:
    assert alone.server is None
    await alone.close()


async def test_a_silent_triton_is_unavailable(fake_triton: Fake, arena: Arena) -> None:
    """A time-out is a missed deadline of the caller only for an inference."""
    fake, client = fake_triton
    fake.refusal = fake.query_refusal = SILENCE

    for question in (client.read_server(), client.list_models(), client.read_config("tiny"), client.register(arena)):
        with pytest.raises(TritonUnavailable):
            await question
    assert not await client.is_ready("tiny")


async def test_a_triton_that_hangs_is_unavailable(fake_triton: Fake, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = fake_triton
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake.may_tell.clear()
    fake.may_map.clear()

    for question in (client.read_server(), client.read_config("tiny"), client.register(arena)):
        with pytest.raises(TritonUnavailable):
            await question
    assert not await client.is_ready("tiny")
    await client.unregister(arena.region)


async def test_a_triton_that_is_not_there_is_unavailable(alone: TritonClient, arena: Arena) -> None:
    """`unregister` only cleans up, so it fails silently."""
    for question in (alone.read_server(), alone.list_models(), alone.read_config("tiny"), alone.register(arena)):
        with pytest.raises(TritonUnavailable):
            await question
    for _ in range(3):  # the first before a connection attempt, the others possibly after it
        with pytest.raises(Unreachable):
            await alone.infer(SPEC, [IMAGE], timeout_seconds=5)
    assert not await alone.is_ready("tiny")
    await alone.unregister(arena.region)


async def test_the_state_of_a_model_comes_with_a_reason_of_one_line(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.index = [("b", "1", "UNAVAILABLE", "no\tweights\nAt: line 1"), ("c", "", "", "")]

    assert await client.list_models() == {"b": ModelState("UNAVAILABLE", "no weights"), "c": ModelState("", "")}


@pytest.mark.parametrize("states", [["READY", "UNAVAILABLE"], ["UNAVAILABLE", "READY"]])
async def test_a_model_is_ready_if_one_of_its_versions_is(fake_triton: Fake, states: list[str]) -> None:
    fake, client = fake_triton
    fake.index = [("a", str(version), state, "" if state == "READY" else "unloaded") for version, state in enumerate(states)]

    assert await client.list_models() == {"a": ModelState("READY", "", frozenset({str(states.index("READY"))}))}


@pytest.mark.parametrize(("versions", "newest"), [(["1"], "1"), (["2", "10", "9"], "10"), (["dev", "3"], "3"), ([], "")])
async def test_a_config_comes_with_the_newest_version(fake_triton: Fake, versions: list[str], newest: str) -> None:
    """Versions are compared as numbers."""
    fake, client = fake_triton
    fake.model_versions = versions
    config, version = await client.read_config("tiny")

    assert version == newest
    assert config["name"] == "tiny"
    assert config["input"][0]["data_type"] == "TYPE_UINT8"


@pytest.mark.parametrize("version", ["2", "10"])
async def test_a_version_that_is_asked_for_has_its_config(fake_triton: Fake, version: str) -> None:
    fake, client = fake_triton
    fake.model_versions = ["2", "10", "9"]

    assert (await client.read_config(f"tiny:{version}"))[1] == version


@pytest.mark.parametrize(("versions", "named"), [(["2", "10", "9"], "2, 9, 10"), (["dev"], "none"), ([], "none")])
async def test_a_version_that_is_not_loaded_names_those_that_are(fake_triton: Fake, versions: list[str], named: str) -> None:
    fake, client = fake_triton
    fake.model_versions = versions
    with pytest.raises(UnknownVersion, match=f"^tiny has no version 3; versions that can be used: {named}$"):
        await client.read_config("tiny:3")


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), UnknownModel),
        ((grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady),
    ],
)
async def test_a_config_that_cannot_be_read_says_why(
    fake_triton: Fake, refusal: tuple[grpc.StatusCode, str], expected: type[GatewayError]
) -> None:
    fake, client = fake_triton
    fake.query_refusal = refusal

    with pytest.raises(expected):
        await client.read_config("tiny")


async def test_registering_names_the_file_and_its_size(fake_triton: Fake, arena: Arena) -> None:
    fake, client = fake_triton
    await client.register(arena)

    (request,) = fake.registrations
    assert (request.name, request.key, request.offset, request.byte_size) == (arena.region, f"/{arena.name}", 0, 2 * IMAGE.nbytes)
    assert fake.regions == {arena.region} != {arena.name}


async def test_a_region_that_is_still_read_is_unregistered_later(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed worker may have left an inference that reads the region."""
    fake, client = fake_triton
    monkeypatch.setattr(client_module, "_UNREGISTER_ATTEMPTS", 2000)
    fake.regions, fake.still_read = {"region"}, 3
    await client.unregister("region")

    assert fake.regions == set()


async def test_unregistering_gives_up_on_a_region_that_stays_in_use(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, client = fake_triton
    await client.read_server()
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.5)
    fake.regions, fake.still_read = {"region"}, 1_000_000
    await client.unregister("region")

    assert fake.regions == {"region"}
    assert fake.still_read < 1_000_000


async def test_an_inference_carries_the_trace_of_its_caller(fake_triton: Fake) -> None:
    fake, client = fake_triton
    trace = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1, "a=1,b=2")
    await client.infer(SPEC, [IMAGE], timeout_seconds=5, trace=trace)
    await client.infer(SPEC, [IMAGE], timeout_seconds=5)

    assert [metadata.get("traceparent") for metadata in fake.metadata] == [trace.traceparent, None]
    assert [metadata.get("tracestate") for metadata in fake.metadata] == ["a=1,b=2", None]


async def test_messages_larger_than_the_default_of_grpc_pass(fake_triton: Fake) -> None:
    """One FP32 image is larger than four megabytes, and so is a raw head for a large input."""
    fake, client = fake_triton
    fake.answer = infer_response(output0=np.zeros((1, 84, 16_800), np.float32))
    answer = await client.infer(SPEC, [np.zeros(5_000_000, np.uint8)], timeout_seconds=5)

    assert answer.outputs["output0"].nbytes > 5_000_000


async def until_a_question_is_late(fake: FakeTriton, client: TritonClient, seconds: float) -> None:
    """Wait until a call has timed out; an earlier call with less time would have timed out as well."""
    fake.may_tell.clear()
    with pytest.raises(TritonUnavailable):
        await client.ask("ServerMetadata", seconds)


async def test_an_inference_may_take_longer_than_its_time(fake_triton: Fake) -> None:
    """The time limits the wait in Triton's queue. The RPC is not cancelled then, because that can crash Triton."""
    fake, client = fake_triton
    fake.may_answer.clear()
    asking = asyncio.ensure_future(client.infer(SPEC, [IMAGE], timeout_seconds=0.05))
    await until_a_question_is_late(fake, client, 0.3)
    assert not asking.done()
    fake.may_answer.set()

    assert (await asking).version == "1"
    assert fake.cancelled == 0


@pytest.mark.parametrize("seconds", [0, -10])
async def test_an_inference_without_time_is_still_asked(fake_triton: Fake, seconds: float) -> None:
    """Triton drops the request from its queue after a microsecond."""
    fake, client = fake_triton
    await client.infer(SPEC, [IMAGE], timeout_seconds=seconds)

    assert fake.requests[0].parameters["timeout"].int64_param == 1


async def test_a_lost_connection_ends_inferences() -> None:
    fake = FakeTriton()
    fake.may_answer.clear()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        asking = asyncio.ensure_future(client.infer(SPEC, [IMAGE], timeout_seconds=600))
        await eventually(lambda: bool(fake.requests))
    with pytest.raises(Disconnected):
        await asking
    await client.close()


@pytest.mark.parametrize(("version", "cancelled"), [("2.51.0", 0), ("2.59.1", 1)])
async def test_an_inference_without_an_answer_is_given_up(
    fake_triton: Fake, monkeypatch: pytest.MonkeyPatch, version: str, cancelled: int
) -> None:
    """An RPC to an old Triton, which may crash if it is cancelled, continues afterwards."""
    fake, client = fake_triton
    fake.version = version
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.2)
    await eventually(lambda: client.server == ServerInfo(version))
    fake.may_answer.clear()
    with pytest.raises(Unanswered, match="did not answer in time"):
        await client.infer(SPEC, [IMAGE], timeout_seconds=0.1)
    gc.collect()
    await client.read_server()

    await eventually(lambda: fake.cancelled == cancelled)
    assert fake.running == len(client.left) == 1 - cancelled
    fake.may_answer.set()
    await eventually(lambda: not client.left)


@pytest.mark.parametrize(("version", "cancelled"), [("2.51.0", 0), ("2.59.1", 1)])
async def test_cancelling_an_inference_does_not_cancel_the_call_to_an_old_triton(
    fake_triton: Fake, version: str, cancelled: int
) -> None:
    fake, client = fake_triton
    fake.version = version
    await eventually(lambda: client.server == ServerInfo(version))
    fake.may_answer.clear()
    asking = asyncio.create_task(client.infer(SPEC, [IMAGE], timeout_seconds=5))
    await eventually(lambda: fake.running == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: fake.cancelled == cancelled)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    fake.may_answer.set()
    await closing

    await eventually(lambda: fake.running == 0)
    assert fake.cancelled == cancelled


async def test_an_inference_that_was_never_sent_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all unsent probes would be sent on the next connection."""
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.0)
    client = TritonClient(f"127.0.0.1:{free_port()}")
    with pytest.raises(Unanswered):
        await client.infer(SPEC, [IMAGE], timeout_seconds=0.1, waits_for_connection=True)

    assert not client.left
    await client.close()


async def test_an_answer_that_is_no_message_is_an_invalid_output() -> None:
    """Another program listens at the address, so `server` stays None."""
    async with serving_bytes(b"\xff\xff\xff") as url:
        client = TritonClient(url)
        for question in (
            client.infer(SPEC, [IMAGE], timeout_seconds=5),
            client.read_server(),
            client.list_models(),
            client.list_regions(),
            client.read_config("tiny"),
        ):
            with pytest.raises(InvalidModelOutput, match="cannot be read"):
                await question
        assert not await client.is_ready("tiny")
        assert client.server is None
        await client.close()


@pytest.mark.faults
async def test_a_connection_may_take_as_long_as_a_lost_packet_delays_it() -> None:
    """TCP repeats a lost first packet after a second; the relay delays each connection by longer."""

    async def answer_late(*here: Any) -> None:  # noqa: ANN401
        await asyncio.sleep(1.5)
        await relay(here, await asyncio.open_connection("127.0.0.1", port))

    async with serving(FakeTriton()) as port, await asyncio.start_server(answer_late, "127.0.0.1", 0) as server:
        client = TritonClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await eventually(lambda: client.server is not None)
        await client.close()
