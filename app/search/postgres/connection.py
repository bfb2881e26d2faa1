"""Connections to PostgreSQL, and what a transaction may see."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import asyncpg
from pgvector.asyncpg import register_vector

from app.errors import SearchUnavailable
from app.search.engine import Page
from app.search.postgres.migrations import FIX_SCHEMA, LOCK, POOLED, migrate

VECTORS_LOCK = LOCK + 1
"""Advisory lock, shared, of those who use tables of vectors."""

MAX_LISTED = 1000
"""So many images of a group, or with faces like one, are listed."""

Connection: TypeAlias = Any
"""asyncpg's connection, which has no types."""

_CONNECT_SECONDS = 5
_STATEMENT_SECONDS = 10
_ROLLBACK_SECONDS = 0.3
_VALUES = {
    "application_name": "nereid",
    "statement_timeout": str(1000 * _STATEMENT_SECONDS),
    "idle_in_transaction_session_timeout": "60s",
    # Short queries only; and a plan depends on how many images a filter leaves.
    "jit": "off",
    "plan_cache_mode": "force_custom_plan",
    "hnsw.iterative_scan": "relaxed_order",  # see `vectors.nearest`
    "hnsw.max_scan_tuples": "40000",
    "hnsw.scan_mem_multiplier": "8",
}
_SET = "".join(f"SELECT set_config('{name}', '{value}', {{is_local}});" for name, value in _VALUES.items()) + FIX_SCHEMA
_BEGIN = "BEGIN;"
_AWAY = (
    OSError,  # also TimeoutError
    *(asyncpg.PostgresConnectionError, asyncpg.InterfaceError, asyncpg.InternalClientError),
    *(asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError, asyncpg.InsufficientPrivilegeError),
    *(asyncpg.InsufficientResourcesError, asyncpg.PostgresSystemError, asyncpg.ReadOnlySQLTransactionError),
    asyncpg.OperatorInterventionError,  # it shuts down, starts, or the statement took too long
    asyncpg.ObjectNotInPrerequisiteStateError,  # a lock is not available, or the database takes no connections
    asyncpg.TransactionRollbackError,  # a deadlock
    asyncpg.exceptions.InvalidCachedStatementError,  # another worker has changed a table
    asyncpg.InternalServerError,  # also damaged data
    *(_POOLED := (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)),
)
_CAUSES = (
    (asyncpg.DiskFullError, "has no space left on its disk"),
    ((asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InsufficientPrivilegeError), "refuses the gateway's user"),
    (asyncpg.InvalidCatalogNameError, "does not exist on its server"),
    (asyncpg.ReadOnlySQLTransactionError, "can only be read"),
    (_POOLED, "is behind a pooler that changes connections between transactions, and does not show it; use its session mode"),
    (asyncpg.TooManyConnectionsError, "has no connection left: raise its max_connections, or end other clients"),
    (asyncpg.QueryCanceledError, f"has not answered within {_STATEMENT_SECONDS} s"),
    ((asyncpg.InternalServerError, asyncpg.PostgresSystemError), "has failed; its log says why"),
    (TimeoutError, "does not answer in time, or all connections to it are in use"),
    (OSError, "cannot be reached"),
    (Exception, "cannot be reached, or does not answer in time"),
)


