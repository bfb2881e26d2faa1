"""Search as a worker uses it: the engine, what puts images into it, and what works on without requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import uuid4

from app.cascade.catalog import Catalog
from app.errors import GatewayError
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.search.describe import ALL, Describer, Parts, SearchOptions, is_kept
from app.search.engine import EVERYTHING, PART_OF, Added, FacePart, Family, Filter, Hit, Known, NewImage, Page
from app.telemetry.metrics import Metrics

REGISTERED = "deepstack-face-"
"""With what the ids of pictures begin that were sent to register a face."""
LEAST_QUALITY = 0.15
"""Below it, faces are not told apart: see docs/how-to/faces.md."""
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
        counts.update(self.added.indexed)
        counts["ocr"] = min(1, counts["ocr"])
        return counts


class Search(Describer):
    """Search, in one worker."""

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
        known, models = await self.asking(call).find_content(tenant, new, others=options.skips_duplicates)
        if known is None:
            parts = options.parts
        else:
            twin, is_other = known.duplicate, has_id and known.duplicate.image_id != new.image_id
            # An image under another id has moved if its file is not in its place any more; otherwise, this one is a copy.
            if is_other and new.path and await self.files.has_moved(twin.path, image):
                await self.asking(call).rename(tenant, new.content_hash, twin.image_id, new.image_id)
                return None
            parts = await self.to_complete(options.parts, known.states, call)
        with self.pipeline.admission.memory.reserve(call.caller) as memory:  # also while the database is slow
            memory.add(0 if call.is_batch else len(image))
            failed = {} if known is None else await self._make_up_all(tenant, known, image, call)
            if known is None or any(parts):
                await self.describe(new, image, call, parts, models)
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
                    updated = await self.asking(call).update(tenant, twin.image_id, new.content_hash, new.path, new.metadata)
                if not has_id:
                    new.image_id = twin.image_id
                return None if updated is None else Ingested(new, Added("duplicate", {}, twin, updated))
            new.image_id = twin.image_id
        chosen: Any = {"skip_duplicates": options.skips_duplicates, "near": options.near, "completes": known and known.states}
        added = await self.asking(call).add(tenant, new, **chosen)
        return None if added.status == "duplicate" else Ingested(new, added)

    async def find_names(
        self, tenant: str, faces: Sequence[FacePart], least: float, call: CallContext, where: Filter = EVERYTHING
    ) -> list[Hit | None]:
        """Return for each face the nearest registered one, whose name it gets; None below the cosine `least` or `LEAST_QUALITY`."""
        # Of two faces that are nearest to the same name, the more similar one gets it.
        where, nearest = where._replace(is_registered=True), list[Hit | None]()
        for face in faces:
            hits: Sequence[Hit] = ()
            if face.vectors and face.quality >= LEAST_QUALITY:
                hits = await self.asking(call).nearest(tenant, "faces", face.vectors[0], Page(1), min_score=least, where=where)
            nearest.append(next(iter(hits), None))
        best = dict[str | None, Hit]()
        for hit in sorted(filter(None, nearest), key=lambda hit: -hit.score):
            best.setdefault(hit.name, hit)
        return [hit if hit is not None and best[hit.name] is hit else None for hit in nearest]

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

    search = Search(options, pipeline, catalog, metrics)
    working = asyncio.create_task(run_jobs(search))
    try:
        yield search
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await search.close()
