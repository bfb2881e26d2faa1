"""The control key is sent in requests of restricted protocols only."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from app.embedded.launch import command
from app.embedded.server import EmbeddedTriton
from app.errors import GatewayError, TritonUnavailable
from app.settings.schema import Settings
from app.triton import control_key
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena
from app.triton.statistics import read_statistics
from tests.fakes.triton import SPEC, FakeTriton, serving
from tests.support import free_port, triton_home

KEY = "0123456789abcdef"
HEADER = "triton-grpc-protocol-nereid"
CONTROLS = {
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "SystemSharedMemoryStatus",
    "RepositoryIndex",
    "ModelStatistics",
}
OTHERS = {"ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer"}


class NotingTriton(FakeTriton):
    """Records the key with which it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_of_calls: dict[str, str | None] = {}
        """Key of the last call, by name of the RPC."""


def _noting(name: str) -> Any:  # noqa: ANN401
    async def method(fake: NotingTriton, request: Any, context: Any) -> Any:  # noqa: ANN401
        fake.keys_of_calls[name] = dict(context.invocation_metadata()).get(HEADER)
        return await getattr(FakeTriton, name)(fake, request, context)

    return method


for _name in CONTROLS | OTHERS:
    setattr(NotingTriton, _name, _noting(_name))


@pytest.fixture
async def noting() -> AsyncIterator[NotingTriton]:
    fake = NotingTriton()
    async with serving(fake):
        yield fake


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "control.key"
    path.write_text(KEY)
    return path


def write(path: Path, key: str | None) -> None:
    """Write a key file; with None, remove it."""
    if key is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(key)


async def call_everything(url: str, key_path: Path | None) -> None:
    client, arena = TritonClient(url, key_path), Arena(4096)
    await client.read_server()
    await client.is_ready("tiny")
    await client.read_config("tiny")
    await client.infer(SPEC, [np.zeros(SPEC.image_shape, np.uint8)], timeout_seconds=5)
    await client.list_models()
    await client.register(arena)
    await client.list_regions()
    await client.unregister(arena.region)
    await read_statistics(client, 5)
    await client.close()
    arena.close()


@pytest.mark.parametrize("content", [KEY, f"{KEY}\n", f" {KEY}\r\n"])
def test_the_metadata_has_the_key_of_the_file(key_file: Path, content: str) -> None:
    key_file.write_bytes(content.encode())

    assert control_key.metadata(key_file) == ((HEADER, KEY),)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines", b"two words", "größe".encode(), b"\xff", b"a\x00b", b"a\x7f"])
def test_content_that_cannot_be_sent_is_no_key(key_file: Path, content: bytes) -> None:
    """Each RPC would fail with such a key; without a key, Triton reports what is missing."""
    key_file.write_bytes(content)

    assert control_key.metadata(key_file) == ()


def test_without_a_file_there_is_no_key(tmp_path: Path) -> None:
    assert control_key.metadata(None) == ()
    assert control_key.metadata(tmp_path / "control.key") == ()
    assert control_key.metadata(tmp_path) == ()


async def test_only_controls_carry_the_key(noting: NotingTriton, key_file: Path) -> None:
    await call_everything(noting.url, key_file)

    assert noting.keys_of_calls == dict.fromkeys(CONTROLS, KEY) | dict.fromkeys(OTHERS)


async def test_a_triton_without_restrictions_gets_no_key(noting: NotingTriton, tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing"):
        noting.keys_of_calls.clear()
        await call_everything(noting.url, path)
        assert noting.keys_of_calls == dict.fromkeys(CONTROLS | OTHERS)


async def test_the_key_is_read_for_each_call(noting: NotingTriton, key_file: Path) -> None:
    """A restarted Triton has another key."""
    client = TritonClient(noting.url, key_file)
    for key in (None, "first", "second"):
        write(key_file, key)
        await client.list_models()
        await client.list_regions()
        assert set(noting.keys_of_calls.values()) <= {key, None}
        assert (noting.keys_of_calls["RepositoryIndex"], noting.keys_of_calls["SystemSharedMemoryStatus"]) == (key, key)
    await client.close()


@pytest.mark.system
async def test_a_real_triton_refuses_its_controls_without_its_key(
    settings: Settings, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error differs from that of a Triton that does not answer; other RPCs still work. HTTP has an option of its own."""
    port, restricted = free_port(), f"model-repository,shared-memory:{control_key.HEADER}={KEY}"

    def command_with_key(settings: Settings, folder: Path) -> list[str]:
        options = [option for option in command(settings, folder) if option != "--allow-http=false"]
        protocols = [f"--grpc-restricted-protocol={restricted}", f"--http-restricted-api={restricted}"]
        return [*options, *protocols, "--http-address=127.0.0.1", f"--http-port={port}"]

    monkeypatch.setattr("app.embedded.server.command", command_with_key)
    (tmp_path / "home").mkdir()
    own = msgspec.structs.replace(settings, triton_home=triton_home(tmp_path / "home"), model="six_columns")
    triton, arena = EmbeddedTriton(own), Arena(4096)
    await asyncio.to_thread(triton.start)
    owner = TritonClient(own.triton_address, key_file)
    write(tmp_path / "other.key", "0" * 64)
    for path in (None, tmp_path / "other.key"):
        client = TritonClient(own.triton_address, path)
        asked_to_load = client.ask("RepositoryModelLoad", 5, model_name="six_columns")
        for control in (client.register(arena), client.list_regions(), client.list_models(), asked_to_load):
            with pytest.raises(GatewayError, match="does not allow the gateway to do this") as caught:
                await control
            assert not isinstance(caught.value, TritonUnavailable)
        await owner.register(arena)
        await client.unregister(arena.region)
        assert arena.region in await owner.list_regions()
        assert (await client.read_server()).version
        assert await client.is_ready("six_columns")
        await owner.unregister(arena.region)
        assert arena.region not in await owner.list_regions()
        await client.close()
    await owner.ask("RepositoryModelLoad", 5, model_name="six_columns")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/v2") as http:
        for key, status in ((KEY, 200), ("0" * 64, 403)):
            headers = {control_key.HEADER: key}
            assert (await http.post("/repository/models/six_columns/load", headers=headers)).status_code == status
            assert (await http.get("/systemsharedmemory/status", headers=headers)).status_code == status
    await owner.close()
    await asyncio.to_thread(triton.stop)
    arena.close()
