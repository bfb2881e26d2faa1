"""Checks of the database of search."""

from urllib.parse import urlsplit

from app.doctor.finding import Finding, failure, ok, warning
from app.embedded.postgres.server import EmbeddedPostgres
from app.host import extras
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings

_CURES = {
    "too many": "end other clients of the database, or raise its max_connections, or the CONNECTION LIMIT of the user",
    "remaining connection slots": "end other clients of the database, or raise its max_connections",
    "password authentication failed": f"correct user and password in {PREFIX}DATABASE_URL",
    "pg_hba.conf": "allow user and address in pg_hba.conf of the server",
}
"""By what PostgreSQL says."""


async def check(settings: Settings) -> list[Finding]:
    """Check whether search can use its database; no findings if search is off, or not installed."""
    if settings.search == "off" or extras.missing("search"):  # which the check of the settings reports
        return []
    from app.search.postgres.migrations import examine  # noqa: PLC0415 - asyncpg is an extra

    where = urlsplit(settings.database_url).hostname or settings.database_folder
    try:
        if not settings.database_url:
            EmbeddedPostgres(settings).folder.check()
        text, lacks, doubt = await examine(settings.search_database)
    except (CommandError, ConnectionError) as error:
        fix = f"correct {PREFIX}DATABASE_URL" if settings.database_url else "run `nereid serve --search`; it tells why not"
        fix = next((cure for words, cure in _CURES.items() if words in str(error)), fix)
        return [failure("database", f"the database of search at {where} does not answer: {error}", fix)]
    problems = [failure("database", f"{text} answers at {where}, but search cannot use it", lack) for lack in lacks]
    if doubt:
        return [warning("database", f"{text} answers at {where}, but {doubt.why}", doubt.fix)]
    return problems or [ok("database", f"{text} answers at {where}")]
