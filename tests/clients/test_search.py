"""The client indexes, finds and deletes images, with both classes, in a real PostgreSQL."""

import asyncio

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from nereid_client import AsyncClient, Client, Problem
from tests.clients.conftest import ThreadTransport
from tests.fakes import models
from tests.search.made import served
from tests.support import SCENE


async def test_images_are_indexed_found_and_deleted(settings: Settings, triton: EmbeddedTriton, database: str) -> None:
    assert triton.poll() is None
    options = {"model": "six_columns", "faces": True, "database_url": database}
    async with served(msgspec.structs.replace(settings, **options)) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
        loop = asyncio.get_running_loop()
        async with AsyncClient(transport=transport) as client:
            added = await client.ingest(SCENE, metadata={"camera": 3}, image_id="one", image_path="/one.bmp")
            again = await client.ingest(SCENE, image_id="two")
            await client.ingest(models.scene("BMP", shift=16), image_id="other", detect_near_duplicates=False)
            alike = await client.search_image(SCENE, top_k=5, min_score=0.1)
            faces = await client.search_faces(SCENE, min_score=0.9)
            words = await client.search_text("r", top_k=1)

            def ask() -> list[object]:
                with Client(transport=ThreadTransport(transport, loop)) as other:
                    known = other.ingest(SCENE, image_id="two").existing_image_id
                    found = other.search_image(SCENE, top_k=5, min_score=0.1), other.search_faces(SCENE, min_score=0.9)
                    return [known, *(each.results for each in found), other.search_text("r", top_k=1).results]

            assert await asyncio.to_thread(ask) == ["one", alike.results, faces.results, words.results]
            deleted = await client.delete_image("one")
            with pytest.raises(Problem, match="unknown_record"):
                await client.delete_image("one")

    assert (added.status, added.image_id, added.num_detections, added.timings["total"] > 0) == ("success", "one", 2, True)
    assert (again.status, again.existing_image_id, again.existing_image_path) == ("duplicate", "one", "/one.bmp")
    assert alike.results[0].image_id == "one"
    assert alike.results[0].metadata == {"camera": 3}
    assert alike.results[0].score == pytest.approx(1, abs=1e-3)
    assert faces.results[0].face_id
    assert faces.results[0].box
    assert words.results[0].matched_text == "r"
    assert deleted.total_deleted > 1
