"""Clients that know the right answer to each of their requests, and count what they get."""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic

from tests.faults.conftest import RecordFigure
from tests.faults.exchange import NO_ANSWER, Connection, encode
from tests.faults.meanwhile import meanwhile
from tests.faults.models import Checksum

_PATH = "/predict/checksum?boxes=pixel"
_MAX_PAUSE_SECONDS = 0.2
_PATIENCE_SECONDS = 300.0


@dataclass
class Traffic:
    url: str
    by_client: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    """Statuses of the answers of each client."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are those of another image."""
    slowest: float = 0.0
    """Seconds of the slowest answer."""

    @property
    def statuses(self) -> Counter[int]:
        return sum(self.by_client.values(), Counter())

    @property
    def requests(self) -> int:
        return self.statuses.total()

    async def run_client(self, seed: int) -> None:
        """Ask for ever, over one connection as long as it lasts; pause for a moment when told to."""
        source = random.Random(seed)  # noqa: S311 - not a secret
        while True:
            try:
                async with await Connection.open(self.url) as connection:
                    while await self._ask(connection, Checksum.draw(source), self.by_client[seed]):
                        pass
            except ConnectionError:
                self.by_client[seed][NO_ANSWER] += 1
                await asyncio.sleep(_MAX_PAUSE_SECONDS)

    async def until(self, requests: int) -> None:
        until = monotonic() + _PATIENCE_SECONDS
        while self.requests < requests:
            assert monotonic() < until, f"{self.requests} of {requests} requests: {self.statuses}"
            await asyncio.sleep(0.05)

    def record(self, record_figure: RecordFigure, label: str, *, slowest: float | None = None) -> None:
        """Record what there was: requests, answers by status, and seconds of the slowest answer with their limit."""
        record_figure(f"{label}: requests", self.requests)
        for status, count in sorted(self.statuses.items()):
            record_figure(f"{label}: answers {status or 'none'}", count)
        record_figure(f"{label}: slowest answer, s", self.slowest, slowest)

    async def _ask(self, connection: Connection, checksum: Checksum, statuses: Counter[int]) -> bool:
        """Send one request; return whether the connection can be used again."""
        answer = await connection.ask(encode(checksum.image, _PATH, Content_Type="image/png"))
        statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        if answer.status == 200:
            (found,) = json.loads(answer.body)["detections"]
            if not checksum.is_box(found):
                self.wrong.append(f"{found} for {checksum.box}")
        if "retry-after" in answer.headers:
            await asyncio.sleep(_MAX_PAUSE_SECONDS)
        return answer.status != NO_ANSWER and answer.headers.get("connection") != "close"


@asynccontextmanager
async def traffic(url: str, clients: int = 8) -> AsyncIterator[Traffic]:
    """Let clients ask until the block ends; each answer must be that of its own image."""
    counted = Traffic(url)
    async with meanwhile(*(counted.run_client(seed) for seed in range(clients))):
        yield counted
    assert counted.wrong == []
