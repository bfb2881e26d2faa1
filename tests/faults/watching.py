"""A Prometheus that watches a gateway by rules of which the times are shortened, and clients that keep asking."""

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec

from bench.harness.triton import Triton
from bench.models.repository import write_fixture
from tests.faults import models
from tests.faults.exchange import ask
from tests.faults.meanwhile import meanwhile
from tests.faults.serving import Gateway
from tests.prometheus import CONFIG, Prometheus

_FACTOR = 12
SCRAPE_SECONDS = 2.0
"""The gateway waits one second for a Triton that does not answer, and a scrape may not take longer than its interval."""
PATIENCE_SECONDS = 180.0
_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+)([smh])")
_WINDOW = re.compile(r"(?<=\[)\d+[smh](?=\])")


class Watched(NamedTuple):
    """A gateway, its Triton, and the Prometheus that watches both."""

    gateway: Gateway
    triton: Triton
    prometheus: Prometheus

    async def until_firing(self, alert: str) -> dict[str, str]:
        return await self._until(alert, is_firing=True)

    async def until_silent(self, *alerts: str) -> None:
        for alert in alerts:
            await self._until(alert, is_firing=False)

    async def firing(self) -> set[str]:
        return set(await asyncio.to_thread(self.prometheus.firing))

    async def _until(self, alert: str, *, is_firing: bool) -> dict[str, str]:
        end = monotonic() + PATIENCE_SECONDS
        while (alert in (firing := await asyncio.to_thread(self.prometheus.firing))) != is_firing:
            assert monotonic() < end, f"{alert}: {firing}"
            await asyncio.sleep(SCRAPE_SECONDS)
        return firing.get(alert, {})


def shorten(duration: str) -> str:
    number, unit = _DURATION.fullmatch(duration).groups()  # type: ignore[union-attr]
    return f"{int(number) * _UNITS[unit] * 1000 // _FACTOR}ms"


def write_short_rules(folder: Path) -> None:
    """Write copies of the alert rules with shorter times."""
    for name in ("recordings.yml", "alerts.yml"):
        file = msgspec.yaml.decode((CONFIG.parent / name).read_bytes())
        for rule in (rule for group in file["groups"] for rule in group["rules"]):
            rule["expr"] = _WINDOW.sub(lambda found: shorten(found[0]), rule["expr"])
            if "for" in rule:
                rule["for"] = shorten(rule["for"])
        (folder / name).write_bytes(msgspec.json.encode(file))


def write_models(repository: Path) -> None:
    """Write the models that the faults need: among others `wait_20` and, like it, one that takes 3 s per image."""
    models.write(repository)
    write_fixture("wait_20", repository)
    shutil.copytree(repository / "wait_20", repository / "wait_3000")
    config = repository / "wait_3000" / "config.pbtxt"
    text = config.read_text(encoding="utf-8").replace('"wait_20"', '"wait_3000"').replace('"50"', '"3000"')
    config.write_text(text, encoding="utf-8")


@asynccontextmanager
async def asking(gateway: Gateway, *requests: bytes, every: float = 0.05) -> AsyncIterator[Counter[int]]:
    """Send requests in turn during a block, without waiting for answers; count their statuses."""
    statuses: Counter[int] = Counter()
    asked: set[asyncio.Task[None]] = set()

    async def count(request: bytes) -> None:
        statuses[(await ask(gateway.url, request)).status] += 1

    async def send() -> None:
        for request in cycle(requests):
            asked.add(task := asyncio.create_task(count(request)))
            task.add_done_callback(asked.discard)
            await asyncio.sleep(every)

    async with meanwhile(send()):
        yield statuses
    await asyncio.gather(*asked)
