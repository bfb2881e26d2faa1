"""Work without a request, in chunks after which another worker can go on: indexing a folder, making an index with another model."""

import asyncio
import os
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import TypeVar
from uuid import NAMESPACE_URL, uuid5

import msgspec
import structlog

from app.errors import DeadlinePassed, GatewayError, IndexRefused, InferenceFailed, InvalidParameter, NotOffered, SearchUnavailable
from app.model.heads import EmbeddingHead
from app.model.reference import refer_to
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import LOW, Caller
from app.search.engine import Family, Job
from app.search.service import IngestOptions, Search, hash_content
from app.telemetry.timing import Timing

CHUNK = 64
SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".avif", ".heic", ".heif", ".tif", ".tiff"))
_CALLER = Caller("jobs", priority=LOW)
# A job that was not saved for so long belongs to nobody; it is saved more often, and looked for so often.
_LEASE_SECONDS, _BEAT_SECONDS, _POLL_SECONDS = 20.0, 4.0, 2.0
# After so long, and ten times what listing its folder has taken, a job waits for those of others.
_TURN_SECONDS = 30.0
# Attempts with an image while the gateway is full or a server away, and with one that fails; the longest pause between them.
_ATTEMPTS, _FAILURES, _PAUSE_SECONDS = 100, 3, 5.0
_MAX_FILES, _MAX_SKIPPED, _MAX_ID = 1_000_000, 20, 256

T = TypeVar("T")
LOG = structlog.get_logger()


class DirectoryOptions(msgspec.Struct):
    """What a job of the kind `directory` does."""

    directory: str
    recursive: bool
    max_images: int | None
    ingest: IngestOptions


class ReindexOptions(msgspec.Struct):
    """What a job of the kind `reindex` does."""

    family: Family
    model: str
    allow_missing: bool


class _LostError(Exception):
    """Another worker has taken the job."""


class _TurnOverError(Exception):
    """It is the turn of another job."""


def allowed_folder(folders: Sequence[Path], directory: str) -> Path:
    """Return a folder in `folders`, or below one of them, without symbolic links; else raise an error. Call this in a thread."""
    if not folders:
        raise NotOffered("no folder may be indexed; NEREID_SEARCH_FOLDERS names those that may")
    with suppress(OSError, ValueError, RuntimeError):  # a zero byte; a loop of links
        path = Path(directory).resolve(strict=True)
        if path.is_dir() and any(path.is_relative_to(folder) for folder in folders):
            return path
    raise InvalidParameter("directory: expected a folder in NEREID_SEARCH_FOLDERS, or below one of these")


def list_images(directory: Path, *, recursive: bool) -> tuple[list[str], Counter[str]]:
    """Return the paths of all images below a folder, sorted, and the suffixes of other files. Links to folders are not followed."""
    paths, others = list[str](), Counter[str]()
    for folder, folders, names in os.walk(directory):
        if not recursive:
            folders.clear()
        for name in names:
            suffix = Path(name).suffix.lower()
            if suffix in SUFFIXES and (path := os.path.join(folder, name)).isprintable():  # noqa: PTH118 - of a million paths
                paths.append(path)
            else:
                others[suffix[:16] if suffix.isprintable() else ""] += 1
        if len(paths) > _MAX_FILES:
            raise InvalidParameter(f"the folder has more than {_MAX_FILES} images; index those in it one by one")
    return sorted(paths), others


def read_allowed(path: str, folders: Sequence[Path], max_bytes: int) -> bytes | None:
    """Return the content of a file in the allowed folders; None if there is none, or it is too large. Call this in a thread."""
    with suppress(OSError, ValueError):
        if stat.S_ISREG(os.stat(path).st_mode):  # noqa: PTH116 - opening a device may do something
            with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123 - as above
                opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))  # noqa: PTH115 - whatever a link has led to
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and any(map(opened.is_relative_to, folders)):
                    content = file.read(max_bytes + 1)
                    return content if 0 < len(content) <= max_bytes else None
    return None