class Database:
    """A pool of connections, which are made when they are needed."""

    def __init__(self, url: str, connections: int = 8) -> None:
        self._url, self._connections, self._begin = url, connections, _BEGIN
        self._pool: Any = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        """Give back everything."""
        if self._pool is not None:
            self._pool.terminate()

    async def _ready(self) -> Any:  # noqa: ANN401 - asyncpg's pool
        async with self._opening:
            if self._pool is None:
                # A pooler refuses settings that it does not know, and may have others after each transaction.
                is_pooled = await migrate(self._url)
                setting = _SET.format(is_local=is_pooled)
                self._begin = f"{_BEGIN} {setting};" if is_pooled else _BEGIN
                self._pool = await asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=self._connections,
                    timeout=_CONNECT_SECONDS,
                    command_timeout=_STATEMENT_SECONDS + 2,  # a server that hangs does not stop its statements
                    init=partial(_prepare, setting),
                    reset=_keep,
                    **POOLED if is_pooled else {},
                )
        return self._pool

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Connection]:
        """Lend a connection that may define, and sees the rows of all tenants; raise SearchUnavailable if none can work."""
        try:
            pool = await self._ready()
            async with pool.acquire(timeout=_CONNECT_SECONDS) as connection:
                try:
                    yield connection
                except BaseException as error:
                    if connection.is_in_transaction() or isinstance(error, asyncio.CancelledError):
                        try:  # whoever is late waits for no server that hangs
                            async with asyncio.timeout(_ROLLBACK_SECONDS):
                                await connection.execute("ROLLBACK")
                        except (*_AWAY, asyncpg.PostgresError):
                            connection.terminate()
                    raise
        except asyncpg.DataError:  # ours: checks come before SQL
            raise
        except _AWAY as error:
            cause = next(text for kind, text in _CAUSES if isinstance(error, kind))
            raise SearchUnavailable(f"The database of search {cause}") from error

    @asynccontextmanager
    async def as_owner(self, begin: str = "", *, asks_once: bool = False) -> AsyncIterator[Connection]:
        """Open a transaction as `connected`, with statements at its start; for one query alone (`asks_once`), if it needs one."""
        async with self.connected() as connection:
            if not asks_once or self._begin != _BEGIN:
                await connection.execute(self._begin + begin)
            yield connection
            if connection.is_in_transaction():
                await connection.execute("COMMIT")

    def as_tenant(self, tenant: str, *names: tuple[object, ...]) -> AbstractAsyncContextManager[Connection]:
        """Open a transaction that sees the rows of a tenant, once no other one holds one of these names."""
        return self.as_owner(becoming(tenant) + locking(*names))


def becoming(tenant: str) -> str:
    """Return how a transaction goes on as a tenant; the tables of vectors that it finds stay until its end."""
    return (
        f"SELECT pg_advisory_xact_lock_shared({VECTORS_LOCK}), set_config('role', 'nereid_search', true),"
        f" set_config('nereid.tenant', convert_from(decode('{tenant.encode().hex()}', 'hex'), 'UTF8'), true);"
    )


def locking(*names: tuple[object, ...]) -> str:
    """Return how a transaction waits until no other one holds one of these names."""
    keys = {int.from_bytes(hashlib.blake2b(repr(name).encode(), digest_size=8).digest(), signed=True) for name in names}
    # In one order, so that two do not wait for each other; as rows, because PostgreSQL has at most 1,664 columns.
    return f"SELECT pg_advisory_xact_lock(key) FROM unnest('{{{','.join(map(str, sorted(keys)))}}}'::bigint[]) key;"


async def fetch_page(
    connection: Connection, query: str, page: Page, *values: object, more: str = "NULL"
) -> tuple[Sequence[Any], int]:
    """Return a page of the rows of a query, and how many there are; `more` is a further column, of those on the page only."""
    rows = await connection.fetch(
        f"SELECT *, {more}, count(*) OVER () AS total FROM ({query}) rows LIMIT {int(page.size)} OFFSET {int(page.offset)}",
        *values,
    )
    if not rows and page.offset:
        return rows, await connection.fetchval(f"SELECT count(*) FROM ({query}) rows", *values)
    return rows, rows[0]["total"] if rows else 0


async def _prepare(setting: str, connection: Connection) -> None:
    async with connection.transaction():
        await connection.execute(setting)
        schema = await connection.fetchval(
            "SELECT nspname FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace WHERE extname = 'vector'"
        )
        await register_vector(connection, schema)
        await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=json.dumps, decoder=json.loads)


async def _keep(connection: Connection) -> None:
    """Leave a connection as it is: what transactions set ends with them."""
