"""The dialect of DeepStack and CodeProject.AI, as their clients read it, the keys in its forms, and faces that have names."""

import base64
import shlex
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import client_for, write_keys
from tests.api.dialects.conformance import SECRET, Box, Conformance, Sent
from tests.api.search.conftest import picture
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.search.made import searching, with_faces
from tests.support import ROOT, SCENE, json

PATH = "/v1/vision/detection"
FORM: dict[str, Any] = {"files": {"image": SCENE}}
CAMERA = f"camera.{SECRET}"


class TestConformance(Conformance):
    name = "deepstack"
    pixel_error = 0.5
    statuses: ClassVar[dict[int, int]] = {415: 400, 422: 400}
    paths = (PATH, "/v1/vision/custom/six_columns")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        return Sent(PATH, {"files": {"image": ("a.jpg", image)}, "data": {"min_confidence": str(confidence)}})

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401, ARG002
        assert (answer["success"], answer["count"]) == (True, len(answer["predictions"]))
        sides = ("x_min", "y_min", "x_max", "y_max")
        return [Box(one["label"], one["confidence"], tuple(one[side] for side in sides)) for one in answer["predictions"]]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401
        return answer["success"] is False and bool(answer["error"]) and (answer["duration"], answer["code"]) == (0, status)

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "data": {**sent.arguments["data"], "api_key": key}})


async def test_answer_has_what_clients_of_both_services_read(server: httpx.AsyncClient) -> None:
    """It is never chunked: Blue Iris could not read that."""
    response = await server.post(PATH, **FORM)
    answer = json(response)

    assert {"success", "predictions", "duration", "inferenceMs", "processMs", "canUseGPU"} <= set(answer)
    assert (answer["count"], answer["message"]) == (2, "Found red, blue")
    assert parsedate_to_datetime(answer["timestampUTC"]).tzinfo == UTC
    assert int(response.headers["content-length"]) == len(response.content)


async def test_frigate_gets_no_more_objects_than_it_has_room_for() -> None:
    """Its form has an empty key and no minimum score; those of other clients have not, and get all objects."""
    fake = FakeTriton()
    fake.config = {**CONFIG, "output": [{**CONFIG["output"][0], "dims": [25, 6]}]}
    rows = [[number, 8, number + 4, 16, score, 0] for number, score in enumerate([0.8] * 23 + [0.41, 0.39])]
    fake.answer = infer_response(output0=np.array(rows, np.float32))
    async with client_for(fake) as client:
        for form, query, count in (
            ({}, "", 24),
            ({"min_confidence": "0"}, "", 25),
            ({}, "?max_objects=1", 1),
            ({"api_key": ""}, "", 20),
            ({"api_key": "", "max_objects": "22"}, "", 22),
            ({"api_key": "a-key"}, "", 24),
        ):
            assert json(await client.post(PATH + query, **FORM, data=form))["count"] == count


async def test_models_in_the_path_are_listed(server: httpx.AsyncClient) -> None:
    assert "yolo_head" in {*json(await server.post("/v1/vision/custom/list"))["models"]} - {"efficientnet_lite0"}
    assert json(await server.post("/v1/vision/custom/yolo_head", **FORM))["count"] == 2
    assert json(await server.get("/v1/status/updateavailable"))["updateAvailable"] is False
    assert json(await server.get("/v1/server/status/ping"))["version"]["major"] == 0
    assert not json(await server.post("/v1/vision/custom/nothing-like-it", **FORM), 404)["success"]


async def test_paths_of_a_dialect_that_is_off_do_not_exist() -> None:
    async with client_for(FakeTriton(), dialects="none") as client:
        for path in (PATH, f"/deepstack{PATH}"):
            assert json(await client.post(path, content=SCENE), 404)["code"] == "not_found"


