"""Whose the faces in an image are: a face has a name only by one that was registered under it."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from app.search.engine import EVERYTHING, FacePart, Filter, Hit, Page
from app.search.postgres.engine import PostgresEngine

REGISTERED = "deepstack-face-"
"""With what the ids of pictures begin that were sent to register a face."""
LEAST_QUALITY = 0.15
"""Below it, faces are not told apart: see docs/how-to/faces.md."""
PersonName = Annotated[str, Meta(max_length=128, pattern=r"\A(?=.*\S)[^\x00-\x1f\x7f]+\Z", title="1 to 128 characters of one line")]


async def find_names(
    engine: PostgresEngine, tenant: str, faces: Sequence[FacePart], least: float, where: Filter = EVERYTHING
) -> list[Hit | None]:
    """Return for each face the nearest registered one, whose `name` it gets; None below the cosine `least` or `LEAST_QUALITY`."""
    # Of two faces that are nearest to the same name, the more similar one gets it.
    where, nearest = where._replace(is_registered=True), list[Hit | None]()
    for face in faces:
        hits: Sequence[Hit] = ()
        if face.vectors and face.quality >= LEAST_QUALITY:
            hits = await engine.nearest(tenant, "faces", face.vectors[0], Page(1), min_score=least, where=where)
        nearest.append(next(iter(hits), None))
    best = dict[str | None, Hit]()
    for hit in sorted(filter(None, nearest), key=lambda hit: -hit.score):
        best.setdefault(hit.name, hit)
    return [hit if hit is not None and best[hit.name] is hit else None for hit in nearest]
