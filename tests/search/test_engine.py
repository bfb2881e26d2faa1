"""The engine on a real PostgreSQL: of this version in each run, of the oldest one, too, with the other longer tests."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import numpy as np
import pytest

from app.errors import GatewayFull, InvalidParameter, SearchUnavailable, UnknownRecord
from app.search.engine import FacePart, FileFailure, Filter, NewImage, ObjectPart, Page, TextPart, Vector
from app.search.postgres.engine import PostgresEngine
from tests.postgres import Server, pooled

PAGE = Page(10)
IMAGE, FACE = "embedding:1", "faces_description:1"


@pytest.fixture(
    params=["postgres", *(pytest.param(name, marks=pytest.mark.system) for name in ("postgres16", "session", "transaction"))]
)
async def database(request: pytest.FixtureRequest, postgres: Server, tmp_path: Path) -> AsyncIterator[str]:
    with ExitStack() as stack:
        is_pooled = request.param in {"session", "transaction"}  # modes of a pooler
        server = (
            stack.enter_context(pooled(postgres, request.param, tmp_path)) if is_pooled else request.getfixturevalue(request.param)
        )
        async with server.fresh() as url:
            yield url


@pytest.fixture(name="engine")
async def opened_engine(database: str) -> AsyncIterator[PostgresEngine]:
    opened = PostgresEngine(database)
    yield opened
    await opened.close()


def vector(seed: int, model: str = IMAGE, dimensions: int = 64) -> Vector:
    values = np.random.default_rng(seed).normal(size=dimensions).astype(np.float32)
    return Vector(values / np.linalg.norm(values), model)


def make_image(number: int, **changes: Any) -> NewImage:  # noqa: ANN401 - its fields
    """Return an image with a car, a face and two lines."""
    box, vectors, corners = (0, 0, 0.5, 1), [vector(100 + number)], [0.5] * 8
    image = NewImage(
        image_id=f"image {number}",
        content_hash=bytes([number]) * 32,
        path=f"{number}.jpg",
        metadata={"camera": number % 2, "tags": {"night": True}},
        width=40,
        height=30,
        vectors=[vector(number)],
        objects=[
            ObjectPart(box=box, score=0.9, vectors=vectors, class_id=2, class_name="car", index="vehicles"),
            ObjectPart(box=(0, 0, 0.5, 0.5), score=0.8, class_id=16, class_name="dog"),
        ],
        faces=[make_face(200 + number)],
        lines=[TextPart(text="Straße closed", corners=corners, score=0.9), TextPart(text="你好世界", corners=corners, score=0.8)],
        thumbnail=b"image",
    )
    return msgspec.structs.replace(image, **changes)


def make_face(seed: int) -> FacePart:
    vectors = [vector(seed, FACE, 32)]
    return FacePart(box=(0.1, 0.1, 0.2, 0.2), score=0.7, landmarks=[0.15] * 10, quality=0.5, vectors=vectors, thumbnail=b"face")


async def test_added_image_is_read_and_deleted_with_all_its_parts(engine: PostgresEngine) -> None:
    image = make_image(1)
    added = await engine.add("", image)
    assert (added.status, added.indexed) == ("added", {"global": 1, "vehicles": 1, "faces": 1, "ocr": 1})
    stored = await engine.image("", "image 1")
    assert (stored.path, stored.metadata, stored.content_hash) == (image.path, image.metadata, image.content_hash)
    assert [(one.class_name, tuple(one.box), one.index) for one in stored.objects] == [
        ("car", (0, 0, 0.5, 1), "vehicles"),
        ("dog", (0, 0, 0.5, 0.5), None),
    ]
    assert (stored.faces[0].landmarks, stored.lines, stored.full_text) == ([0.15] * 10, image.lines, "Straße closed\n你好世界")
    assert stored.vector is not None
    np.testing.assert_allclose(stored.vector, image.vectors[0].values)
    (face,) = await engine.nearest("", "faces", vector(201, FACE, 32), PAGE)
    assert await engine.thumbnail("", "image 1", face.part_id) == b"face"
    assert await engine.delete("", "image 1") == added.indexed
    assert not any(records for records, _ in (await engine.statistics("")).values())
    with pytest.raises(UnknownRecord):
        await engine.delete("", "image 1")


async def test_same_image_is_there_once(engine: PostgresEngine) -> None:
    statuses = [added.status for added in await asyncio.gather(*(engine.add("", make_image(1)) for _ in range(8)))]
    assert sorted(statuses) == ["added", *["duplicate"] * 7]
    twin = await engine.add("", make_image(1, image_id="twin"))
    assert twin.duplicate
    assert (twin.status, twin.duplicate.image_id) == ("duplicate", "image 1")
    assert (await engine.add("", make_image(1, image_id="twin"), skip_duplicates=False)).status == "added"
    assert (await engine.add("", make_image(2, image_id="image 1"))).status == "replaced"
    records = {name: records for name, (records, _) in (await engine.statistics("")).items()}
    assert records == {"global": 2, "vehicles": 2, "people": 0, "faces": 2, "ocr": 2}


async def test_nearest_come_first_and_filters_leave_some_out(engine: PostgresEngine) -> None:
    assert await engine.nearest("", "global", vector(3), PAGE) == []
    for number in range(6):
        await engine.add("", make_image(number))
    hits = await engine.nearest("", "global", vector(3), PAGE)
    scores = [hit.score for hit in hits]
    assert (hits[0].image_id, len(hits), scores) == ("image 3", 6, sorted(scores, reverse=True))
    assert scores[0] == pytest.approx(1)
    assert await engine.nearest("", "global", vector(3), Page(2, 3)) == hits[3:5]
    assert await engine.nearest("", "global", vector(3), PAGE, min_score=0.9) == hits[:1]
    (car,) = await engine.nearest("", "vehicles", vector(103), Page(1), where=Filter(classes=["car"]))
    assert (car.image_id, car.class_name, car.box) == ("image 3", "car", [0, 0, 0.5, 1])
    assert await engine.nearest("", "vehicles", vector(3), PAGE, where=Filter(classes=["dog"])) == []
    with pytest.raises(SearchUnavailable):  # whoever described it before the model was changed repeats that
        await engine.nearest("", "global", vector(3, "other:1"), PAGE)


async def test_words_are_found(engine: PostgresEngine) -> None:
    for number in range(3):
        await engine.add("", make_image(number))
    for words, is_fuzzy, count in (
        ("CLOSED strasse", False, 3),
        ("\uff43\uff4c\uff4f\uff53\uff45\uff44", False, 3),  # wide letters
        ("closed open", False, 0),
        ("clozed", False, 0),
        ("clozed", True, 3),
        ("好世", True, 3),
        ("世", True, 3),
        ("'; DROP TABLE images; --", True, 0),
        ("", False, 0),
        ("!?", True, 0),
    ):
        found = await engine.match_text("", words, Page(2), is_fuzzy=is_fuzzy)
        assert (found.total, len(found.items)) == (count, min(count, 2)), words
        assert all(hit.line.text == ("你好世界" if "世" in words else "Straße closed") for hit in found.items)
        assert (await engine.match_text("", words, Page(2, 50), is_fuzzy=is_fuzzy)).total == count


async def test_values_that_postgresql_or_json_cannot_keep_are_refused(engine: PostgresEngine) -> None:
    hostile: Sequence[dict[str, Any]] = (
        {"image_id": "a\0b"},
        {"image_id": "\ud800"},
        {"image_id": "x" * 513},
        {"metadata": {"a": b"bytes"}},
        {"lines": [TextPart(text="\0", corners=[0] * 8, score=1)]},
        {"vectors": [Vector(np.full(64, np.nan, np.float32), IMAGE)]},
        {"vectors": [Vector(np.zeros(64, np.float32), IMAGE)]},
        {"vectors": [vector(1, IMAGE, 63)]},
        {"vectors": [vector(1, "large:1", 4001)]},
    )
    await engine.add("", make_image(1))
    before = await engine.statistics("")
    for number, changes in enumerate(hostile, 2):
        with pytest.raises((InvalidParameter, SearchUnavailable)):
            await engine.add("", make_image(number, **changes))
    with pytest.raises(InvalidParameter):
        await engine.register("", "Ann\0", [make_image(9)])
    assert await engine.statistics("") == before


async def test_tenant_has_rows_of_its_own(engine: PostgresEngine) -> None:
    for tenant in ("north", "south"):
        assert (await engine.add(tenant, make_image(1))).status == "added"
    async with engine.as_tenant("") as connection:
        for table in ("images", "parts", "texts", "vectors_1", "jobs"):
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 0  # noqa: S608
    async with engine.as_tenant("north") as connection:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("INSERT INTO jobs (tenant, kind, options) VALUES ('south', 'reindex', '{}')")


async def test_transaction_takes_more_locks_than_a_query_has_columns(engine: PostgresEngine) -> None:
    async with engine.as_tenant("a", *((number,) for number in range(2000))) as connection:  # a person on many images is erased
        assert await connection.fetchval("SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objsubid = 1") > 2000


async def test_index_is_made_anew(engine: PostgresEngine) -> None:
    for number in range(2):
        await engine.add("", make_image(number))
    await engine.add_job("", "reindex", {"family": "image", "model": "embedding:2"}, {}, 2500)
    new = [vector(1000 + number, "embedding:2", 2500) for number in range(3)]
    with pytest.raises(InvalidParameter, match="DELETE /search/reindex/image gives that up"):
        await engine.add_job("", "reindex", {"family": "image", "model": "embedding:3"}, {}, 64)
    await engine.add("", make_image(2, vectors=[vector(2), new[2]], objects=[]))
    last = await engine.last_vector("image")
    left, position = await engine.images_without("image", 0, last, 2)
    rest, end = await engine.images_without("image", position, last, 100)
    assert ([*left, *rest], end) == ([("", f"image {number}", f"{number}.jpg") for number in range(2)], last)
    assert (await engine.switch_model("image", last, 1), (await engine.models("image")).active) == (2, IMAGE)
    for number in range(2):
        parts = await engine.parts("", f"image {number}", "image")
        assert sorted(map(tuple, parts.values())) == [(0, 0, 0.5, 1), (0, 0, 1, 1)]
        assert not await engine.add_vectors("", f"image {number}", b"other", dict.fromkeys(parts, new[number]))
        assert await engine.add_vectors("", f"image {number}", bytes([number]) * 32, dict.fromkeys(parts, new[number]))
    await engine.add("", make_image(4, objects=[]))  # by a worker that asked before the model was begun
    assert (await engine.switch_model("image", last, 9), await engine.models("image")) == (None, (IMAGE, "embedding:2"))
    assert (await engine.images_without("image", last, await engine.last_vector("image"), 9))[0] == [("", "image 4", "4.jpg")]
    await engine.delete("", "image 4")
    assert (await engine.switch_model("image", last, 0), await engine.models("image")) == (0, ("embedding:2", None))
    for outdated in (engine.nearest("", "global", vector(1), PAGE), engine.add("", make_image(5))):
        with pytest.raises(SearchUnavailable):
            await outdated
    assert (await engine.nearest("", "vehicles", new[1], PAGE))[0].image_id == "image 1"


async def test_image_is_deleted_while_words_are_searched(engine: PostgresEngine) -> None:
    async def change() -> None:
        for _ in range(25):
            await engine.add("", make_image(1))
            await engine.delete("", "image 1")

    await engine.add("", make_image(2, lines=[]))
    changing = asyncio.create_task(change())
    while not changing.done():
        await engine.match_text("", "closed", PAGE)
    await changing


async def test_name_is_registered_again_while_it_is_deleted(engine: PostgresEngine) -> None:
    pictures = [make_image(number, vectors=[], objects=[], lines=[]) for number in range(4)]
    await asyncio.gather(
        *(engine.register("", "anna", turn) for turn in (pictures, pictures[::-1]) * 2),
        *(engine.forget("", "anna", 0.9) for _ in range(3)),
    )
    faces = await engine.nearest("", "faces", vector(201, FACE, 32), PAGE)

    assert [hit.name for hit in faces] in ([], 4 * ["anna"])
    assert await engine.names("") == (["anna"] if faces else [])


async def test_tenant_has_a_hundred_jobs_at_most(engine: PostgresEngine) -> None:
    for _ in range(100):
        await engine.add_job("north", "directory", {}, {})
    with pytest.raises(GatewayFull, match="100 jobs have not ended"):
        await engine.add_job("north", "directory", {}, {})
    await engine.add_job("south", "directory", {}, {})


async def test_job_that_another_worker_has_taken_is_not_saved(engine: PostgresEngine) -> None:
    job_id = (await engine.add_job("", "directory", {}, {"/photos": 7})).job_id
    dead = await engine.claim_job(job_id, 60)
    assert dead
    assert await engine.save_job(dead, [FileFailure("a", "internal", "why")] * 2)
    assert (await engine.waiting_jobs(60), await engine.claim_job(job_id, 60)) == ([], None)
    assert await engine.waiting_jobs(0) == [(job_id, {"/photos": 7})]
    other = await engine.claim_job(job_id, 0)
    assert (dead.deaths, other and other.deaths) == (0, 1)
    assert not await engine.save_job(dead, [FileFailure("b", "internal", "why")])
    assert (await engine.failures("", job_id, PAGE)).items == [FileFailure("a", "internal", "why")]
    assert (await engine.failures("north", job_id, PAGE)).total == 0