async def run_jobs(search: Search) -> None:
    """Work on the jobs of this host's database, one at a time; never returns."""
    while True:
        search.new_job.clear()
        try:
            if (job := await search.engine.claim_job(_LEASE_SECONDS)) is not None:
                await _Work(search, job).run()
                continue
        except SearchUnavailable:
            pass
        except Exception:
            LOG.exception("a job could not be worked on")
        with suppress(TimeoutError):
            await asyncio.wait_for(search.new_job.wait(), _POLL_SECONDS)


class _Work:
    def __init__(self, search: Search, job: Job) -> None:
        self._search, self._engine, self._job, self._limits = search, search.engine, job, search.pipeline.limits
        self._slots = asyncio.Semaphore(2 * self._limits.decode_threads)  # while some are decoded, models answer about others
        self._turn_end = monotonic() + _TURN_SECONDS

    async def run(self) -> None:
        job = self._job
        try:
            job.error = await (self._index_directory() if job.kind == "directory" else self._reindex())
        except _LostError:
            return
        except (SearchUnavailable, _TurnOverError):  # whoever takes it next goes on
            job.state = "waiting"
            with suppress(_LostError):
                await self._save()
            return
        except asyncio.CancelledError:
            job.state = "waiting"
            with suppress(SearchUnavailable):
                await self._engine.save_job(job)
            raise
        except GatewayError as error:
            job.error = error.detail
        except Exception:
            LOG.exception("a job failed unexpectedly", job=job.job_id, kind=job.kind)
            job.error = "it failed unexpectedly; the log says why"
        job.state, job.ended_at = "failed" if job.error else "done", datetime.now(UTC)
        with suppress(_LostError):
            await self._save()
        LOG.info("a job has ended", job=job.job_id, kind=job.kind, state=job.state, error=job.error, **job.counts)

    async def _save(self) -> None:
        while True:
            with suppress(SearchUnavailable):
                if await self._engine.save_job(self._job):
                    return
                raise _LostError
            await asyncio.sleep(1)

    async def _go_on(self, position: str) -> None:
        self._job.position = position
        if monotonic() >= self._turn_end:
            raise _TurnOverError
        await self._save()

    async def _index_directory(self) -> None:
        job, options = self._job, self._search.options
        wanted = msgspec.convert(job.options, DirectoryOptions)
        directory = await asyncio.to_thread(allowed_folder, options.folders, wanted.directory)
        listing = asyncio.create_task(asyncio.to_thread(list_images, directory, recursive=wanted.recursive))
        began = monotonic()
        await self._wait({listing})
        self._turn_end = max(self._turn_end, monotonic() + 10 * (monotonic() - began))
        paths, others = listing.result()
        job.counts["total_files"] = len(paths := paths[: wanted.max_images])
        job.counts |= {f"skipped:{suffix}": number for suffix, number in others.most_common(_MAX_SKIPPED)}
        left = [path for path in paths if path > job.position]
        for start in range(0, len(left), CHUNK):
            await self._do(chunk := left[start : start + CHUNK], partial(self._index, wanted.ingest))
            await self._go_on(chunk[-1])

    async def _index(self, options: IngestOptions, path: str, call: CallContext) -> Mapping[str, int]:
        if (image := await self._read(path)) is None:
            return {"errors": 1, "error:not_readable": 1}
        first = self._search.options.folders[0]
        # What lies in other folders may have the same name.
        name = str(Path(path).relative_to(first)) if Path(path).is_relative_to(first) else path
        image_id = name if len(name) <= _MAX_ID and "/" not in name else str(uuid5(NAMESPACE_URL, name))
        return (await self._search.ingest(self._job.tenant, image, image_id, call, options, path=path)).counts()

    async def _reindex(self) -> str | None:
        job, wanted = self._job, msgspec.convert(self._job.options, ReindexOptions)
        is_changed = True
        while is_changed:  # meanwhile, images may have been added that were described before
            is_changed = bool(job.position)
            if not job.position:
                job.counts["unreadable"] = 0
            while images := await self._engine.images_without(wanted.family, job.position, CHUNK):
                before = job.counts.get("processed", 0)
                await self._do(images, partial(self._redescribe, wanted))
                is_changed |= job.counts.get("processed", 0) > before
                await self._go_on("{}/{}".format(*images[-1]))
            job.position = ""
        missing = job.counts.get("unreadable", 0)
        used = await self._engine.models(wanted.family)
        if used.active == wanted.model:  # a worker died after it had switched
            return None
        if used.next != wanted.model:
            return "another job has ended this change of the model"
        if missing and not wanted.allow_missing:
            what = "ingest them again and repeat this, which then goes on, or repeat it with allow_missing=true, after which they"
            return f"{missing} images cannot be read again, so the index stays as it is: {what} are not found any more"
        await self._engine.end_model(wanted.family, switch=True)
        return None

    async def _redescribe(self, wanted: ReindexOptions, image: tuple[str, str, str | None], call: CallContext) -> dict[str, int]:
        tenant, image_id, path = image
        content = None if path is None else await self._read(path)
        if content is None:
            return {"unreadable": 1}
        if not (parts := await self._engine.parts(tenant, image_id, wanted.family)):
            return {}  # it was deleted meanwhile
        vectors = await self._search.describe_parts(content, parts, wanted.model, call)
        is_same = await self._engine.add_vectors(tenant, image_id, await hash_content(content), vectors)
        return {"processed" if is_same else "unreadable": 1}

    async def _read(self, path: str) -> bytes | None:
        options = self._search.options
        return await asyncio.to_thread(read_allowed, path, options.folders, options.max_image_bytes)

    async def _do(self, items: Iterable[T], work: Callable[[T, CallContext], Awaitable[Mapping[str, int]]]) -> None:
        # The counts change once all items are done, because a part of a chunk is done again.
        counts = Counter[str]()

        async def one(item: T) -> None:
            async with self._slots:
                counts.update(await self._try(partial(work, item)))

        tasks = {asyncio.create_task(one(item)) for item in items}
        await self._wait(tasks)
        for task in tasks:
            task.result()
        self._job.counts = dict(Counter(self._job.counts) + counts)

    async def _wait(self, tasks: set[asyncio.Task[T]]) -> None:
        pending = tasks
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=_BEAT_SECONDS)
                if pending:
                    await self._save()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, work: Callable[[CallContext], Awaitable[Mapping[str, int]]]) -> Mapping[str, int]:
        code = ""
        for attempt in count(1):
            call = CallContext(Deadline.after(self._limits.max_timeout_seconds), Timing(), f"job-{self._job.job_id}", _CALLER)
            try:
                return await work(call._replace(is_batch=True, uses_cache=False))
            except IndexRefused:
                raise
            except GatewayError as error:
                attempts = _FAILURES if isinstance(error, DeadlinePassed | InferenceFailed) else 1
                code, attempts = error.code, _ATTEMPTS if error.retry_after_seconds else attempts
            except Exception:
                LOG.exception("an image failed unexpectedly", job=self._job.job_id)
                code, attempts = "internal", 1
            if attempt >= attempts:
                break
            await asyncio.sleep(min(0.1 * 2**attempt, _PAUSE_SECONDS))
        return {"unreadable" if self._job.kind == "reindex" else "errors": 1, f"error:{code}": 1}


async def begin_reindex(search: Search, family: Family, call: CallContext) -> str:
    """Keep vectors of the newest default model beside those that are searched; return its reference, or raise InvalidParameter."""
    active, following = await search.engine.models(family)
    spec = await search.newest_model(family, call)
    reference = refer_to(spec.name, spec.version)
    if active in {None, reference}:
        why = "it has no vectors yet" if active is None else f"its vectors are those of {active} already, the default model"
        raise InvalidParameter(f"family: {why}; there is nothing to do")
    if following not in {None, reference}:  # nobody wants that one any more
        await search.engine.end_model(family, switch=False)
    await search.engine.begin_model(family, reference, spec.expect_head(EmbeddingHead).dimensions)
    return reference
