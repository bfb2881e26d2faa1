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


BLUE = picture(("red", (10, 10, 29, 29)), ("blue", (100, 10, 179, 89)))
"""Its largest face is blue; that of `SCENE` is red."""
NOBODY = picture()


@pytest.fixture
async def gateway(settings: Settings, triton: EmbeddedTriton, database: str) -> AsyncIterator[Gateway]:
    assert triton.poll() is None
    async with searching(settings, database) as made:
        yield made


async def ask(client: httpx.AsyncClient, action: str, status: int = 200, files: Any = None, **data: str) -> Any:  # noqa: ANN401
    return json(await client.post(f"/v1/vision/face/{action}", files=files, data=data), status)


async def recognize(client: httpx.AsyncClient, image: bytes = SCENE, **data: str) -> list[str]:
    return [each["userid"] for each in (await ask(client, "recognize", 200, {"image": image}, **data))["predictions"]]


async def test_faces_are_registered_and_recognized(gateway: Gateway) -> None:
    _, client = gateway
    assert await recognize(client) == ["unknown", "unknown"]
    added = await ask(client, "register", files={"image": SCENE}, userid="Ruth")
    assert (added["success"], added["message"], added["command"], added["code"]) == (True, "face added", "register", 200)
    found = await ask(client, "recognize", files={"image": SCENE})
    ruth, other = found["predictions"]

    assert (ruth["userid"], ruth["confidence"]) == ("Ruth", pytest.approx(1, abs=1e-3))
    assert (other["userid"], other["confidence"]) == ("unknown", 0)
    own = json(await client.post("/v1/vision/face", files={"image": SCENE}))["predictions"]
    assert [{**each, "confidence": 0} for each in own] == [
        {name: 0 if name == "confidence" else value for name, value in each.items() if name != "userid"}
        for each in found["predictions"]
    ]
    assert (found["success"], found["count"], found["message"]) == (True, 2, "A face was recognised")
    assert await recognize(client, NOBODY) == []


async def test_several_pictures_of_several_people(gateway: Gateway) -> None:
    engine, client = gateway
    await ask(client, "register", files={"image1": SCENE, "image2": picture(("red", (10, 10, 90, 90)))}, userid="Ruth")
    await ask(client, "register", files={"image": BLUE}, userid="Ben")
    again = await ask(client, "register", files={"image": BLUE}, userid="Ben")

    assert again["message"] == "face updated"
    assert {each.name: each.records for each in await engine.statistics("")}["faces"] == 3
    assert (await ask(client, "list"))["faces"] == ["Ben", "Ruth"]
    assert await recognize(client) == ["Ruth", "Ben"]
    assert (await ask(client, "delete", userid="Ruth"))["success"]
    assert (await ask(client, "delete", userid="nobody"))["success"]
    assert (await ask(client, "list"))["faces"] == ["Ben"]
    assert await recognize(client) == ["unknown", "Ben"]
    assert {each.name: each.records for each in await engine.statistics("")}["faces"] == 1


async def test_a_name_is_given_to_one_face_of_a_picture(gateway: Gateway) -> None:
    _, client = gateway
    for image, names in ((SCENE, ["Ruth", "unknown"]), (BLUE, ["unknown", "Ruth"])):
        await ask(client, "register", files={"image": image}, userid="Ruth")
        assert await recognize(client, min_confidence="0.01") == names
        await ask(client, "delete", userid="Ruth")


async def test_a_face_of_low_quality_has_no_name(gateway: Gateway) -> None:
    """The eyes of a small face are too near to each other."""
    _, client = gateway
    await ask(client, "register", files={"image": SCENE}, userid="Ruth")
    small = picture(("red", (10, 10, 29, 29)))
    refused = await ask(client, "register", 400, files={"image": small, "image2": BLUE}, userid="Tiny")

    assert await recognize(client, small, min_confidence="0.01") == ["unknown"]
    assert "quality" in refused["error"]
    assert (await ask(client, "list"))["faces"] == ["Ruth"]


async def test_a_registered_face_is_found_behind_many_that_are_nearer(gateway: Gateway) -> None:
    """Those that are indexed have no names."""
    engine, client = gateway
    await ask(client, "register", files={"image": BLUE}, userid="Ruth")
    other = picture(("red", (10, 10, 90, 90)))
    (vector,) = json(await client.post("/faces/recognize", content=other))["embeddings"]
    await engine.add("", with_faces("crowd", *[np.array(vector, np.float32)] * 500))

    assert await recognize(client, other, min_confidence="0.01") == ["Ruth"]


async def test_a_registered_picture_is_no_duplicate_of_an_indexed_one(gateway: Gateway) -> None:
    engine, client = gateway
    for userid in ("Ruth", "Also Ruth"):
        await ask(client, "register", files={"image": SCENE}, userid=userid)

    assert (await ask(client, "list"))["faces"] == ["Also Ruth", "Ruth"]
    assert {each.name: each.records for each in await engine.statistics("")} | {"faces": 0} == dict.fromkeys(
        ("global", "vehicles", "people", "faces", "ocr"), 0
    )


async def test_an_invalid_registration_keeps_no_picture(gateway: Gateway) -> None:
    _, client = gateway
    for files, userid in (
        ({"image": SCENE, "image2": NOBODY}, "Ruth"),
        ({"image": SCENE, "image2": b"no image"}, "Ruth"),
        ({"image": SCENE}, " "),
        ({"image": SCENE}, "a\0b"),
        ({"image": SCENE}, "a" * 129),
        ({"image": b""}, "Ruth"),
        ({}, "Ruth"),
        ([("image", SCENE)] * 65, "Ruth"),
    ):
        error = await ask(client, "register", 400, files=files, userid=userid)
        assert (error["success"], bool(error["error"])) == (False, True)
    assert not (await ask(client, "register", 400, files={"image": SCENE}))["success"]
    assert not (await ask(client, "delete", 400))["success"]

    assert (await ask(client, "list"))["faces"] == []


async def test_cameras_recognize_and_others_register(
    settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path
) -> None:
    assert triton.poll() is None
    given = (("camera", "s", "detect"), ("boss", "s", "ingest search"), ("other", "s", "ingest detect"))
    file = write_keys(tmp_path, *given, tenants={"other": "elsewhere"})
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
