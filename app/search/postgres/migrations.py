"""Whether search can use a database, and its schema: `migrations/<version>_<subject>.sql`, each once, in order."""

import asyncio
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import structlog

from app.errors import IndexRefused, SearchUnavailable

LOG = structlog.get_logger()


class Doubt(NamedTuple):
    """Why a database can be used, but should be updated, and how."""

    why: str
    fix: str


POOLED: Mapping[str, Any] = {"statement_cache_size": 0}
"""Options of asyncpg under which no statement has a name, which would be known to one connection to the server only."""
LOCK = 0x6E65_7265_6964
"""Advisory lock of those who define something."""
FIX_SCHEMA = """
SELECT set_config('search_path', array_to_string(ARRAY(SELECT quote_ident(name) FROM unnest(current_schemas(false)) name)
    || 'pg_temp'::text, ','), {is_local})
"""
"""Name the schemas in which is looked: for another role, "$user" would be another one, and its temporary tables come last."""
_FILES = {int(file.name.split("_")[0]): file for file in Path(__file__).with_name("migrations").glob("*.sql")}
NEWEST = max(_FILES)

_MAX_SECONDS = 24 * 3600
_MIN_MAJOR, _MIN_PGVECTOR = 16, [0, 8]
# https://github.com/pgvector/pgvector/pull/988 and https://github.com/pgvector/pgvector/issues/993
_UNDAMAGED_PGVECTOR, _MENDED_PGVECTOR = [0, 8, 3], [0, 8, 4]
_UPDATE = "install pgvector 0.8.4 or later, and ALTER EXTENSION vector UPDATE"
_EXAMINE = """
SELECT current_setting('server_version'), current_setting('server_version_num')::integer / 10000,
    (SELECT coalesce(installed_version, default_version) FROM pg_available_extensions WHERE name = 'vector'),
    rolsuper OR CASE WHEN to_regrole('nereid_search') IS NULL THEN rolcreaterole
        ELSE pg_has_role(current_user, to_regrole('nereid_search'), 'SET, MEMBER WITH ADMIN OPTION') END
FROM pg_roles WHERE rolname = current_user
"""
_LACKING = (
    *(asyncpg.InsufficientPrivilegeError, asyncpg.InvalidSchemaNameError, asyncpg.UndefinedObjectError),
    *(asyncpg.FeatureNotSupportedError, asyncpg.UndefinedFileError),
)


async def migrate(url: str, up_to: int | None = None) -> bool:
    """Bring the schema to a version, the newest by default; raise SearchUnavailable if it does not fit, or what asyncpg raises.

    Return whether there is a pooler between, which may have another connection for each transaction.
    """
    connection = await asyncpg.connect(url, timeout=5, command_timeout=300, **POOLED)
    try:
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
            await connection.execute(FIX_SCHEMA.format(is_local="true"))
            await _migrate(connection, up_to)
            return bool(await connection.fetchval("SELECT pg_backend_pid()") != connection.get_server_pid())
    except _LACKING as error:
        raise SearchUnavailable(
            f"The schema of search cannot be made: {error.args[0]}; the user of the database needs its schema, the extension vector"
            " and the right to create the role nereid_search, or that these are there"
        ) from error
    finally:
        await connection.close(timeout=5)


async def _migrate(connection: Any, up_to: int | None) -> None:  # noqa: ANN401 - asyncpg's connection
    found, lacks, doubt = await _examine(connection)
    if lacks:
        raise SearchUnavailable(f"{found} cannot be used: {'; '.join(lacks)}")
    if doubt:
        LOG.warning("the database of search should be updated", database=found, detail=doubt.why, fix=doubt.fix)
    if not await connection.fetchval("SELECT to_regclass('schema_version')"):
        await connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        await connection.execute("CREATE TABLE schema_version (version integer NOT NULL); INSERT INTO schema_version VALUES (0)")
    version = await connection.fetchval("SELECT version FROM schema_version")
    if version > NEWEST:
        raise SearchUnavailable(f"The database has version {version} of the schema, of a later Nereid; this one knows {NEWEST}")
    for next_version in range(version + 1, (NEWEST if up_to is None else up_to) + 1):
        await connection.execute("SET LOCAL statement_timeout = 0")  # an index may take long
        await connection.execute(await asyncio.to_thread(_FILES[next_version].read_text), timeout=_MAX_SECONDS)
        await connection.execute("UPDATE schema_version SET version = $1", next_version)


async def refuse_damage(connection: Any) -> None:  # noqa: ANN401 - asyncpg's connection
    """Raise IndexRefused if pgvector might damage an index of vectors that is made now."""
    pgvector = await connection.fetchval("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
    if (doubt := _doubt(pgvector)) and _numbers(pgvector) < _UNDAMAGED_PGVECTOR:
        raise IndexRefused(": ".join(doubt))


async def examine(url: str) -> tuple[str, list[str], Doubt | None]:
    """Return what a database is, what search lacks there, and why it should be updated, if so; raise ConnectionError."""
    try:
        connection = await asyncpg.connect(url, timeout=5, command_timeout=5, **POOLED)
        try:
            async with connection.transaction():
                return await _examine(connection)
        finally:
            await connection.close(timeout=5)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


async def _examine(connection: Any) -> tuple[str, list[str], Doubt | None]:  # noqa: ANN401 - asyncpg's connection
    version, major, pgvector, has_role = await connection.fetchrow(_EXAMINE)
    lacks = []
    if major < _MIN_MAJOR:
        lacks.append(f"search needs PostgreSQL {_MIN_MAJOR} or later")
    if not pgvector or _numbers(pgvector) < _MIN_PGVECTOR:
        lacks.append(f"search needs pgvector {'.'.join(map(str, _MIN_PGVECTOR))} or later: {_UPDATE}")
    if not has_role:
        lacks.append("its user cannot be nereid_search: CREATE ROLE nereid_search NOLOGIN; GRANT nereid_search TO the user")
    found = f"PostgreSQL {version} with {f'pgvector {pgvector}' if pgvector else 'no pgvector'}"
    return found, lacks, None if lacks else _doubt(pgvector)


def _doubt(pgvector: str) -> Doubt | None:
    if _numbers(pgvector) < _UNDAMAGED_PGVECTOR:
        why = f"pgvector {pgvector} can damage an index of vectors when VACUUM and inserts meet, so no new one is made"
        return Doubt(why, f"{_UPDATE}; then REINDEX the tables vectors_* that exist, which are used as ever")
    if _numbers(pgvector) < _MENDED_PGVECTOR:
        return Doubt(f"with pgvector {pgvector}, VACUUM and inserts that meet can fail", _UPDATE)
    return None


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]
