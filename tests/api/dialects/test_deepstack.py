"""The dialect of DeepStack and CodeProject.AI, as their clients read it, and the keys in its forms."""

import base64
from collections.abc import AsyncIterator
from datetime import UTC
from email.utils import parsedate_to_datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from app.api.admission import middleware
from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.api.dialects.conformance import SECRET, URLENCODED, Box, Conformance, Sent
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.support import SCENE, captured_log, json, started

PATH = "/v1/vision/detection"
FORM: dict[str, Any] = {"files": {"image": SCENE}}
CAMERA, MONITOR = f"camera.{SECRET}", f"monitor.{SECRET}"
BEARER = {"Authorization": f"Bearer {CAMERA}"}


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
    assert (answer["code"], answer["command"], answer["moduleId"]) == (200, "detect", "nereid")
    assert (answer["count"], answer["message"]) == (2, "Found red, blue")
    assert parsedate_to_datetime(answer["timestampUTC"]).tzinfo == UTC
    assert int(response.headers["content-length"]) == len(response.content)


@pytest.mark.parametrize(
    ("form", "query", "count"),
    [
        ({}, "", 24),
        ({"min_confidence": "0"}, "", 25),
        ({"min_confidence": "0.7"}, "", 23),
        ({}, "?max_objects=1", 1),
        ({"api_key": ""}, "", 20),
        ({"api_key": "", "max_objects": "22"}, "", 22),
        ({"api_key": "", "min_confidence": "0.4"}, "", 24),
        ({"api_key": "a-key"}, "", 24),
    ],
)
async def test_frigate_gets_no_more_objects_than_it_has_room_for(form: dict[str, str], query: str, count: int) -> None:
    """Its form has an empty key and no minimum score; those of other clients have not, and get all objects."""
    fake = FakeTriton()
    fake.config = {**CONFIG, "output": [{**CONFIG["output"][0], "dims": [25, 6]}]}
    rows = [[number, 8, number + 4, 16, score, 0] for number, score in enumerate([0.8] * 23 + [0.41, 0.39])]
    fake.answer = infer_response(output0=np.array(rows, np.float32))
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:
        assert json(await client.post(PATH + query, **FORM, data=form))["count"] == count


async def test_frigate_loses_no_object_with_its_classes_in_the_query(server: httpx.AsyncClient) -> None:
    """It stops at the first score below 0.4 and at the first name that it does not know."""
    answer = json(await server.post(f"{PATH}?classes=blue", **FORM))
    read = list(takewhile(lambda one: one["confidence"] >= 0.4 and one["label"] == "blue", answer["predictions"]))

    assert len(read) == 1
    assert json(await server.post(f"{PATH}?classes=", **FORM))["count"] == 2


