"""What others do to the index while it is searched or changed."""

import asyncio

import asyncpg
import msgspec
import numpy as np
import pytest

from app.errors import SearchUnavailable
from app.search.engine import Page, TextPart, Vector
from app.search.persons import group_faces
from app.search.postgres.engine import PostgresEngine
from tests.search.made import like, with_faces, with_vector


async def test_an_image_is_deleted_while_clusters_are_assigned(engine: PostgresEngine, database: str) -> None:
    """What is deleted is in no cluster; nothing fails because of it."""
    for axis in range(3):
        await engine.add("", with_vector(f"image {axis}", like(axis)))
    other = await asyncpg.connect(database)
    deleting = other.transaction()
    await deleting.start()
    await other.execute("DELETE FROM images WHERE image_id = 'image 1'")
    assigning = asyncio.create_task(engine.save_clusters("", "global", np.stack([like(0), like(2)])))
    await asyncio.wait([assigning], timeout=0.5)
    await deleting.commit()
    await other.close()

    assert await assigning == 2
    assert sum(await engine.clusters("", "global")) == 2


async def test_an_image_is_deleted_while_words_are_searched(engine: PostgresEngine) -> None:
    image = with_vector("a", like(0))
    image.lines = [TextPart(text="closed road", corners=[0.5] * 8, score=0.9)]

    async def change() -> None:
        for _ in range(25):
            await engine.add("", image)
            await engine.delete("", "a")

    await engine.add("", with_vector("b", like(1)))
    changing = asyncio.create_task(change())
    while not changing.done():
        await engine.match_text("", "road", Page(5))
    await changing


async def test_a_person_ceases_to_be_while_faces_are_grouped(engine: PostgresEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' faces are assigned all the same."""
    await engine.add("", with_faces("a", like(0), like(0, 0.01), names=["anna"]))
    await engine.add("", with_faces("b", like(4), like(4, 0.01)))
    pairs = engine.face_pairs

    async def while_deleted(tenant: str, min_score: float) -> object:
        for person_id in await engine.named_persons(tenant):
            await engine.delete_person(tenant, person_id, deletes_faces=False)
        return await pairs(tenant, min_score)

    monkeypatch.setattr(engine, "face_pairs", while_deleted)
    found = await group_faces(engine, "", 0.9, 2)

    assert found["persons_created"] == 1
    assert (await engine.persons("", Page(5))).total == 1


async def test_one_model_may_describe_both_images_and_faces(engine: PostgresEngine) -> None:
    image = msgspec.structs.replace(with_faces("a", like(1)), vectors=[Vector(like(0), "faces_description:1")])
    await engine.add("", image)
    for index, axis in (("global", 0), ("faces", 1)):
        (hit,) = await engine.nearest("", index, Vector(like(axis), "faces_description:1"), Page(5))  # type: ignore[arg-type]
        assert hit.score > 0.99


async def test_vectors_of_a_model_that_is_not_used_any_more_are_not_looked_for(engine: PostgresEngine) -> None:
    """Whoever described an image before the model was changed repeats that; nothing found would be wrong."""
    assert await engine.nearest("", "global", Vector(like(0), "embedding:1"), Page(5)) == []
    await engine.add("", with_vector("a", like(0)))
    with pytest.raises(SearchUnavailable):
        await engine.nearest("", "global", Vector(like(0), "embedding:2"), Page(5))


async def test_no_list_has_all_of_a_large_group_or_person(engine: PostgresEngine) -> None:
    """A list of groups has the first image and the size; a person has the best faces, unless all are wanted."""
    for number in range(3):
        await engine.add("", with_faces(f"face {number}", like(0), names=["anna"]))
        await engine.add("", with_vector(f"{number}", like(0)), near=0.9)
    (person,) = (await engine.persons("", Page(5))).items
    (group,) = (await engine.duplicate_groups("", Page(5), 2)).items

    assert ([hit.image_id for hit in group.images], group.size) == (["0"], 3)
    assert len((await engine.duplicate_group("", group.group_id)).images) == 3
    assert [len((await engine.person("", person.person_id, limit))[1]) for limit in (2, None)] == [2, 3]
