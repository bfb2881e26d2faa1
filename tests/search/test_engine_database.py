"""The engine and its server: schemas of other versions, users without rights, plans, and a server that goes away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import asyncpg
import numpy as np
import psutil
import pytest

from app.errors import IndexRefused, SearchUnavailable
from app.search.engine import Filter, Page, Vector
from app.search.postgres import migrations
from app.search.postgres.engine import PostgresEngine
from tests.postgres import Server, name_of
from tests.search.test_engine import FACE, PAGE, make_image, opened_engine, vector  # noqa: F401 - a fixture
from tests.support import captured_log


@pytest.fixture
async def empty(postgres: Server) -> AsyncIterator[str]:
    """The URL of a database without a schema."""
    async with postgres.fresh("template1") as url:
        yield url


@pytest.mark.parametrize("version", range(migrations.NEWEST))
async def test_each_schema_is_brought_up_to_date(empty: str, version: int) -> None:
    await migrations.migrate(empty, version)
    await asyncio.gather(*(migrations.migrate(empty) for _ in range(3)))
    engine = PostgresEngine(empty)
    assert (await engine.add("", make_image(1))).status == "added"
    await engine.close()


async def test_schema_with_records_is_brought_up_to_date(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = PostgresEngine(database)
    await old.add("", make_image(1))
    next_file = tmp_path / "003_note.sql"
    monkeypatch.setitem(migrations._FILES, migrations.NEWEST + 1, next_file)  # noqa: SLF001
    monkeypatch.setattr(migrations, "NEWEST", migrations.NEWEST + 1)
    next_file.write_text("ALTER TABLE images ADD note text NOT NULL DEFAULT 'none'; SELECT 1 / 0;")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await PostgresEngine(database).models("image")
    next_file.write_text("ALTER TABLE images ADD note text NOT NULL DEFAULT 'none';")
    workers = [PostgresEngine(database) for _ in range(3)]
    await asyncio.gather(*(worker.models("image") for worker in workers))
    with suppress(SearchUnavailable):  # what an old worker has prepared does not fit once
        await old.image("", "image 1")
    for worker in (*workers, old):
        assert (await worker.image("", "image 1")).path == "1.jpg"
    async with old.as_tenant("") as connection:
        assert await connection.fetchval("SELECT note FROM images") == "none"
    for worker in (*workers, old):
        await worker.close()


_WITH_PERSONS = """
INSERT INTO models (family, model, dimensions, state) VALUES ('face', 'faces_description:1', 32, 'active');
CREATE TABLE vectors_1 (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    image bigint NOT NULL REFERENCES images ON DELETE CASCADE,
    part uuid REFERENCES parts ON DELETE CASCADE,
    index text NOT NULL,
    metadata jsonb NOT NULL,
    added_at timestamptz NOT NULL,
    class_name text,
    vector vector(32) NOT NULL,
    UNIQUE NULLS NOT DISTINCT (image, part)
);
CREATE TABLE members_1 (
    vector bigint PRIMARY KEY REFERENCES vectors_1 ON DELETE CASCADE,
    tenant text NOT NULL DEFAULT current_setting('nereid.tenant'),
    index text NOT NULL,
    cluster_id integer NOT NULL,
    score double precision NOT NULL
);
CALL protect('vectors_1');
CALL protect('members_1');
"""
_PERSONS_OF_A_TENANT = """
SELECT set_config('nereid.tenant', '{tenant}', false);
INSERT INTO images (image_id, content_hash, metadata, width, height)
VALUES ('deepstack-face-1', '1', '{{}}', 9, 9), ('deepstack-face-2', '2', '{{}}', 9, 9), ('album', '3', '{{}}', 9, 9);
INSERT INTO persons (name) VALUES ('Ann of {tenant}'), ('a guess'), (NULL);
INSERT INTO parts (part_id, image, position, index, box, score, landmarks, quality, person)
SELECT gen_random_uuid(), number, position, 'faces', '{{0,0,1,1}}', 0.9, '{{0,0,0,0,0,0,0,0,0,0}}', 0.9, person_id
FROM (VALUES ('deepstack-face-1', 0, 'Ann of {tenant}'), ('deepstack-face-2', 0, NULL), ('album', 0, 'Ann of {tenant}'),
    ('album', 1, 'a guess')) AS face (image_id, position, name)