async def test_models_in_the_path_are_listed(server: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        listed = json(await server.request(method, "/v1/vision/custom/list"))
        assert {"six_columns", "yolo_head"} <= set(listed["models"])
        assert "efficientnet_lite0" not in listed["models"]
        assert (listed["success"], listed["command"], listed["statusData"]) == (True, "list", None)
    answer = json(await server.post("/v1/vision/custom/yolo_head", **FORM))

    assert (answer["command"], answer["count"]) == ("custom", 2)
    assert not json(await server.post("/v1/vision/custom/nothing-like-it", **FORM), 404)["success"]


async def test_there_is_never_an_update(server: httpx.AsyncClient) -> None:
    """Clients ask for updates before they show the service as working."""
    answer = json(await server.get("/v1/status/updateavailable"))

    assert (answer["success"], answer["updateAvailable"]) == (True, False)
    assert {"major", "minor", "patch", "preRelease", "securityUpdate", "build", "file", "releaseNotes"} == set(answer["current"])


async def test_log_line_has_the_route_model_and_code(
    gateway: tuple[FakeTriton, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of routes of one image, and of a list of images."""
    log = captured_log(monkeypatch, middleware)
    await gateway[1].post("/v1/vision/custom/tiny", files={"image": b"this is no image"})
    await gateway[1].post("/infer/object_detection", json={"model_id": "tiny", "image": {"type": "base64", "value": "QUJD"}})

    assert [[line.kwargs[name] for name in ("route", "model", "status", "code")] for line in log] == [
        ["/deepstack/v1/vision/custom/{model}", "tiny", 400, "unsupported_format"],
        ["/roboflow/infer/object_detection", "tiny", 415, "unsupported_format"],
    ]


async def test_paths_of_a_dialect_that_is_off_do_not_exist() -> None:
    fake = FakeTriton()
    async with serving(fake), started(create_app(settings_for(fake.url, dialects="none"))) as client:
        for path in (PATH, f"/deepstack{PATH}"):
            assert json(await client.post(path, content=SCENE), 404)["code"] == "not_found"


async def test_unknown_path_or_method_is_an_error_of_the_dialect(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    for method, path, status in (("GET", PATH, 405), ("GET", "/deepstack/nothing", 404), ("PUT", f"/deepstack{PATH}", 405)):
        assert not json(await gateway[1].request(method, path), status)["success"]
    assert "success" not in json(await gateway[1].get("/v1/vision/scene"), 404)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = write_keys(tmp_path, ("camera", SECRET, "detect"), ("monitor", SECRET, "health"))
    fake = FakeTriton()
    async with serving(fake), started(create_app(settings_for(fake.url, api_keys_file=file))) as client:
        yield client


@pytest.mark.parametrize(
    ("headers", "query", "in_body", "status"),
    [
        ({}, "", None, 401),
        ({"Authorization": "Basic " + base64.b64encode(f"camera:{SECRET}".encode()).decode()}, "", "", 400),
        ({"Authorization": "Basic %%%"}, "", "", 401),
        ({}, f"?api_key={CAMERA}", "", 400),
        ({}, "?api_key=camera.wrong", CAMERA, 401),
        ({}, "?api_key=", CAMERA, 400),
        ({}, "?api_key=", "", 401),
        ({}, "", CAMERA, 400),
        ({}, "", "\N{SNOWMAN}", 401),
        ({}, "", MONITOR, 403),
        ({"X-API-Key": "camera.wrong"}, "", CAMERA, 401),
        (BEARER, "", "camera.wrong", 400),
        ({**BEARER, "X-API-Key": CAMERA}, "", "", 401),
    ],
)
async def test_key_may_be_in_a_header_the_query_or_the_body(
    guarded: httpx.AsyncClient, headers: dict[str, str], query: str, in_body: str | None, status: int
) -> None:
    """400 is for the image, only read once the key is known to be valid."""
    fields = {} if in_body is None else {"api_key": in_body}
    response = await guarded.post(PATH + query, files={"image": b"this is no image"}, data=fields, headers=headers)

    assert not json(response, status)["success"]
    assert status == 401 or "api_key" not in response.text


async def test_list_takes_the_key_of_a_form(guarded: httpx.AsyncClient) -> None:
    path, others = "/v1/vision/custom/list", {"unused": (None, "")}
    for credential, status in ((CAMERA, 200), ("camera.wrong", 401)):
        for form in ({"data": {"api_key": credential}}, {"data": {"api_key": credential}, "files": others}):
            assert (await guarded.post(path, **form)).status_code == status

    async def chunks() -> AsyncIterator[bytes]:
        yield f"api_key={CAMERA}".encode()

    assert (await guarded.post(path, content=chunks(), headers={"Content-Type": URLENCODED})).status_code == 200
    assert (await guarded.post(path)).status_code == 401
    assert (await guarded.get(f"{path}?api_key={CAMERA}")).status_code == 200


async def test_text_and_faces_are_those_of_the_gateway(faces: httpx.AsyncClient, server: httpx.AsyncClient) -> None:
    for path in ("/v1/image/ocr", "/deepstack/v1/vision/ocr"):
        read = json(await faces.post(path, files={"image": SCENE}, data={"min_confidence": "0.8"}))
        assert [one["label"] for one in read["predictions"]] == ["r"]
        assert (read["success"], read["count"], read["command"], read["message"]) == (True, 1, "ocr", "Found r")
    own = json(await faces.post("/faces/detect?confidence=0.4", content=SCENE))["faces"]
    found = json(await faces.post("/v1/vision/face", **FORM))["predictions"]
    assert [(one["confidence"], "label" in one) for one in found] == [(face["score"], False) for face in own]
    assert found[0]["x_min"] == pytest.approx(own[0]["box"][0] * 200, abs=1)
    same = json(await faces.post("/v1/vision/face/match", files={"image1": SCENE, "image2": SCENE}))
    assert (same["success"], same["similarity"]) == (True, 1.0)
    for action in ("register", "recognize", "list", "delete"):
        error = json(await faces.post(f"/v1/vision/face/{action}", data={"userid": "a"}), 404)
        assert (error["success"], "`nereid serve --search` turns it on" in error["error"]) == (False, True)
    for path, names in (("face", ["image"]), ("face/match", ["image1", "image2"])):  # faces are off by default
        error = json(await server.post(f"/v1/vision/{path}", files=dict.fromkeys(names, SCENE)), 404)
        assert "NEREID_FACES" in error["error"]
