"""Faces that have names, as DeepStack's clients register and recognize them."""

from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw

from app.embedded.server import EmbeddedTriton
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.search.made import searching, with_faces
from tests.support import SCENE, json

Gateway = tuple[PostgresEngine, httpx.AsyncClient]


def picture(*faces: tuple[str, tuple[int, int, int, int]]) -> bytes:
    image = Image.new("RGB", (200, 100), "white")
    for colour, box in faces:
        ImageDraw.Draw(image).rectangle(box, colour)
    image.save(file := BytesIO(), "PNG")
    return file.getvalue()


RED, SMALL, NOBODY = picture(("red", (10, 10, 90, 90))), picture(("red", (10, 10, 29, 29))), picture()
BLUE = picture(("red", (10, 10, 29, 29)), ("blue", (100, 10, 179, 89)))
"""Its largest face is blue; that of `SCENE` is red."""


@pytest.fixture
async def gateway(settings: Settings, triton: EmbeddedTriton, database: str) -> AsyncIterator[Gateway]:
    assert triton.poll() is None
    async with searching(settings, database) as made:
        yield made


async def ask(client: httpx.AsyncClient, action: str, status: int = 200, files: Any = None, **data: str) -> Any:  # noqa: ANN401
    return json(await client.post(f"/v1/vision/face/{action}", files=files, data=data), status)


async def recognize(client: httpx.AsyncClient, image: bytes = SCENE, **data: str) -> list[str]:
    return [each["userid"] for each in (await ask(client, "recognize", 200, {"image": image}, **data))["predictions"]]


async def counts(engine: PostgresEngine) -> dict[str, int]:
    return {each.name: each.records for each in await engine.statistics("")}


async def test_registered_faces_are_recognized(gateway: Gateway) -> None:
    engine, client = gateway
    assert await recognize(client) == ["unknown", "unknown"]
    added = await ask(client, "register", files={"image1": SCENE, "image2": RED}, userid="Ruth")
    assert (added["success"], added["message"], added["command"], added["code"]) == (True, "face added", "register", 200)
    found = await ask(client, "recognize", files={"image": SCENE})
    ruth, other = found["predictions"]
    assert (ruth["userid"], ruth["confidence"]) == ("Ruth", pytest.approx(1, abs=1e-3))
    assert (other["userid"], other["confidence"]) == ("unknown", 0)
    assert (found["success"], found["count"], found["message"]) == (True, 2, "A face was recognised")
    own = json(await client.post("/v1/vision/face", files={"image": SCENE}))["predictions"]
    assert [{**each, "confidence": 0} for each in own] == [
        {name: value for name, value in {**each, "confidence": 0}.items() if name != "userid"} for each in found["predictions"]
    ]
    assert await recognize(client, NOBODY) == []

    await ask(client, "register", files={"image": BLUE}, userid="Ben")
    assert (await ask(client, "register", files={"image": BLUE}, userid="Ben"))["message"] == "face updated"
    assert (await counts(engine))["faces"] == 3
    assert (await ask(client, "list"))["faces"] == ["Ben", "Ruth"]
    assert await recognize(client) == ["Ruth", "Ben"]
    for userid in ("Ruth", "nobody"):
        assert (await ask(client, "delete", userid=userid))["success"]
    assert (await ask(client, "list"))["faces"] == ["Ben"]
    assert await recognize(client) == ["unknown", "Ben"]
    assert (await counts(engine))["faces"] == 1


async def test_name_is_that_of_the_largest_face_and_not_of_an_indexed_picture(gateway: Gateway) -> None:
    """The same picture may be registered for two persons; none of them is a duplicate."""
    engine, client = gateway
    for userid in ("Also Ruth", "Ruth"):
        await ask(client, "register", files={"image": BLUE}, userid=userid)
    assert (await ask(client, "list"))["faces"] == ["Also Ruth", "Ruth"]
    assert {**await counts(engine), "faces": 0} == dict.fromkeys(("global", "vehicles", "people", "faces", "ocr"), 0)
    await ask(client, "delete", userid="Also Ruth")

    assert await recognize(client, BLUE, min_confidence="0.01") == ["unknown", "Ruth"]


async def test_face_of_low_quality_has_no_name(gateway: Gateway) -> None:
    """The eyes of a small face are too near to each other."""
    _, client = gateway
    await ask(client, "register", files={"image": SCENE}, userid="Ruth")
    refused = await ask(client, "register", 400, files={"image": SMALL, "image2": BLUE}, userid="Tiny")

    assert await recognize(client, SMALL, min_confidence="0.01") == ["unknown"]
    assert "quality" in refused["error"]
    assert (await ask(client, "list"))["faces"] == ["Ruth"]


async def test_registered_face_is_found_behind_many_nearer_ones_without_names(gateway: Gateway) -> None:
    engine, client = gateway
    await ask(client, "register", files={"image": BLUE}, userid="Ruth")
    (vector,) = json(await client.post("/faces/recognize", content=RED))["embeddings"]
    await engine.add("", with_faces("crowd", *[np.array(vector, np.float32)] * 500))

    assert await recognize(client, RED, min_confidence="0.01") == ["Ruth"]


async def test_invalid_registration_keeps_no_picture(gateway: Gateway) -> None:
    _, client = gateway
    for files, data in (
        ({"image": SCENE, "image2": NOBODY}, {"userid": "Ruth"}),
        ({"image": SCENE, "image2": b"no image"}, {"userid": "Ruth"}),
        ({"image": SCENE}, {"userid": " "}),
        ({"image": SCENE}, {"userid": "a\0b"}),
        ({"image": SCENE}, {"userid": "a" * 129}),
        ({"image": SCENE}, {}),
        ({"image": b""}, {"userid": "Ruth"}),
        ({}, {"userid": "Ruth"}),
        ([("image", SCENE)] * 65, {"userid": "Ruth"}),
    ):
        error = await ask(client, "register", 400, files=files, **data)
        assert (error["success"], bool(error["error"])) == (False, True)
    assert not (await ask(client, "delete", 400))["success"]
    assert (await ask(client, "list"))["faces"] == []


async def test_cameras_recognize_and_others_register(
    settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path
) -> None:
    assert triton.poll() is None
    keys = (("camera", "s", "detect"), ("boss", "s", "ingest search"), ("other", "s", "ingest detect"))
    file = write_keys(tmp_path, *keys, tenants={"other": "elsewhere"})
    async with searching(settings, database, api_keys_file=file) as (_, client):
        await ask(client, "register", files={"image": SCENE}, userid="Ruth", api_key="boss.s")
        await ask(client, "register", files={"image": BLUE}, userid="Ben", api_key="other.s")
        for action in ("register", "list", "delete"):
            files = {"image": SCENE} if action == "register" else None
            await ask(client, action, 403, files, userid="Ruth", api_key="camera.s")
            await ask(client, action, 401, files, userid="Ruth")
        assert await recognize(client, api_key="camera.s") == ["Ruth", "unknown"]
        assert await recognize(client, api_key="other.s") == ["unknown", "Ben"]
        assert (await ask(client, "list", api_key="boss.s"))["faces"] == ["Ruth"]
