"""Search as a worker uses it: the engine, what puts images into it, and what works on without requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from app.cascade.catalog import Catalog
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.search.database import Database
from app.search.describe import ALL, Described, Describer, Parts, SearchOptions
from app.search.engine import Added, NewImage
from app.search.postgres.engine import PostgresEngine
from app.telemetry.metrics import Metrics

# Hashing a larger file may take a millisecond or more.
_LARGE_BYTES = 1 << 20


class IngestOptions(NamedTuple):
    """How an image is added."""

    parts: Parts = ALL
    skips_duplicates: bool = True
    near: float | None = 0.99
    """Cosine from which an image is a near duplicate; None if that does not matter."""


class Ingested(NamedTuple):
    """What became of an image that was sent."""

    image: NewImage
    """Not described if its content is known."""
    added: Added
    described: Described

    def counts(self) -> Counter[str]:
        """Return what the image adds to the sums over many."""
        is_duplicate = self.added.status == "duplicate"
        is_near = not is_duplicate and self.added.duplicate is not None
        counts = Counter(duplicates=int(is_duplicate), processed=int(not is_duplicate), near_duplicates=int(is_near))
        counts.update({name: number for name, number in self.added.indexed.items() if name != "ocr"})
        counts["ocr"] = min(1, self.added.indexed.get("ocr", 0))
        return counts


@dataclass
class Search(Describer):
    """Search, in one worker."""

    new_job: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a job, which is begun at once."""

    async def why_unusable(self) -> str | None:
        """Return why the database cannot be asked; None if it can."""
        return await self.database.why_unusable()

    async def ingest(  # noqa: PLR0913 - what is told of an image
        self,
        tenant: str,
        image: bytes,
        image_id: str | None,
        call: CallContext,
        options: IngestOptions,
        *,
        path: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Ingested:
        """Add an encoded image; it is committed when this returns. Content that is known is not described again."""
        content, own = await hash_content(image), {"path": path, "metadata": metadata or {}}
        new = NewImage(image_id=image_id or str(uuid4()), content_hash=content, width=0, height=0, **own)  # type: ignore[arg-type]
        async with self.database.asking(call) as engine:
            known = await engine.find_content(tenant, content) if options.skips_duplicates else None
        if known is not None:
            new.image_id = image_id or known.image_id
            found = Ingested(new, Added("duplicate", {}, known), Described(None, {}))
        else:
            with self.pipeline.admission.memory.reserve(call.caller) as memory:  # also while the database is slow
                memory.add(0 if call.is_batch else len(image))
                described = await self.describe(new, image, call, options.parts)
                async with self.database.asking(call) as engine:
                    added = await engine.add(tenant, new, skip_duplicates=options.skips_duplicates, near=options.near)
            found = Ingested(new, added, described)
        self.metrics.ingested_images.add(1, found.added.status)
        return found


async def hash_content(image: bytes) -> bytes:
    """Return the 32 bytes by which a content is known."""
    from blake3 import blake3  # noqa: PLC0415 - an extra

    return await asyncio.to_thread(lambda: blake3(image).digest()) if len(image) > _LARGE_BYTES else blake3(image).digest()


@asynccontextmanager
async def open_search(options: SearchOptions, pipeline: Pipeline, catalog: Catalog, metrics: Metrics) -> AsyncIterator[Search]:
    """Open search; without its database it opens, too, and answers as soon as that can be reached."""
    from app.search.jobs import run_jobs  # noqa: PLC0415 - it uses this module

    engine = PostgresEngine(options.database_url, options.connections)
    checking = PostgresEngine(options.database_url, 1)  # a connection of its own: all others may be in use
    search = Search(Database(engine, checking, metrics, options.connections), pipeline, catalog, metrics, options)
    working = asyncio.create_task(run_jobs(search))
    try:
        yield search
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await asyncio.gather(engine.close(), checking.close())