JOIN images USING (image_id) JOIN persons USING (tenant)
WHERE tenant = '{tenant}' AND persons.name IS NOT DISTINCT FROM face.name;
INSERT INTO vectors_1 (image, part, index, metadata, added_at, vector)
SELECT image, part_id, 'faces', '{{}}', now(), array_fill(1, ARRAY[32])::vector FROM parts WHERE tenant = '{tenant}';
INSERT INTO members_1 SELECT number, tenant, 'faces', 0, 1 FROM vectors_1 WHERE tenant = '{tenant}';
"""


async def test_names_of_registered_faces_outlive_persons(empty: str) -> None:
    """Each in its tenant. A face that was only grouped with one of a name, or is of an unnamed person, has none."""
    await migrations.migrate(empty, 1)
    connection = await asyncpg.connect(empty)
    await connection.execute(_WITH_PERSONS + "".join(_PERSONS_OF_A_TENANT.format(tenant=tenant) for tenant in ("north", "south")))
    await connection.close()
    engine = PostgresEngine(empty)
    like = Vector(np.ones(32, np.float32), FACE)
    for tenant in ("north", "south"):
        assert sorted((face.image_id, face.name or "") for face in await engine.nearest(tenant, "faces", like, PAGE)) == [
            ("album", ""),
            ("album", ""),
            ("deepstack-face-1", f"Ann of {tenant}"),
            ("deepstack-face-2", ""),
        ]
        assert await engine.names(tenant) == [f"Ann of {tenant}"]
        async with engine.as_tenant(tenant) as connection:
            assert await connection.fetchval("SELECT count(*) FROM parts") == 4
    async with engine.as_tenant("north") as connection:
        assert await connection.fetchval("UPDATE parts SET name = 'Eve' WHERE name = 'Ann of south' RETURNING name") is None
    async with engine.as_owner() as connection:
        left = "SELECT array_agg(relname::text) FROM pg_class WHERE relname IN ('persons', 'clusters', 'members_1', 'vectors_1')"
        assert await connection.fetchval(left) == ["vectors_1"]
    await engine.forget("north", "Ann of north", None)
    await engine.add_job("", "reindex", {"family": "face", "model": "faces_description:2"}, {}, 32)
    assert await engine.switch_model("face", await engine.last_vector("face"), 9) is not None
    assert (await engine.names("north"), await engine.names("south")) == ([], ["Ann of south"])
    await engine.close()


async def test_owner_needs_not_be_a_superuser(postgres: Server, empty: str) -> None:
    await postgres.execute("CREATE ROLE keeper LOGIN CREATEROLE; GRANT nereid_search TO keeper WITH ADMIN OPTION")
    name = name_of(empty)
    await postgres.execute(f"ALTER DATABASE {name} OWNER TO keeper")
    await postgres.execute("CREATE EXTENSION vector", name)  # which needs a superuser
    engine = PostgresEngine(empty.replace("://nereid@", "://keeper@"))
    await engine.add("north", make_image(1), near=0.9)
    assert (await engine.match_text("north", "clozed", PAGE, is_fuzzy=True)).total == 1
    job = await engine.add_job("north", "reindex", {}, {})
    assert await engine.claim_job(job.job_id, 60)
    await engine.add_job("north", "reindex", {"family": "image", "model": "embedding:2"}, {}, 64)
    assert len((await engine.images_without("image", 0, await engine.last_vector("image"), 10))[0]) == 1
    await engine.give_up_reindex("image")
    await engine.drop_unused()
    await engine.close()
    await postgres.execute(f"ALTER DATABASE {name} OWNER TO nereid")


async def test_schema_may_be_another_one(postgres: Server, empty: str) -> None:
    """Such as one of the user's own, which `$user` names, or one that the URL names. Others may not ask the functions."""
    await postgres.execute('CREATE EXTENSION vector; CREATE SCHEMA nereid; CREATE SCHEMA "In it"', name_of(empty))
    for url in (empty, f"{empty}&options=-csearch_path%3D%22In%5C%20it%22,public"):
        engine = PostgresEngine(url)
        await engine.add("north", make_image(1), near=0.9)
        assert (await engine.match_text("north", "clozed", PAGE, is_fuzzy=True)).total == 1
        async with engine.as_owner() as connection:
            assert not await connection.fetchval("SELECT has_function_privilege('pg_monitor', 'match_words(tsquery)', 'EXECUTE')")
        await engine.close()


