"""The engine on PostgreSQL; here are its jobs: work that outlives the worker that does it."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import astuple

from app.errors import GatewayFull, UnknownRecord
from app.search.engine import Family, FileFailure, Found, Job, Page
from app.search.postgres.connection import becoming, fetch_page
from app.search.postgres.find import Find
from app.search.postgres.values import check_metadata, record, to_uuid
from app.search.postgres.vectors import begin_model, delete_model

Kind = Literal["directory", "reindex"]
_MAX_JOBS, _KEPT_DAYS, _MAX_FAILURES = 100, 30, 1000
"""Jobs of a tenant that have not ended; how long those that have are listed; failures of a job that are listed."""
_GIVE_UP = "UPDATE jobs SET state = 'failed', error = 'it was given up', ended_at = now(), claim = claim + 1 WHERE ended_at IS NULL"
_WAITS = "state = 'waiting' OR (state = 'running' AND saved_at < clock_timestamp() - make_interval(secs => $1))"


class PostgresEngine(Find):
    """The engine on PostgreSQL, which connects when it is first asked.

    Everything belongs to a tenant, the first argument; nobody sees the records of another one. Every method raises
    SearchUnavailable if the database cannot be reached or does not answer in time.
    """

    async def add_job(
        self, tenant: str, kind: Kind, options: dict[str, Any], folders: Mapping[str, int], dimensions: int | None = None
    ) -> Job:
        """Add a job, which waits for one who has these folders, by their numbers; raise GatewayFull if too many have not ended.

        With the `dimensions` of a model, vectors of that are kept from then on, or neither; errors are those of `begin_model`, too.
        """
        check_metadata(options)
        async with self.as_owner() as connection:
            if dimensions is not None:
                await begin_model(connection, options["family"], options["model"], dimensions)
            await connection.execute(becoming(tenant))
            await connection.execute(f"DELETE FROM jobs WHERE ended_at < now() - interval '{_KEPT_DAYS} days'")
            if await connection.fetchval("SELECT count(*) FROM jobs WHERE ended_at IS NULL") >= _MAX_JOBS:
                raise GatewayFull(f"{_MAX_JOBS} jobs have not ended yet", "requests", 60)
            insert = "INSERT INTO jobs (kind, options, folders) VALUES ($1, $2, $3) RETURNING *"
            return record(Job, await connection.fetchrow(insert, kind, options, folders))

    async def give_up_reindex(self, family: Family) -> None:
        """Keep no vectors of the next model, and end the jobs that make them; raise UnknownRecord if there is no such model."""
        async with self._alone() as connection:
            if not await delete_model(connection, family, "next"):
                raise UnknownRecord("No index of this family is being made anew")
            await connection.execute(f"{_GIVE_UP} AND kind = 'reindex' AND options->>'family' = $1", family)

    async def give_up_job(self, tenant: str, job_id: str) -> None:
        """End a job, whoever works on it; raise UnknownRecord if there is none, or it has ended."""
        async with self.as_tenant(tenant) as connection:
            if not await connection.fetchval(f"{_GIVE_UP} AND job_id = $1 RETURNING true", to_uuid(job_id, "job")):
                raise UnknownRecord("There is no such job, or it has ended")

    async def leave_job(self, job_id: str, why: str) -> None:
        """Say of a job that waits why it was not taken."""
        async with self.as_owner() as connection:
            query = "UPDATE jobs SET error = $2 WHERE job_id = $1 AND ended_at IS NULL AND error IS DISTINCT FROM $2"
            await connection.execute(query, job_id, why)

    async def waiting_jobs(self, seconds: float) -> Sequence[tuple[str, Mapping[str, int]]]:
        """Return the ids and folders of jobs, of any tenant, that wait or were not saved for so many seconds, longest first."""
        async with self.as_owner() as connection:
            rows = await connection.fetch(
                f"SELECT job_id::text, folders FROM jobs WHERE {_WAITS} ORDER BY saved_at", float(seconds)
            )
        return [tuple(row) for row in rows]

    async def claim_job(self, job_id: str, seconds: float) -> Job | None:
        """Take a job that waits, or was not saved for so many seconds; return None if another one has it."""
        async with self.as_owner() as connection:
            row = await connection.fetchrow(
                "UPDATE jobs SET state = 'running', error = NULL, claim = claim + 1, saved_at = clock_timestamp(),"
                " deaths = deaths + (state = 'running')::integer WHERE job_id = ("
                f"SELECT job_id FROM jobs WHERE job_id = $2 AND ({_WAITS}) FOR UPDATE SKIP LOCKED) RETURNING *",
                *(float(seconds), job_id),
            )
        return row and record(Job, row)

    async def save_job(self, job: Job, failures: Sequence[FileFailure] = ()) -> bool:
        """Save a job with more failures, and so say that it is being worked on; return False if another worker has taken it."""
        job_id = to_uuid(job.job_id, "job")
        async with self.as_tenant(job.tenant) as connection:
            saved = await connection.fetchval(
                "UPDATE jobs SET state = $3, position = $4, counts = $5, error = $6, ended_at = $7, deaths = $8,"
                " saved_at = clock_timestamp() WHERE job_id = $1 AND claim = $2 RETURNING true",
                *(job_id, job.claim, job.state, job.position, job.counts, job.error, job.ended_at, job.deaths),
            )
            if saved and failures:
                await connection.execute(
                    "INSERT INTO failures (job_id, name, code, why) SELECT $1, * FROM unnest($2::text[], $3::text[], $4::text[])"
                    f" LIMIT {_MAX_FAILURES} - (SELECT count(*) FROM failures WHERE job_id = $1) ON CONFLICT DO NOTHING",
                    *(job_id, *map(list, zip(*map(astuple, failures), strict=True))),
                )
        return bool(saved)

    async def failures(self, tenant: str, job_id: str, page: Page) -> Found:
        """Return the first failures of a job, by name."""
        async with self.as_tenant(tenant) as connection:
            query = "SELECT name, code, why FROM failures WHERE job_id = $1 ORDER BY name"
            rows, total = await fetch_page(connection, query, page, to_uuid(job_id, "job"))
        return Found([record(FileFailure, row) for row in rows], total)

    async def job(self, tenant: str, job_id: str) -> Job:
        """Return a job; raise UnknownRecord."""
        async with self.as_tenant(tenant) as connection:
            row = await connection.fetchrow("SELECT * FROM jobs WHERE job_id = $1", to_uuid(job_id, "job"))
        if row is None:
            raise UnknownRecord("There is no such job")
        return record(Job, row)

    async def jobs(self, tenant: str, page: Page) -> Found:
        """Return jobs, newest first."""
        async with self.as_tenant(tenant) as connection:
            rows, total = await fetch_page(connection, "SELECT * FROM jobs ORDER BY created_at DESC, job_id", page)
        return Found([record(Job, row) for row in rows], total)
