"""Search as a worker uses it: the engine, what puts images into it, and what works on without requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from app.cascade.catalog import Catalog
from app.errors import GatewayError
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.search.database import Database
from app.search.describe import ALL, Describer, Parts, SearchOptions, is_kept
from app.search.engine import PART_OF, Added, Family, Known, NewImage
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

    def counts(self) -> Counter[str]:
        """Return what the image adds to the sums over many."""
        is_duplicate, is_completed = self.added.status == "duplicate", self.added.status == "completed"
        is_near = not is_duplicate and self.added.duplicate is not None
        counts = Counter(duplicates=int(is_duplicate), processed=int(not is_duplicate), near_duplicates=int(is_near))
        counts.update(completed=int(is_completed), updated=int(bool(self.added.updated)))
        counts.update(f"left_out:{part}" for part in self.image.errors)
        counts.update({str(name): number for name, number in self.added.indexed.items()})
        counts["ocr"] = min(1, counts["ocr"])
        return counts


@dataclass
class Search(Describer):
    """Search, in one worker."""

    new_job: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is a job, which is begun at once."""

    async def why_unusable(self) -> str | None:
        """Return why the database cannot be asked; None if it can."""
        return await self.database.why_unusable()

    @property
    def is_read_only(self) -> bool:
        """Whether the database took no images when `why_unusable` last asked it."""
        return self.database.is_read_only

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
        """Add an encoded image; it is committed when this returns. Of content that is known, only what is missing is added."""
        content, found = await hash_content(image), None
        while found is None:  # again if another request has added or changed it meanwhile
            new = NewImage(image_id=image_id or str(uuid4()), content_hash=content, path=path, metadata=metadata or {})
            found = await self._ingest(tenant, new, image, call, options, has_id=image_id is not None)
        self.metrics.ingested_images.add(1, found.added.status)
        return found

    async def _ingest(  # noqa: PLR0913 - what is told of an image
        self, tenant: str, new: NewImage, image: bytes, call: CallContext, options: IngestOptions, *, has_id: bool
    ) -> Ingested | None:
        async with self.database.asking(call) as engine:
            known = await engine.find_content(tenant, new.content_hash, new.image_id, others=options.skips_duplicates)
        if known is None:
            parts = options.parts
        else:
            twin, is_other = known.duplicate, has_id and known.duplicate.image_id != new.image_id
            # An image under another id has moved if its file is not in its place any more; otherwise, this one is a copy.
            if is_other and new.path and await self.files.has_moved(twin.path, image):
                async with self.database.asking(call) as engine:
                    await engine.rename(tenant, new.content_hash, twin.image_id, new.image_id)
                return None
            parts = await self.to_complete(options.parts, known.states, call)
        with self.pipeline.admission.memory.reserve(call.caller) as memory:  # also while the database is slow
            memory.add(0 if call.is_batch else len(image))
            failed = {} if known is None else await self._make_up_all(tenant, known, image, call)
            if known is None or any(parts):
                await self.describe(new, image, call, parts)
            new.errors = failed | new.errors
            return await self._keep(tenant, new, known, call, options, has_id=has_id)

    async def _keep(  # noqa: PLR0913 - what is known of an image
        self, tenant: str, new: NewImage, known: Known | None, call: CallContext, options: IngestOptions, *, has_id: bool
    ) -> Ingested | None:
        if known is not None:
            twin, kept = known.duplicate, [part for part in known.states or () if is_kept(known.states or {}, part)]
            if has_id and new.image_id != twin.image_id:  # a copy
                new.path, new.metadata = None, {}
            if not new.states or not all(is_kept(new.states, part) for part in kept):
                updated: Sequence[str] | None = ()
                if new.path or new.metadata:
                    async with self.database.asking(call) as engine:
                        updated = await engine.update(tenant, twin.image_id, new.content_hash, new.path, new.metadata)
                if not has_id:
                    new.image_id = twin.image_id
                return None if updated is None else Ingested(new, Added("duplicate", {}, twin, updated))
            new.image_id = twin.image_id
        chosen: Any = {"skip_duplicates": options.skips_duplicates, "near": options.near, "completes": known and known.states}
        async with self.database.asking(call) as engine:
            added = await engine.add(tenant, new, **chosen)
        return None if added.status == "duplicate" else Ingested(new, added)

    async def _make_up_all(self, tenant: str, known: Known, image: bytes, call: CallContext) -> dict[str, str]:
        # Return which parts could not be made up, and why: a new model that fails or hangs keeps nothing else from an image.
        failed = {}
        for family, model in known.lacks.items():
            try:
                async with asyncio.timeout(max(0, call.deadline.remaining / 2)):
                    await self.make_up(tenant, known.duplicate.image_id, family, model, image, call)
            except (GatewayError, TimeoutError) as error:
                failed[PART_OF[family]] = getattr(error, "detail", f"{model} did not answer in time")
        return failed

    async def make_up(  # noqa: PLR0913, PLR0917 - what it is about
        self, tenant: str, image_id: str, family: Family, model: str, content: bytes, call: CallContext
    ) -> bool:
        """Add the vectors of a model that an image lacks; return False if its content is another one."""
        if not (parts := await self.engine.parts(tenant, image_id, family)):
            return True  # it was deleted meanwhile
        vectors = await self.describe_parts(content, parts, model, call)
        return await self.engine.add_vectors(tenant, image_id, await hash_content(content), vectors)


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
