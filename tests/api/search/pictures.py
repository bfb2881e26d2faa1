"""Images of a red and a blue rectangle, and how they get into an index with any text."""

from collections.abc import Sequence
from io import BytesIO

import httpx
import numpy as np
from PIL import Image, ImageDraw

from app.search.engine import FacePart, NewImage, ObjectPart, TextPart, Vector
from app.search.postgres.engine import PostgresEngine
from tests.support import json

CORNERS = (0.1, 0.2, 0.5, 0.2, 0.5, 0.4, 0.1, 0.4)


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
    kept = NewImage(
        image_id=image_id,
        content_hash=image_id.encode().ljust(32, b"-")[:32],
        path=f"/images/{image_id}.png",
        metadata=metadata,
        **whole["image"],
        vectors=[_vector(whole["embedding"], "embedding")],
        objects=[
            ObjectPart(
                box=tuple(each["box"]),
                score=each["confidence"],
                class_id=each["class_id"],
                class_name=each["class_name"],
                index="vehicles" if each["class_name"] == "car" else "people",
                vectors=[_vector(each["embedding"], "embedding")],
            )
            for each in found["detections"]
        ],
        faces=[
            FacePart(
                box=tuple(each["box"]),
                score=each["score"],
                landmarks=each["landmarks"],
                quality=each["quality"],
                vectors=[_vector(each["embedding"], "faces_description")],
            )
            for each in found["faces"]
        ],
        lines=[TextPart(text=line, corners=CORNERS, score=0.9) for line in lines],
        thumbnail=b"a JPEG",
    )
    await engine.add("", kept)


def _vector(values: list[float], model: str) -> Vector:
    return Vector(np.array(values, np.float32), f"{model}:1")
