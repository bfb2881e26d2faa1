"""What doctor says of the database of search."""

import msgspec
import pytest

from app.doctor import database
from app.doctor.finding import Finding
from app.settings.schema import Settings
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding
from tests.postgres import Server
from tests.support import free_port


async def check(url: str) -> Finding:
    (finding,) = await database.check(Settings(search="on", database_url=url))
    return finding


async def test_a_database_that_can_be_used(each_postgres: Server) -> None:
    settings = msgspec.structs.replace(each_postgres.settings, search="on")
    (found,) = await database.check(settings)
    assert found.severity is OK
    assert f"PostgreSQL {each_postgres.program.version}." in found.message
    assert "with pgvector 0.8.5" in found.message
    await each_postgres.execute("DO $$ BEGIN ASSERT to_regclass('images') IS NULL; END $$", "nereid")
    assert await database.check(Settings()) == []


async def test_a_database_that_is_away() -> None:
    found = await check(f"postgresql://nereid:secret@127.0.0.1:{free_port()}/nereid")
    assert_finding(found, FAILURE, "127.0.0.1", "does not answer", "NEREID_DATABASE_URL")
    assert "secret" not in found.message
    assert "does not answer" in (await check("postgresql://nereid@/nereid?host=/nowhere")).message


async def test_a_user_who_cannot_be_a_tenant(postgres: Server) -> None:
    """Rows of tenants are protected by this role."""
    await postgres.execute("CREATE ROLE nobody_much LOGIN")
    found = await check(postgres.url("migrated").replace("nereid@", "nobody_much@"))
    await postgres.execute("DROP ROLE nobody_much")
    assert_finding(found, FAILURE, "18", "cannot use it", "GRANT nereid_search")


async def test_outdated_postgresql_and_pgvector_are_named(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.search.postgres.migrations._MIN_MAJOR", 19)
    monkeypatch.setattr("app.search.postgres.migrations._MIN_PGVECTOR", [0, 9])
    found = await database.check(Settings(search="on", database_url=postgres.url("migrated")))
    assert [finding.fix and finding.fix.partition(" or later")[0] for finding in found] == [
        "search needs PostgreSQL 19",
        "search needs pgvector 0.9",
    ]


@pytest.mark.parametrize(("version", "says"), [("0.8.2", "no new one is made"), ("0.8.3", "can fail")])
async def test_a_pgvector_with_known_faults_is_a_warning(postgres: Server, version: str, says: str) -> None:
    async with postgres.fresh() as url:
        await postgres.pretend(url, version)
        found = await check(url)
    assert_finding(found, WARNING, f"pgvector {version}", says, "install pgvector 0.8.4")
