"""A backup is restored, and finds what was there; nothing is restored over records."""

import asyncio
from itertools import count
from pathlib import Path

import msgspec
import pytest

from app.__main__ import main
from app.embedded.postgres.backup import _command, _run, backup, restore
from app.host.program import CommandError
from app.search.engine import NewImage, Page, TextPart, Vector, VectorIndex
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.postgres import Server
from tests.search.test_engine import FACE, make_image, vector

NUMBERS = count()


def image(number: int) -> NewImage:
    return make_image(number, lines=[TextPart(text=f"number {number} in words", corners=[0.0] * 8, score=1)])


async def found(engine: PostgresEngine) -> list[object]:
    """Return all that a few questions find."""
    like: dict[VectorIndex, Vector] = {"global": vector(3), "vehicles": vector(103), "faces": vector(203, FACE, 32)}
    hits = [await engine.nearest("a", index, wanted, Page(5)) for index, wanted in like.items()]
    words = await engine.match_text("a", "number 3", Page(5))
    return [*hits, words, await engine.names("a"), await engine.image("b", "image 1")]


async def database_of(server: Server, user: str) -> str:
    """Make an empty database that belongs to a user, and return its URL."""
    name = f"of_{user}_{next(NUMBERS)}"
    await server.execute(f"CREATE DATABASE {name} OWNER {user}")
    await server.execute("CREATE EXTENSION vector", name)
    return server.url(name).replace("//nereid@", f"//{user}:a%2Fsecret@")


@pytest.mark.parametrize(("user", "heir"), [("nereid", "nereid"), ("an_owner", "an_heir")])
async def test_restored_backup_finds_the_same(
    postgres: Server, user: str, heir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for an owner of the tables who is no superuser, or another one. Nothing is overwritten."""
    for one in {user, heir} - {"nereid"}:
        await postgres.execute(f"CREATE ROLE {one} LOGIN; GRANT nereid_search TO {one}")
    file, source, target = tmp_path / "backup", await database_of(postgres, user), await database_of(postgres, heir)
    settings = msgspec.structs.replace(postgres.settings, database_url=source)
    engine = PostgresEngine(source)
    for number in range(20):
        await engine.add("a", image(number))
    await engine.register("a", "Ann", [image(30)])
    await engine.add("b", image(1))
    before = await found(engine)
    await engine.close()

    monkeypatch.setenv("NEREID_DATABASE_HOME", settings.database_home)
    monkeypatch.setenv("NEREID_DATABASE_URL", source)
    assert main(["database", "backup", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="cannot be made: File exists"):
        backup(settings, file)
    with pytest.raises(CommandError, match=r"pg_dump failed: .*does not exist"):
        backup(msgspec.structs.replace(settings, database_url=postgres.url("missing")), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(CommandError, match="has images; restore into an empty one"):
        restore(settings, file)

    empty = PostgresEngine(target)
    await empty.models("image")
    await empty.close()
    (part := tmp_path / "part").write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(CommandError, match="the restore failed"):
        restore(msgspec.structs.replace(settings, database_url=target), part)
    restore(msgspec.structs.replace(settings, database_url=target), file)
    again = PostgresEngine(target)
    assert repr(await found(again)) == repr(before)
    assert await again.nearest("c", "global", vector(3), Page(5)) == []
    await again.add("a", image(20))
    job = await again.add_job("a", "reindex", {}, {})
    assert await again.claim_job(job.job_id, 60)
    await again.close()


@pytest.mark.parametrize(
    "url",
    [
        "//u:se%2Fcret@db/n",
        "//u:se/cret@db/n?sslmode=prefer",
        "//db/n?user=u&p%61ssword=se%2Fcret",
        "///n?password=se/cret&host=db",
    ],
)
def test_password_of_the_database_is_on_no_command_line(url: str) -> None:
    with _command(Settings(database_url=f"postgresql:{url}"), "psql") as (command, variables):
        assert ("cret" in "".join(command), variables["PGPASSWORD"]) == (False, "se/cret")


async def test_secret_without_a_variable_reaches_the_program(postgres: Server) -> None:
    """By a file. A server that knows no certificates does not ask for it."""
    settings = msgspec.structs.replace(postgres.settings, database_url=f"{postgres.url('postgres')}&sslpassword=se%20cret")
    with _command(settings, "psql", "--command=SELECT 1") as (command, variables):
        assert "se cret" not in " ".join([*command, *variables.values()])
        with open(variables["PGSERVICEFILE"]) as file:  # noqa: ASYNC230, PTH123 - it is short
            assert file.read() == "[nereid]\nsslpassword=se cret\n"
    assert "1 row" in await asyncio.to_thread(_run, settings, "psql", "--no-psqlrc", "--command=SELECT 1")


async def test_restore_is_refused_where_its_indexes_would_be_damaged(postgres: Server, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(postgres.settings, database_url=await database_of(postgres, "nereid"))
    engine, file = PostgresEngine(settings.database_url), tmp_path / "kept.dump"
    await engine.models("image")
    await engine.close()
    await asyncio.to_thread(backup, settings, file)
    await postgres.pretend(settings.database_url, "0.8.2")
    with pytest.raises(CommandError, match=r"install 0\.8\.4 or later"):
        await asyncio.to_thread(restore, settings, file)
