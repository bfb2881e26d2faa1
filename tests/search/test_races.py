"""What others do to the index while it is searched or changed."""

import asyncio

import msgspec
import pytest

from app.errors import SearchUnavailable
from app.search.engine import Page, TextPart, Vector
from app.search.postgres.engine import PostgresEngine
from tests.search.made import like, with_faces, with_vector


async def test_image_is_deleted_while_words_are_searched(engine: PostgresEngine) -> None:
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


async def test_name_is_registered_again_while_it_is_deleted(engine: PostgresEngine) -> None:
    pictures = [with_faces(f"picture {axis}", like(axis)) for axis in range(4)]
    await asyncio.gather(
        *(engine.register("", "anna", turn) for turn in (pictures, pictures[::-1]) * 10),
        *(engine.forget("", "anna") for _ in range(10)),
    )
    faces = await engine.nearest("", "faces", Vector(like(0), "faces_description:1"), Page(9))

    assert [hit.name for hit in faces] in ([], 4 * ["anna"])
    assert await engine.names("") == (["anna"] if faces else [])


async def test_single_model_may_describe_both_images_and_faces(engine: PostgresEngine) -> None:
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
