"""Work without a request, in chunks after which another worker can go on: indexing a folder, making an index with another model."""

import asyncio
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar
from uuid import NAMESPACE_URL, uuid5

import msgspec
import structlog

from app.errors import DeadlinePassed, GatewayError, IndexRefused, InferenceFailed, SearchUnavailable
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import LOW, Caller
from app.search.engine import Family, FileFailure, Job
from app.search.service import REGISTERED, IngestOptions, Search
from app.telemetry.timing import Timing

CHUNK, _BLOCK = 64, 256
"""Images of a folder, and vectors of an index, after which a job saves how far it is."""
_CALLER = Caller("jobs", priority=LOW)
# A job that was not saved for so long belongs to nobody; it is saved more often, and looked for so often.
_LEASE_SECONDS, _BEAT_SECONDS, _POLL_SECONDS = 20.0, 4.0, 2.0
_REMOVE_SECONDS = 30.0
# After so long, and ten times what listing its folder has taken, a job waits for those of others.
_TURN_SECONDS = 30.0
# Attempts with an image that fails, or that has ended the process; the longest pause between them. Who is away is waited for.
_ATTEMPTS, _PAUSE_SECONDS = 3, 5.0
_MAX_SKIPPED, _MAX_ID = 20, 256

_NOT_HERE = "it waits for a gateway on the machine where it was begun, with the same NEREID_SEARCH_FOLDERS; DELETE gives it up"
_REGISTER = "a registered face has no file: register it again"
_INGEST = "its file is gone, has changed, or is not in NEREID_SEARCH_FOLDERS: ingest it again"
_DEADLY = FileFailure("", "process_ended", f"the process has ended {_ATTEMPTS} times while it worked on this")

T = TypeVar("T")
Work = Callable[[T, CallContext], Awaitable[Mapping[str, int]]]
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
    allow_missing: int
    """So many images may lose their vectors, because their files are gone."""


class _LostError(Exception):
    """Another worker has taken the job."""


class _TurnOverError(Exception):
    """It is the turn of another job."""


async def run_jobs(search: Search) -> None:
    """Work on the jobs of this host's database, one at a time, and remove what they have left; never returns."""
    removed_at = -_REMOVE_SECONDS
    while True:
        search.new_job.clear()
        try:
            if monotonic() - removed_at >= _REMOVE_SECONDS:
                removed_at = monotonic()
                await search.engine.drop_unused()
            if (job := await _claim(search)) is not None:
                await _Work(search, job).run()
                continue
        except SearchUnavailable:
            pass
        except Exception:
            LOG.exception("a job could not be worked on")
        with suppress(TimeoutError):
            await asyncio.wait_for(search.new_job.wait(), _POLL_SECONDS)


async def _claim(search: Search) -> Job | None:
    # Whatever else has the database may not have the folders.
    for job_id, folders in await search.engine.waiting_jobs(_LEASE_SECONDS):
        with suppress(SearchUnavailable):  # its disk does not answer
            is_here = folders == await search.files.identify([*folders])
            if is_here and (job := await search.engine.claim_job(job_id, _LEASE_SECONDS)):
                return job
            if not is_here:
                await search.engine.leave_job(job_id, _NOT_HERE)
    return None


