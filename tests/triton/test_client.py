"""The RPCs of the client, and what it knows about the server."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from app.errors import InvalidModelOutput, TritonUnavailable
from app.triton import client as client_module
from app.triton import control_key
from app.triton.client import TritonClient
from app.triton.server_info import ServerInfo
from app.triton.shared_memory import Arena
from app.triton.statistics import read_statistics
from app.triton.status import Unanswered
from tests.fakes.triton import SPEC, FakeTriton, infer_response, serving, serving_bytes
from tests.faults.relay import relay
from tests.support import eventually, free_port

IMAGE = np.zeros(SPEC.image_shape, np.uint8)

Fake = tuple[FakeTriton, TritonClient]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(2 * IMAGE.nbytes)
    yield made
    made.close()


@pytest.fixture
async def alone() -> AsyncIterator[TritonClient]:
    """A client of a Triton that does not run."""
    client = TritonClient(f"127.0.0.1:{free_port()}")
    yield client
    await client.close()


@pytest.mark.parametrize(
    ("version", "survives"), [("2.59.0", False), ("2.59.1", True), ("2.60.0dev", True), ("3.0.0", True), ("2", False), ("", False)]
)
def test_only_new_triton_survives_a_cancelled_inference(version: str, *, survives: bool) -> None:
    assert ServerInfo(version).survives_cancel is survives


async def test_server_is_known_while_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may come back with another version, and tell it late."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake = FakeTriton()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        await eventually(lambda: client.server == ServerInfo("2.51.0"))
        fake.version, fake.extensions = "2.59.1", ["statistics"]
        assert [await client.read_server(), client.server] == [ServerInfo("2.59.1", ("statistics",)), ServerInfo("2.51.0")]
    await eventually(lambda: client.server is None)

    fake.query_refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    before = fake.server_reads
    async with serving(fake, port):
        await eventually(lambda: fake.server_reads > before)
        assert client.server is None
        fake.query_refusal = None
        await eventually(lambda: client.server == ServerInfo("2.59.1", ("statistics",)))
        assert client.connection > 1
        await client.close()


async def test_triton_that_hangs_is_unavailable(fake_triton: Fake, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out is a missed deadline of the caller only for an inference."""
    fake, client = fake_triton
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake.may_tell.clear()
    fake.may_map.clear()

    for question in (client.read_server(), client.list_models(), client.read_config("tiny"), client.register(arena)):
        with pytest.raises(TritonUnavailable):
            await question
    with pytest.raises(TritonUnavailable):
        await read_statistics(client, 0.1)
    assert not await client.is_ready("tiny")
    await client.unregister(arena.region)


@pytest.mark.parametrize(("attempts", "still_read", "left"), [(2000, 3, set[str]()), (20, 10**6, {"region"})])
async def test_region_that_is_still_read_is_unregistered_later_or_given_up(
    fake_triton: Fake, monkeypatch: pytest.MonkeyPatch, attempts: int, still_read: int, left: set[str]
) -> None:
    """A killed worker may have left an inference that reads the region."""
    fake, client = fake_triton
    await client.read_server()
    monkeypatch.setattr(client_module, "_UNREGISTER_ATTEMPTS", attempts)
    if left:
        monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.5)
    fake.regions, fake.still_read = {"region"}, still_read
    await client.unregister("region")

    assert fake.regions == left
    assert fake.still_read < still_read


async def test_messages_larger_than_the_default_of_grpc_pass(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.answer = infer_response(output0=np.zeros((1, 84, 16_800), np.float32))
    answer = await client.infer(SPEC, [np.zeros(5_000_000, np.uint8)], timeout_seconds=5)

    assert answer.outputs["output0"].nbytes > 5_000_000


@pytest.mark.parametrize(("version", "cancelled"), [("2.51.0", 0), ("2.59.1", 1)])
async def test_inference_without_an_answer_is_cancelled_only_at_a_new_triton(
    fake_triton: Fake, monkeypatch: pytest.MonkeyPatch, version: str, cancelled: int
) -> None:
    """An RPC to an old Triton, which may crash if it is cancelled, goes on, and may end until the client has closed."""
    fake, client = fake_triton
    fake.version = version
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.2)
    await eventually(lambda: client.server == ServerInfo(version))
    fake.may_answer.clear()
    with pytest.raises(Unanswered):
        await client.infer(SPEC, [IMAGE], timeout_seconds=0.1)
    gc.collect()
    await client.read_server()

    await eventually(lambda: fake.cancelled == cancelled)
    assert fake.running == len(client.left) == 1 - cancelled
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    fake.may_answer.set()
    await closing
    assert fake.cancelled == cancelled


