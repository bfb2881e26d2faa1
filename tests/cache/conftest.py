"""A worker with a cache in memory, a fake Triton whose model finds two objects, and fingerprints that tests set."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.features.cache.cache import ResultCache
from app.features.cache.fingerprints import Fingerprints
from app.features.cache.instruments import Instruments
from app.features.cache.memory import MemoryStore, open_file
from app.features.cache.store import Store
from app.imaging.header import PixelLimits
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.telemetry.timing import CACHE, Timing
from tests.fakes.triton import infer_response
from tests.support import LIMITS, SCENE, TABLE
from tests.world import OPTIONS, World, open_world

SECRET, INSTRUMENTS = b"s" * 64, Instruments(TABLE)
OBJECTS = np.array([[2, 3, 20, 25, 0.9, 0], [10, 4, 30, 20, 0.4, 1]], np.float32)


class Caching:
    def __init__(self, world: World) -> None:
        self.world = world
        self.networks = {"1": b"a network"}
        """Fingerprints by version."""
        self.fingerprints = Fingerprints(lambda _, version: self.networks.get(version, b""))
        self.store: Store = MemoryStore(open_file(1 << 20), 60, INSTRUMENTS)
        self.cache = self.open()

    def open(self, limits: PixelLimits = LIMITS.pixels, *, is_shared: bool = False) -> ResultCache:
        cache = ResultCache(self.store, self.fingerprints, SECRET, limits, INSTRUMENTS, is_shared=is_shared)
        self.world.pipeline.finder = self.cache = cache
        return cache

    async def spec(self) -> ModelSpec:
        return await self.world.pipeline.prepare("tiny", Deadline.after(30))

    async def ask(
        self,
        data: bytes = SCENE,
        *,
        seconds: float = 30,
        call: dict[str, Any] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> tuple[str, Detections]:
        """Detect objects; return how the cache has answered, and what was found."""
        context = CallContext(Deadline.after(seconds), Timing(), "id", **{"caller": ANYBODY, **(call or {})})
        found = await self.world.pipeline.run(data, OPTIONS._replace(**options), context)
        await asyncio.gather(*self.cache.storing)
        return context.timing.descriptions.get(CACHE, ""), found

    async def result(self, data: bytes = SCENE, **call: Any) -> str:  # noqa: ANN401
        """Detect objects; return how the cache has answered."""
        return (await self.ask(data, call=call))[0]


@pytest.fixture
async def caching() -> AsyncIterator[Caching]:
    """A worker that knows the network of its model."""
    async with open_world() as world:
        world.fake.answer = infer_response(output0=OBJECTS)
        made = Caching(world)
        made.fingerprints.get(await made.spec())
        await made.fingerprints.refresh()
        yield made
        await made.cache.close()