class _Work:
    def __init__(self, search: Search, job: Job) -> None:
        self._search, self._engine, self._job, self._limits = search, search.engine, job, search.pipeline.limits
        self._slots = asyncio.Semaphore(2 * self._limits.decode_threads)  # while some are decoded, models answer about others
        self._turn_end = monotonic() + _TURN_SECONDS
        self._is_careful, self._steps = job.deaths > 0, 0

    async def run(self) -> None:
        job = self._job
        try:
            job.error = await (self._index_directory() if job.kind == "directory" else self._reindex())
        except _LostError:
            return
        except (SearchUnavailable, _TurnOverError) as error:  # whoever takes it next goes on
            job.state, job.error = "waiting", getattr(error, "detail", None)
            with suppress(_LostError):
                await self._save()
            if isinstance(error, SearchUnavailable):  # such as a lock that others hold for long: each attempt holds up searches
                await asyncio.sleep(_PAUSE_SECONDS)
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

    async def _save(self, failures: Sequence[FileFailure] = ()) -> None:
        while True:
            with suppress(SearchUnavailable):
                if await self._engine.save_job(self._job, failures):
                    return
                raise _LostError
            await asyncio.sleep(1)

    async def _step(self, items: Sequence[T], name: Callable[[T], str | None], work: Work[T], position: str) -> None:
        """Work on items, and save that all up to a position are done; leave out the only one if it has ended several processes."""
        job, failures = self._job, list[FileFailure]()
        self._steps += 1
        # The counts change once all items are done, because a part of them is done again.
        counts = Counter[str]()

        async def one(item: T) -> None:
            async with self._slots:
                failure = _DEADLY if job.deaths >= _ATTEMPTS else await self._try(partial(work, item), counts)
            if failure is not None:
                is_gone = failure.code == "gone"
                counts.update({"unreadable": 1, failure.why: 1} if is_gone else {"errors": 1, f"error:{failure.code}": 1})
                if (named := name(item)) is not None:
                    failures.append(msgspec.structs.replace(failure, name=named))
                else:
                    LOG.warning("an image of another tenant was not described", job=job.job_id, image=item, why=failure.why)

        await self._wait(*map(one, items))
        job.counts, job.position, job.deaths = dict(Counter(job.counts) + counts), position, 0
        await self._save(failures)
        if monotonic() >= self._turn_end:
            raise _TurnOverError

    def _size(self, most: int) -> int:
        return 1 if self._is_careful and self._steps < most else most  # what has ended a process is among these

    async def _index_directory(self) -> None:
        job, files = self._job, self._search.files
        wanted = msgspec.convert(job.options, DirectoryOptions)
        folder, began = await files.allowed(wanted.directory), monotonic()
        ((paths, others, excluded, unreadable),) = await self._wait(files.list(folder, recursive=wanted.recursive))
        self._turn_end = max(self._turn_end, monotonic() + 10 * (monotonic() - began))
        job.counts["total_files"], job.counts["excluded"] = len(paths := paths[: wanted.max_images]), excluded
        if unreadable:
            job.counts["unreadable"] = len(unreadable)
            await self._save([FileFailure(folder, "not_readable", "the folder cannot be read") for folder in unreadable[:CHUNK]])
        job.counts |= {f"skipped:{suffix}": number for suffix, number in others.most_common(_MAX_SKIPPED)}
        start = bisect_right(paths, job.position)
        while start < len(paths):
            chunk = paths[start : start + self._size(CHUNK)]
            await self._step(chunk, str, partial(self._index, wanted.ingest), chunk[-1])
            start += len(chunk)

    async def _index(self, options: IngestOptions, path: str, call: CallContext) -> Mapping[str, int]:
        if (image := await self._search.files.read(path)) is None:
            raise OSError(path)
        first = self._search.options.folders[0]
        # What lies in other folders may have the same name.
        name = str(Path(path).relative_to(first)) if Path(path).is_relative_to(first) else path
        image_id = name if len(name) <= _MAX_ID and "/" not in name else str(uuid5(NAMESPACE_URL, name))
        return (await self._search.ingest(self._job.tenant, image, image_id, call, options, path=path)).counts()

    async def _reindex(self) -> str | None:
        job, wanted = self._job, msgspec.convert(self._job.options, ReindexOptions)
        giving_up = f"or give it up by DELETE /search/reindex/{wanted.family}"
        while True:
            used = await self._engine.models(wanted.family)
            if used.active == wanted.model:  # a worker died after it had switched
                return None
            if used.next != wanted.model:
                return "this change of the model was given up"
            last = await self._engine.last_vector(wanted.family)
            while (position := int(job.position or 0)) < last:
                size = self._size(_BLOCK)
                images, position = await self._engine.images_without(wanted.family, position, last, size)
                work = partial(self._redescribe, wanted)
                await self._step(images, lambda image: image[1] if image[0] == job.tenant else None, work, str(position))
            if await self._search.files.identify([*job.folders]) != job.folders:
                job.position, job.counts = "", {}  # whatever was missing may come back
                raise SearchUnavailable("A folder of the job is not there any more")
            if failed := job.counts.get("errors", 0):
                return f"{failed} images could not be described (`failures`), so the index stays as it is: repeat this, {giving_up}"
            (lost,) = await self._wait(self._engine.switch_model(wanted.family, last, wanted.allow_missing))
            if lost is not None and lost > wanted.allow_missing:
                faces = job.counts.get(_REGISTER, 0)
                again = f"register again those that are registered faces ({faces}), " if faces else ""
                repeating = f"{again}ingest them again or delete them, and repeat this; or repeat it with allow_missing={lost}"
                why = f"the files of {lost} images are gone, or not in NEREID_SEARCH_FOLDERS (`failures`), so the index stays"
                return f"{why}: {repeating}, which loses them, {giving_up}"

    async def _redescribe(self, wanted: ReindexOptions, image: tuple[str, str, str | None], call: CallContext) -> dict[str, int]:
        tenant, image_id, path = image
        content = None if path is None else await self._search.files.read(path)
        if content and await self._search.make_up(tenant, image_id, wanted.family, wanted.model, content, call):
            return {"processed": 1}
        raise FileNotFoundError(_REGISTER if image_id.startswith(REGISTERED) else _INGEST)

    async def _wait(self, *work: Coroutine[Any, Any, T]) -> list[T]:
        tasks = [*map(asyncio.create_task, work)]
        pending = {*tasks}
        try:
            while pending:
                _, pending = await asyncio.wait(pending, timeout=_BEAT_SECONDS)
                if pending:
                    await self._save()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _try(self, work: Callable[[CallContext], Awaitable[Mapping[str, int]]], counts: Counter[str]) -> FileFailure | None:
        for attempt in count(1):
            call = CallContext(Deadline.after(self._limits.max_timeout_seconds), Timing(), f"job-{self._job.job_id}", _CALLER)
            try:
                counts.update(await work(call._replace(is_batch=True, uses_cache=False)))
            except IndexRefused:
                raise
            except GatewayError as error:
                is_tried = error.retry_after_seconds or (
                    attempt < _ATTEMPTS and isinstance(error, DeadlinePassed | InferenceFailed)
                )
                failure = FileFailure("", error.code, error.detail)
            except FileNotFoundError as error:
                return FileFailure("", "gone", str(error))
            except OSError:
                is_tried, failure = False, FileFailure("", "not_readable", "the file cannot be read, or is too large")
            except Exception:
                LOG.exception("an image failed unexpectedly", job=self._job.job_id)
                is_tried, failure = False, FileFailure("", "internal", "it failed unexpectedly; the log says why")
            else:
                return None
            if not is_tried:
                return failure
            if monotonic() >= self._turn_end:
                raise _TurnOverError
            await asyncio.sleep(min(0.1 * 2 ** min(attempt, 9), _PAUSE_SECONDS))
        raise AssertionError