async def test_inference_that_was_never_sent_is_cancelled(alone: TritonClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all unsent probes would be sent on the next connection."""
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.0)
    with pytest.raises(Unanswered):
        await alone.infer(SPEC, [IMAGE], timeout_seconds=0.1, waits_for_connection=True)

    assert not alone.left


async def test_answer_that_is_no_message_is_an_invalid_output() -> None:
    """Another program listens at the address, so `server` stays None."""
    async with serving_bytes(b"\xff\xff\xff") as url:
        client = TritonClient(url)
        questions = client.read_server(), client.list_models(), client.list_regions(), client.read_config("tiny")
        for question in (*questions, client.infer(SPEC, [IMAGE], timeout_seconds=5), read_statistics(client, 5)):
            with pytest.raises(InvalidModelOutput, match="cannot be read"):
                await question
        assert not await client.is_ready("tiny")
        assert client.server is None
        await client.close()


KEY = "0123456789abcdef"
SHARED_MEMORY = ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "SystemSharedMemoryStatus")
CONTROLS = {*SHARED_MEMORY, "RepositoryIndex", "ModelStatistics"}
OTHERS = {"ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer"}


@pytest.mark.parametrize(
    ("content", "key"),
    [(f" {KEY}\r\n".encode(), KEY), *((content, "") for content in (b"\n", b"two words", "größe".encode(), b"a\x00b", b"a\x7f"))],
)
def test_metadata_has_the_key_of_the_file_unless_it_cannot_be_sent(tmp_path: Path, content: bytes, key: str) -> None:
    """Each RPC would fail with such a key; without a key, Triton reports what is missing."""
    (tmp_path / "control.key").write_bytes(content)

    assert control_key.metadata(tmp_path / "control.key") == ((("triton-grpc-protocol-nereid", key),) if key else ())
    assert control_key.metadata(tmp_path) == control_key.metadata(None) == ()


async def test_only_controls_carry_the_key_which_a_restart_may_change(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, path, keys = FakeTriton(), tmp_path / "control.key", dict[str, str | None]()

    async def note(name: str, answer: Any, request: Any, context: Any) -> Any:  # noqa: ANN401
        keys[name] = dict(context.invocation_metadata()).get("triton-grpc-protocol-nereid")
        return await answer(request, context)

    for name in CONTROLS | OTHERS:
        monkeypatch.setattr(fake, name, partial(note, name, getattr(fake, name)))
    async with serving(fake):
        client = TritonClient(fake.url, path)
        for key in (None, KEY, "other"):
            if key:
                path.write_text(key)
            await client.read_server()
            await client.is_ready("tiny")
            await client.read_config("tiny")
            await client.infer(SPEC, [IMAGE], timeout_seconds=5)
            await client.list_models()
            await client.register(arena)
            await client.list_regions()
            await client.unregister(arena.region)
            await read_statistics(client, 5)
            assert keys == dict.fromkeys(CONTROLS, key) | dict.fromkeys(OTHERS)
        await client.close()


@pytest.mark.faults
async def test_connection_may_take_as_long_as_a_lost_packet_delays_it() -> None:
    """TCP repeats a lost first packet after a second; the relay delays each connection by longer."""

    async def answer_late(*here: Any) -> None:  # noqa: ANN401
        await asyncio.sleep(1.5)
        await relay(here, await asyncio.open_connection("127.0.0.1", port))

    async with serving(FakeTriton()) as port, await asyncio.start_server(answer_late, "127.0.0.1", 0) as server:
        client = TritonClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await eventually(lambda: client.server is not None)
        await client.close()