async def test_unknown_path_or_method_is_an_error_of_the_dialect(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    for method, path, status in (("GET", PATH, 405), ("GET", "/deepstack/nothing", 404), ("PUT", f"/deepstack{PATH}", 405)):
        assert not json(await gateway[1].request(method, path), status)["success"]
    assert "success" not in json(await gateway[1].get("/v1/vision/scene"), 404)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = write_keys(tmp_path, ("camera", SECRET, "detect"), ("monitor", SECRET, "health"))
    async with client_for(FakeTriton(), api_keys_file=file) as client:
        yield client


async def test_key_may_be_in_a_header_the_query_or_the_body(guarded: httpx.AsyncClient) -> None:
    """400 is for the image, only read once the key is known to be valid."""
    basic = {"Authorization": "Basic " + base64.b64encode(f"camera:{SECRET}".encode()).decode()}
    rows: list[tuple[dict[str, str], str, str, int]] = [
        (basic, "", "", 400),
        ({"Authorization": "Basic %%%"}, "", "", 401),
        ({}, f"?api_key={CAMERA}", "", 400),
        ({}, "?api_key=camera.wrong", CAMERA, 401),
        ({}, "?api_key=", CAMERA, 400),
        ({}, "", "\N{SNOWMAN}", 401),
        ({}, "", f"monitor.{SECRET}", 403),
        ({"X-API-Key": "camera.wrong"}, "", CAMERA, 401),
        ({"Authorization": f"Bearer {CAMERA}", "X-API-Key": CAMERA}, "", "", 401),
    ]
    for headers, query, in_body, status in rows:
        fields = {"api_key": in_body}
        response = await guarded.post(PATH + query, files={"image": b"this is no image"}, data=fields, headers=headers)
        assert not json(response, status)["success"]
    for credential, status in ((CAMERA, 200), ("camera.wrong", 401)):
        json(await guarded.post("/v1/vision/custom/list", data={"api_key": credential}, files={"unused": (None, "")}), status)


Searched = tuple[PostgresEngine, httpx.AsyncClient]
RED, SMALL = picture(red=(10, 10, 90, 90)), picture(red=(10, 10, 29, 29))
BLUE = picture(red=(10, 10, 29, 29), blue=(100, 10, 179, 89))
"""Its largest face is blue; that of `SCENE` is red."""


@pytest.fixture
async def searched(served: Settings, database: str) -> AsyncIterator[Searched]:
    async with searching(served, database) as made:
        yield made


async def ask(client: httpx.AsyncClient, action: str, status: int = 200, files: Any = None, **data: str) -> Any:  # noqa: ANN401
    return json(await client.post(f"/v1/vision/face/{action}", files=files, data=data), status)


async def recognize(client: httpx.AsyncClient, image: bytes = SCENE, **data: str) -> list[str]:
    return [each["userid"] for each in (await ask(client, "recognize", 200, {"image": image}, **data))["predictions"]]


async def test_registered_faces_are_recognized(searched: Searched) -> None:
    engine, client = searched
    assert await recognize(client) == ["unknown", "unknown"]
    added = await ask(client, "register", files={"image1": SCENE, "image2": RED}, userid="Ruth")
    assert (added["success"], added["message"], added["command"], added["code"]) == (True, "face added", "register", 200)
    found = await ask(client, "recognize", files={"image": SCENE})
    ruth, other = found["predictions"]
    assert (ruth["userid"], ruth["confidence"]) == ("Ruth", pytest.approx(1, abs=1e-3))
    assert (other["userid"], other["confidence"]) == ("unknown", 0)
    assert (found["success"], found["count"], found["message"]) == (True, 2, "A face was recognised")
    own = json(await client.post("/v1/vision/face", files={"image": SCENE}))["predictions"]
    assert [one["x_min"] for one in own] == [one["x_min"] for one in found["predictions"]]

    # The eyes of a small face are too near to each other.
    refused = (await ask(client, "register", 400, files={"image": BLUE, "image2": SMALL}, userid="Tiny"))["error"]
    assert refused.startswith("nothing was registered: the face in picture 2 is too small, turned or unclear: its quality")
    assert await recognize(client, SMALL, min_confidence="0.01") == ["unknown"]
    for message, state in (("face added", "added"), ("face updated", "replaced")):
        answer = await ask(client, "register", files={"image": BLUE}, userid="Ben")
        assert (answer["message"], [one["state"] for one in answer["registered"]]) == (message, [state])
    assert (await ask(client, "list"))["faces"] == ["Ben", "Ruth"]
    assert await recognize(client) == ["Ruth", "Ben"]
    for image_id, content in (("album", RED), ("other", BLUE)):
        json(await client.post(f"/ingest?image_id={image_id}", content=content), 201)
    for userid, images in (("Ruth", ["album", "other"]), ("nobody", [])):
        assert (await ask(client, "delete", userid=userid))["images"] == images
    assert await recognize(client) == ["unknown", "Ben"]
    assert (await ask(client, "delete", userid="Ben", delete_images="true"))["images"] == ["other"]
    await ask(client, "delete", 404, userid="Ben", delete_images="true")
    found = json(await client.post("/faces/search?min_score=0", content=SCENE))["results"]
    assert {hit["image_id"] for hit in found} == {"album"}
    assert (await engine.statistics(""))["faces"][0] == 1


async def test_page_erases_a_person(searched: Searched) -> None:
    """By the commands of docs/how-to/search.md: by her name, and by a picture what has come since."""
    engine, client = searched
    parser = ArgumentParser()
    parser.add_argument("-s", action="store_true")
    parser.add_argument("-X", default="POST")
    parser.add_argument("-F", action="append", default=[])
    parser.add_argument("url")
    page = (ROOT / "docs/how-to/search.md").read_text()
    by_name, by_picture, by_id = page.partition("### Erase a person")[2].split("```")[1].splitlines()[1:]

    async def follow(command: str) -> Any:  # noqa: ANN401
        curl = parser.parse_args(shlex.split(command)[1:])
        fields = {
            name: (None, value) if value[0] != "@" else ("image", RED)
            for name, _, value in (each.partition("=") for each in curl.F)
        }
        return json(await client.request(curl.X, curl.url.removeprefix("http://127.0.0.1:4603"), files=fields))

    await ask(client, "register", files={"image": RED}, userid="Ada")
    json(await client.post("/ingest?image_id=album", content=RED), 201)
    assert (await follow(by_name))["images"] == ["album"]
    json(await client.post("/ingest?image_id=party", content=RED), 201)
    assert {hit["image_id"] for hit in (await follow(by_picture))["results"]} == {"party"}
    await follow(by_id)
    assert not any(records for records, _ in (await engine.statistics("")).values())


async def test_registered_face_is_found_behind_others_without_a_name(searched: Searched) -> None:
    """The same picture may be registered for two persons; none of them is a duplicate."""
    engine, client = searched
    for userid in ("Also Ruth", "Ruth"):
        await ask(client, "register", files={"image": BLUE}, userid=userid)
    assert (await ask(client, "list"))["faces"] == ["Also Ruth", "Ruth"]
    await ask(client, "delete", userid="Also Ruth")
    (vector,) = json(await client.post("/faces/recognize", content=RED))["embeddings"]
    await engine.add("", with_faces("crowd", *[np.array(vector, np.float32)] * 500))

    assert await recognize(client, BLUE, min_confidence="0.01") == ["unknown", "Ruth"]
    assert await recognize(client, RED, min_confidence="0.01") == ["Ruth"]


async def test_cameras_recognize_and_others_register(served: Settings, database: str, tmp_path: Path) -> None:
    keys = (("camera", "s", "detect"), ("boss", "s", "ingest search"), ("other", "s", "ingest detect"))
    file = write_keys(tmp_path, *keys, tenants={"other": "elsewhere"})
    async with searching(served, database, api_keys_file=file) as (_, client):
        await ask(client, "register", files={"image": SCENE}, userid="Ruth", api_key="boss.s")
        await ask(client, "register", files={"image": BLUE}, userid="Ben", api_key="other.s")
        for action in ("register", "list", "delete"):
            files = {"image": SCENE} if action == "register" else None
            await ask(client, action, 403, files, userid="Ruth", api_key="camera.s")
            await ask(client, action, 401, files, userid="Ruth")
        assert await recognize(client, api_key="camera.s") == ["Ruth", "unknown"]
        assert await recognize(client, api_key="other.s") == ["unknown", "Ben"]
        assert (await ask(client, "list", api_key="boss.s"))["faces"] == ["Ruth"]