async def test_long_reader_holds_up_neither_the_switch_of_a_model_nor_searches(engine: PostgresEngine, database: str) -> None:
    """Such as pg_dump. What is not searched any more is dropped later; what is searched now stays until the search has ended."""
    await engine.add("", make_image(1))
    await engine.add_job("", "reindex", {"family": "image", "model": "embedding:2"}, {}, 64)
    reader = await asyncpg.connect(database)
    await reader.execute("CREATE TABLE vectors_20261130 AS SELECT * FROM vectors_1")  # an operator's copy
    async with reader.transaction():
        await reader.execute("LOCK TABLE vectors_1, images IN ACCESS SHARE MODE")
        async with engine.as_tenant("") as connection:
            await connection.fetch("SELECT FROM images")
            with pytest.raises(SearchUnavailable):
                await engine.switch_model("image", 9, 1)
            await connection.fetch("SELECT FROM vectors_1")
        assert await engine.switch_model("image", 9, 1) == 1
        with pytest.raises(SearchUnavailable):
            await engine.drop_unused()
        assert await engine.nearest("", "global", vector(1, "embedding:2"), PAGE) == []
    await engine.drop_unused()
    kept = "SELECT to_regclass('vectors_1') IS NULL AND to_regclass('vectors_20261130') IS NOT NULL"
    assert await reader.fetchval(kept)
    await reader.close()


async def test_database_that_comes_back_is_used(engine: PostgresEngine, database: str, postgres: Server) -> None:
    with pytest.raises(SearchUnavailable):
        await PostgresEngine("postgresql://nereid@/nereid?host=/nowhere").models("image")
    await engine.add("", make_image(1))
    await postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name_of(database)}'")  # noqa: S608 - ours
    found: set[int] = set()
    for _ in range(3):  # while its connections are replaced
        with suppress(SearchUnavailable):
            found.add(len(await engine.nearest("", "global", vector(1), PAGE)))
    assert found == {1}
    async with engine.as_owner() as connection:
        backend = psutil.Process(await connection.fetchval("SELECT pg_backend_pid()"))
    backend.suspend()
    began = monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.models("image")
    assert monotonic() - began < 3  # long before the connection is given up
    backend.resume()


