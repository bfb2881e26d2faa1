"""What search asks models about an image: for the index, for a question, and to make an index anew."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from app.cascade.catalog import Catalog
from app.embedded.server import EmbeddedTriton
from app.main import open_resources
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.search.describe import SearchOptions
from app.search.engine import NewImage, Vector
from app.search.service import open_search
from app.settings.schema import Settings
from app.telemetry.timing import Timing
from tests.support import SCENE


async def test_image_gets_the_same_vectors_each_way(
    settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path
) -> None:
    assert triton.poll() is None
    own = msgspec.structs.replace(settings, model="person_and_car")
    options = SearchOptions(database, (), keeps_thumbnails=False, has_faces=True, max_image_bytes=1 << 20, connections=2)
    new = NewImage(image_id="one", content_hash=bytes(32), width=0, height=0)
    call = CallContext(Deadline.after(60), Timing(), "test")
    async with (
        open_resources(own) as (_, pipeline, metrics),
        open_search(options, pipeline, Catalog(tmp_path / "none"), metrics) as search,
    ):
        described = await search.describe(new, SCENE, call)
        whole = await search.image_vector(SCENE, call)
        objects, faces = await search.objects(SCENE, call), await search.faces(SCENE, call)
        boxes: dict[str | None, Sequence[float]] = {None: (), **{each.class_name: each.box for each in objects}}
        places: dict[str | None, Sequence[float]] = {str(index): [*face.box, *face.landmarks] for index, face in enumerate(faces)}
        anew = await search.describe_parts(SCENE, boxes, "embedding:1", call)
        anew |= await search.describe_parts(SCENE, places, "faces_description:1", call)
        distance = await search.match_distance(call)
        spec = await search.newest_model("face", call)

    assert (described.errors, new.width, new.height) == ({}, 200, 100)
    assert [(each.class_name, each.index) for each in objects] == [("person", "people"), ("car", "vehicles")]
    assert (distance, spec.name) == (0.6, "faces_description")
    parts: dict[str | None, Sequence[Vector]] = {None: new.vectors, **{each.class_name: each.vectors for each in new.objects}}
    parts |= {str(index): face.vectors for index, face in enumerate(new.faces)}
    asked: dict[str | None, Sequence[Vector]] = {None: [whole], **{each.class_name: each.vectors for each in objects}}
    asked |= {str(index): face.vectors for index, face in enumerate(faces)}
    assert anew.keys() == parts.keys() == {None, "person", "car", "0", "1"}
    for name, vector in anew.items():
        for other in (*parts[name], *asked[name]):
            assert other.model == vector.model
            assert other.values == pytest.approx(vector.values, abs=0.02)
            assert np.linalg.norm(other.values) == pytest.approx(1, abs=1e-5)
