"""What goes on while something else is tested, such as clients that know the right answer to each of their requests."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from tests.faults.exchange import NO_ANSWER, Connection, encode
from tests.faults.models import Checksum
from tests.processes import PATIENCE_SECONDS

_PATH = "/predict/checksum?boxes=pixel"
_MAX_PAUSE_SECONDS = 0.2
_FAILURES = 20


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines until the block ends, and raise what one of them has raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def every(seconds: float, action: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(seconds)
        action()


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds, which is asked for in a thread."""
    end = monotonic() + PATIENCE_SECONDS
    while not await asyncio.to_thread(holds):
        assert monotonic() < end
        await asyncio.sleep(0.02)


@dataclass
class Traffic:
    url: str
    statuses: Counter[int] = field(default_factory=Counter)
    final: Counter[int] = field(default_factory=Counter)
    """Statuses of the answers without `Retry-After`."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are those of another image."""
    failures: list[str] = field(default_factory=list)
    """Bodies of the first answers of 500 and above."""
    slowest: float = 0.0
    """Seconds of the slowest answer."""

    @property
    def requests(self) -> int:
        return self.statuses.total()

    async def run_client(self, seed: int) -> None:
        """Ask for ever, over one connection as long as it lasts; pause for a moment when told to."""
        source = random.Random(seed)  # noqa: S311 - not a secret
        while True:
            try:
                async with await Connection.open(self.url) as connection:
                    while await self._ask(connection, Checksum.draw(source)):
                        pass
            except ConnectionError:
                self.statuses[NO_ANSWER] += 1
                await asyncio.sleep(_MAX_PAUSE_SECONDS)

    async def until(self, requests: int) -> None:
        end = monotonic() + PATIENCE_SECONDS
        while self.requests < requests:
            assert monotonic() < end, f"{self.requests} of {requests} requests: {self.statuses}"
            await asyncio.sleep(0.05)

    async def _ask(self, connection: Connection, checksum: Checksum) -> bool:
        """Send one request; return whether the connection can be used again."""
        answer = await connection.ask(encode(checksum.image, _PATH, Content_Type="image/png"))
        self.statuses[answer.status] += 1
        self.slowest = max(self.slowest, answer.seconds)
        if answer.status == 200:
            (found,) = json.loads(answer.body)["detections"]
            if not checksum.is_box(found):
                self.wrong.append(f"{found} for {checksum.box}")
        elif answer.status >= 500 and len(self.failures) < _FAILURES:
            self.failures.append(answer.body.decode(errors="replace"))
        if "retry-after" in answer.headers:
            await asyncio.sleep(_MAX_PAUSE_SECONDS)
        else:
            self.final[answer.status] += 1
        return answer.status != NO_ANSWER and answer.headers.get("connection") != "close"


@asynccontextmanager
async def traffic(url: str, clients: int = 8) -> AsyncIterator[Traffic]:
    """Let clients ask until the block ends; each answer must be that of its own image."""
    counted = Traffic(url)
    try:
        async with meanwhile(*(counted.run_client(seed) for seed in range(clients))):
            yield counted
    finally:
        print(*counted.failures, sep="\n")  # noqa: T201 - shown with a test that fails
    assert counted.wrong == []