@pytest.mark.system
async def test_plans_walk_the_index(engine: PostgresEngine) -> None:
    count, dimensions = 6000, 64
    source = np.random.default_rng(1)
    vectors = source.normal(size=(100, dimensions))[source.integers(0, 100, count)] + 0.5 * source.normal(size=(count, dimensions))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    await engine.add_job("", "reindex", {"family": "image", "model": "embedding:1"}, {}, dimensions)
    async with engine.as_owner() as connection:
        await connection.execute(
            "INSERT INTO images (tenant, image_id, content_hash, metadata, width, height)"
            " SELECT CASE WHEN n % 1000 = 7 THEN 'small' ELSE 'large' END, n, '',"
            " jsonb_build_object('percent', n % 100, 'tenth', n % 10, 'half', n % 2), 1, 1 FROM generate_series(0, $1) n",
            count - 1,
        )
        await connection.executemany(
            "INSERT INTO vectors_1 (tenant, image, index, metadata, added_at, vector)"
            " SELECT tenant, number, 'global', metadata, added_at, $2 FROM images WHERE number = $1",
            [(1 + number, values) for number, values in enumerate(vectors)],
            timeout=100,
        )
    numbers = np.arange(count)
    for tenant, where, left in (
        ("large", {}, numbers % 1000 != 7),
        ("large", {"half": 1}, (numbers % 2 == 1) & (numbers % 1000 != 7)),
        ("large", {"tenth": 3}, numbers % 10 == 3),
        ("large", {"percent": 3}, numbers % 100 == 3),
        ("small", {}, numbers % 1000 == 7),
    ):
        found = 0
        for question in vectors[:50]:
            hits = await engine.nearest(tenant, "global", Vector(question, "embedding:1"), Page(10), where=Filter(metadata=where))
            best = numbers[left][np.argsort(-(vectors[left] @ question))[:10]]
            found += len({int(hit.image_id) for hit in hits} & set(best.tolist()))
        assert found >= 0.95 * 50 * min(10, left.sum()), where
    async with engine.connected() as connection:
        await connection.execute("SELECT pg_stat_force_next_flush()")
        used = await connection.fetchval("SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname = 'vectors_1_global'")
    assert 100 <= used < 150  # what a small tenant has, or a filter leaves, is compared


async def test_true_cause_is_told(engine: PostgresEngine, database: str, postgres: Server) -> None:
    for fault, cause in {
        "disk_full": "no space left on its disk",
        "insufficient_privilege": "refuses the gateway's user",
        "read_only_sql_transaction": "can only be read",
        "data_corrupted": "has failed; its log says why",
        "deadlock_detected": "cannot be reached, or does not answer in time",
    }.items():
        async with engine.as_owner() as connection:
            await connection.execute(
                f"CREATE OR REPLACE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE {fault}; END $$;"
                "CREATE OR REPLACE TRIGGER fail BEFORE INSERT ON images EXECUTE FUNCTION fail()"
            )
        with pytest.raises(SearchUnavailable, match=cause):
            await engine.add("", make_image(1))
    async with engine.as_owner() as connection:
        await connection.execute("UPDATE schema_version SET version = 99; DEALLOCATE ALL")
    with pytest.raises(SearchUnavailable, match="use its session mode"):
        await engine.add("", make_image(1))
    for url, cause in {
        database: "version 99",
        postgres.url("nothing"): "does not exist on its server",
        postgres.url("postgres").replace("://nereid@", "://nobody@"): "refuses the gateway's user",
    }.items():
        with pytest.raises(SearchUnavailable, match=cause):
            await PostgresEngine(url).models("image")


async def test_pgvector_that_damages_an_index_makes_none_and_keeps_those_that_exist(
    engine: PostgresEngine, database: str, postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, migrations)
    await postgres.pretend(database, "0.8.2")
    with pytest.raises(IndexRefused, match=r"pgvector 0\.8\.2 .* install pgvector 0\.8\.4 or later"):
        await engine.add("", make_image(1))
    (warning,) = log
    assert warning.method_name == "warning"
    assert "no new one is made" in warning.kwargs["detail"]
    await postgres.pretend(database, "0.8.3")
    assert (await engine.add("", make_image(1))).status == "added"
    await postgres.pretend(database, "0.8.2")
    assert (await engine.add("", make_image(2))).status == "added"
    assert len(await engine.nearest("", "global", vector(1), PAGE)) == 2
    with pytest.raises(IndexRefused):
        await engine.add_job("", "reindex", {"family": "image", "model": "embedding:2"}, {}, 64)
    assert (await engine.models("image")).next is None
