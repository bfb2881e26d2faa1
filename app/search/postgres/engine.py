"""The engine on PostgreSQL; here are its jobs: work that outlives the worker that does it."""

from typing import Any, Literal

from app.errors import GatewayFull, UnknownRecord
from app.search.engine import Found, Job, Page
from app.search.postgres.connection import fetch_page
from app.search.postgres.find import Find
from app.search.postgres.groups import Groups
from app.search.postgres.values import check_metadata, record, to_uuid

_MAX_JOBS, _KEPT_DAYS = 100, 30
"""Jobs of a tenant that have not ended; how long those that have are listed."""


class PostgresEngine(Find, Groups):
    """The engine on PostgreSQL, which connects when it is first asked.

    Everything belongs to a tenant, the first argument; nobody sees the records of another one. Every method raises
    SearchUnavailable if the database cannot be reached or does not answer in time.
    """

    async def add_job(self, tenant: str, kind: Literal["directory", "reindex"], options: dict[str, Any]) -> Job:
        """Add a job, which waits; raise GatewayFull if too many have not ended."""
        check_metadata(options)
        async with self.as_tenant(tenant) as connection:
            await connection.execute(f"DELETE FROM jobs WHERE ended_at < now() - interval '{_KEPT_DAYS} days'")
            if await connection.fetchval("SELECT count(*) FROM jobs WHERE ended_at IS NULL") >= _MAX_JOBS:
                raise GatewayFull(f"{_MAX_JOBS} jobs have not ended yet", "requests", 60)
            row = await connection.fetchrow("INSERT INTO jobs (kind, options) VALUES ($1, $2) RETURNING *", kind, options)
        return record(Job, row)

    async def claim_job(self, seconds: float) -> Job | None:
        """Take the job, of any tenant, that has waited longest, or was not saved for so many seconds."""
        async with self.as_owner() as connection:
            row = await connection.fetchrow(
                "UPDATE jobs SET state = 'running', claim = claim + 1, saved_at = clock_timestamp() WHERE job_id = ("
                "SELECT job_id FROM jobs WHERE state = 'waiting'"
                " OR (state = 'running' AND saved_at < clock_timestamp() - make_interval(secs => $1))"
                " ORDER BY saved_at LIMIT 1 FOR UPDATE SKIP LOCKED) RETURNING *",
                float(seconds),
            )
        return row and record(Job, row)

    async def save_job(self, job: Job) -> bool:
        """Save a job, and with that say that it is being worked on; return False if another worker has taken it."""
        async with self.as_tenant(job.tenant) as connection:
            saved = await connection.fetchval(
                "UPDATE jobs SET state = $3, position = $4, counts = $5, error = $6, ended_at = $7, saved_at = clock_timestamp()"
                " WHERE job_id = $1 AND claim = $2 RETURNING true",
                *(to_uuid(job.job_id, "job"), job.claim, job.state, job.position, job.counts, job.error, job.ended_at),
            )
        return bool(saved)

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
