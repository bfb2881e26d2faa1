"""The control key is sent in requests of restricted protocols only."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.triton import control_key
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena
from app.triton.statistics import read_statistics
from tests.fakes.triton import SPEC, FakeTriton, serving

KEY = "0123456789abcdef"
SHARED_MEMORY = ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "SystemSharedMemoryStatus")
CONTROLS = {*SHARED_MEMORY, "RepositoryIndex", "ModelStatistics"}
OTHERS = {"ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer"}


class NotingTriton(FakeTriton):
    """Records the key of the last call, by name of the RPC."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_of_calls: dict[str, str | None] = {}


def _noting(name: str) -> Any:  # noqa: ANN401
    async def method(fake: NotingTriton, request: Any, context: Any) -> Any:  # noqa: ANN401
        fake.keys_of_calls[name] = dict(context.invocation_metadata()).get("triton-grpc-protocol-nereid")
        return await getattr(FakeTriton, name)(fake, request, context)

    return method


for _name in CONTROLS | OTHERS:
    setattr(NotingTriton, _name, _noting(_name))


@pytest.mark.parametrize(
    ("content", "key"),
    [(f" {KEY}\r\n".encode(), KEY), *((content, "") for content in (b"\n", b"two words", "größe".encode(), b"a\x00b", b"a\x7f"))],
)
def test_metadata_has_the_key_of_the_file_unless_it_cannot_be_sent(tmp_path: Path, content: bytes, key: str) -> None:
    """Each RPC would fail with such a key; without a key, Triton reports what is missing."""
    (tmp_path / "control.key").write_bytes(content)

    assert control_key.metadata(tmp_path / "control.key") == ((("triton-grpc-protocol-nereid", key),) if key else ())
    assert control_key.metadata(tmp_path) == control_key.metadata(None) == ()


async def test_only_controls_carry_the_key_which_a_restart_may_change(tmp_path: Path) -> None:
    fake, arena, path = NotingTriton(), Arena(4096), tmp_path / "control.key"
    async with serving(fake):
        client = TritonClient(fake.url, path)
        for key in (None, KEY, "other"):
            if key:
                path.write_text(key)
            await client.read_server()
            await client.is_ready("tiny")
            await client.read_config("tiny")
            await client.infer(SPEC, [np.zeros(SPEC.image_shape, np.uint8)], timeout_seconds=5)
            await client.list_models()
            await client.register(arena)
            await client.list_regions()
            await client.unregister(arena.region)
            await read_statistics(client, 5)
            assert fake.keys_of_calls == dict.fromkeys(CONTROLS, key) | dict.fromkeys(OTHERS)
        await client.close()
    arena.close()
