"""Large responses: their memory is counted until the client has them, however slow it is."""

import asyncio
from collections.abc import Iterator

import pytest
from litestar.types import Message

from app.api.answering.responses import LargeResponse
from app.api.context import PAUSE_SECONDS, BodyLimits, RequestContext
from app.errors import GatewayFull
from app.resilience.fairness import ANYBODY
from app.resilience.memory import MemoryBudget
from app.resilience.worker_table import WorkerTable
from tests.api.virtual_time import in_virtual_time, now
from tests.support import receiving

LARGE = bytes(range(256)) * 4096


class Client:
    def __init__(self, memory: MemoryBudget, *, total: float = 10, seconds: float = 0) -> None:
        self.context = RequestContext("r1", "")
        self.context.body_limits = BodyLimits(1, total)
        self.messages: list[Message] = []
        self.reserved: list[int] = []
        self._memory = memory
        self._seconds = seconds

    async def get(self, response: LargeResponse) -> bytes:
        scope: dict[str, object] = {}
        scope["state"] = {"request_context": self.context}
        await response(scope, receiving(), self._take)  # type: ignore[arg-type]
        return b"".join(message["body"] for message in self.messages[1:])  # type: ignore[typeddict-item]

    async def _take(self, message: Message) -> None:
        self.messages.append(message)
        self.reserved.append(self._memory.own_bytes)
        await asyncio.sleep(self._seconds)


@pytest.fixture
def memory(table: WorkerTable) -> Iterator[MemoryBudget]:
    """A budget of 2 MiB that must be free again afterwards."""
    budget = MemoryBudget(table, "memory", 2 << 20)
    yield budget
    assert budget.own_bytes == 0


@pytest.mark.parametrize("body", [LARGE, LARGE[: 1 << 18], LARGE[: (1 << 18) + 1]])
async def test_body_arrives_whole(memory: MemoryBudget, body: bytes) -> None:
    client = Client(memory)

    assert await client.get(LargeResponse(body, "image/png", memory)) == body
    assert client.messages[0]["headers"] == [  # type: ignore[typeddict-item]
        (b"content-type", b"image/png"),
        (b"content-length", str(len(body)).encode()),
        (b"vary", b"Accept"),
    ]
    pieces = client.messages[1:]
    assert [message["more_body"] for message in pieces] == [True] * (len(pieces) - 1) + [False]  # type: ignore[typeddict-item]
    assert max(len(message["body"]) for message in pieces) <= 1 << 18  # type: ignore[typeddict-item]
    assert set(client.reserved) == {len(body)}
    assert not client.context.is_client_gone


@pytest.mark.parametrize(("seconds", "total", "left_at", "pieces"), [(12, 30, 12 + PAUSE_SECONDS, 1), (7, 8, 7 + 8, 2)])
@in_virtual_time
async def test_client_that_does_not_read_is_left(
    memory: MemoryBudget, seconds: float, total: float, left_at: float, pieces: int
) -> None:
    client = Client(memory, total=total, seconds=seconds)  # for each message, the first of which has no body

    await client.get(LargeResponse(LARGE, "image/png", memory))

    assert (now(), len(client.messages)) == (left_at, 1 + pieces)
    assert client.context.is_client_gone


async def test_response_that_has_no_room_is_rejected(memory: MemoryBudget) -> None:
    client = Client(memory)
    with memory.reserve(ANYBODY) as other:
        other.add(2 << 20)
        with pytest.raises(GatewayFull):
            await client.get(LargeResponse(LARGE, "image/png", memory))

    assert client.messages == []
