"""Images of a red and a blue rectangle, and how they get into an index with any text."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import httpx
import numpy as np
from PIL import Image, ImageDraw

from app.search.engine import FacePart, NewImage, ObjectPart, TextPart, Vector
from app.search.postgres.engine import PostgresEngine
from tests.support import json

CORNERS = (0.1, 0.2, 0.5, 0.2, 0.5, 0.4, 0.1, 0.4)
INDEXES: dict[str, Any] = {"car": "vehicles", "person": "people"}


def picture(red: Sequence[int] = (), blue: Sequence[int] = ()) -> bytes:
    """Draw a red and a blue rectangle, each x1 y1 x2 y2 in pixels, as PNG."""
    image = Image.new("RGB", (200, 100), "white")
    for colour, box in (("red", red), ("blue", blue)):
        if box:
            ImageDraw.Draw(image).rectangle(tuple(box), colour)
    image.save(file := BytesIO(), "PNG")
    return file.getvalue()


async def index(
    engine: PostgresEngine, client: httpx.AsyncClient, image_id: str, image: bytes, lines: Sequence[str] = (), **metadata: object
) -> None:
    """Add an image with all that the gateway's own routes say of it, and these lines of text."""
    whole = json(await client.post("/embed/image", content=image))
    found = json(await client.post("/analyze?include_embedding=true&include_face_embeddings=true&enable_ocr=false", content=image))

    def vectors(values: list[float], model: str = "embedding") -> list[Vector]:
        return [Vector(np.array(values, np.float32), f"{model}:1")]

    objects = [
        ObjectPart(
            **{name: each[name] for name in ("box", "class_id", "class_name")},
            score=each["confidence"],
            index=INDEXES[each["class_name"]],
            vectors=vectors(each["embedding"]),
        )
        for each in found["detections"]
    ]
    faces = [
        FacePart(
            **{name: each[name] for name in ("box", "score", "landmarks", "quality")},
            vectors=vectors(each["embedding"], "faces_description"),
        )
        for each in found["faces"]
    ]
    about: dict[str, Any] = {
        "content_hash": image_id.encode().ljust(32, b"-")[:32],
        "path": f"/images/{image_id}.png",
        "thumbnail": b"a JPEG",
    }
    texts = [TextPart(text=line, corners=CORNERS, score=0.9) for line in lines]
    parts: dict[str, Any] = {"objects": objects, "faces": faces, "lines": texts, "vectors": vectors(whole["embedding"])}
    await engine.add("", NewImage(image_id=image_id, metadata=metadata, **about, **whole["image"], **parts))
