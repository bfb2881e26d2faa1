"""The dialect of the Ultralytics Platform and HUB, as their documents describe it."""

import base64
from typing import Any, ClassVar

import httpx
import pytest

from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.fakes.https import Host
from tests.support import SCENE, json


class TestConformance(Conformance):
    name = "ultralytics"
    pixel_error = 1e-5
    statuses: ClassVar[dict[int, int]] = {415: 400, 422: 400}
    paths = ("/predict", "/api/models/six_columns/predict", "/v1/predict/six_columns")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        data = {"conf": str(confidence), "iou": "0.7", "imgsz": "640"}
        return Sent("/predict", {"files": {"file": ("image.jpg", image)}, "data": data})

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401
        (image,) = answer["images"]
        assert image["shape"] == [height, width]
        return [Box(one["name"], one["confidence"], tuple(one["box"].values())) for one in image["results"]]


FILE: dict[str, Any] = {"files": {"file": SCENE}}


async def predict(client: httpx.AsyncClient, path: str = "/predict", **data: str) -> dict[str, Any]:
    answer: dict[str, Any] = json(await client.post(path, **FILE, data=data))
    return answer


async def test_answer_has_what_is_documented(server: httpx.AsyncClient) -> None:
    answer = await predict(server)
    (image,) = answer["images"]

    assert set(image) == {"shape", "results", "speed"}
    assert set(image["results"][0]) == {"class", "name", "confidence", "box"}
    assert list(image["results"][0]["box"]) == ["x1", "y1", "x2", "y2"]
    assert set(image["speed"]) == {"preprocess", "inference", "postprocess"}
    assert image["speed"]["inference"] > 0
    assert set(answer["metadata"]) == {"imageCount", "functionTimeCall", "model", "version"}
    assert (answer["metadata"]["imageCount"], answer["metadata"]["model"]) == (1, "six_columns")
    assert 0 < answer["metadata"]["functionTimeCall"] < 60


async def test_boxes_can_be_fractions_with_as_many_decimals_as_wanted(server: httpx.AsyncClient) -> None:
    pixels = (await predict(server))["images"][0]
    height, width = pixels["shape"]
    box = pixels["results"][0]["box"]
    expected = {name: round(value / (width if name[0] == "x" else height), 2) for name, value in box.items()}
    for yes in ("true", "True", "1"):
        fractions = (await predict(server, normalize=yes, decimals="2"))["images"][0]
        assert fractions["results"][0]["box"] == pytest.approx(expected, abs=1e-9)


async def test_image_can_be_text_or_an_allowed_address_in_the_source(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, client = remote
    expected = (await predict(client))["images"][0]["results"]
    for source in (base64.b64encode(SCENE).decode(), host.url("/scene.bmp")):
        sent: list[dict[str, Any]] = [{"data": {"source": source}}, {"files": {"source": (None, source)}}]
        for arguments in sent:
            assert json(await client.post("/predict", **arguments))["images"][0]["results"] == expected


async def test_model_in_the_path(server: httpx.AsyncClient) -> None:
    """hub-sdk asks below the dialect's name, because the gateway has paths like these of its own."""
    path = "/ultralytics/v1/predict/yolo_head"
    assert json(await server.post("/ultralytics/v1/auth")) == {"success": True}
    assert json(await server.get("/ultralytics/v1/models/yolo_head")) == {"data": {"id": "yolo_head"}}
    for named in (path, "/api/models/yolo_head/predict"):
        assert (await predict(server, named, conf="0.3"))["metadata"]["model"] == "yolo_head"
    json(await server.get("/ultralytics/v1/models/nothing-like-it"), 404)
    json(await server.post("/api/models/nothing-like-it/predict", **FILE), 404)
    json(await server.post(path.removeprefix("/ultralytics"), **FILE, data={"conf": "0.3"}), 400)


async def test_overlap_that_the_model_does_not_leave_is_no_error(server: httpx.AsyncClient) -> None:
    """Ultralytics' clients always send an overlap; `/detect` would reject it."""
    answer = await predict(server, "/api/models/half_four_tensors/predict", iou="0.95")

    assert len(answer["images"][0]["results"]) == 2
    json(await server.post("/detect?iou=0.95&model=half_four_tensors", content=SCENE), 400)


@pytest.mark.parametrize("name", ["conf", "iou", "imgsz", "decimals", "normalize"])
async def test_bad_parameter_is_named(server: httpx.AsyncClient, name: str) -> None:
    for value in ("-1", "x", "nan", "2000", "\ud7ff", ""):
        response = await server.post("/predict", **FILE, data={name: value})
        assert json(response, 400)["error"].startswith(f"{name}: expected ")


async def test_json_at_the_same_path_names_the_program_for_label_studio(server: httpx.AsyncClient) -> None:
    there = await server.post("/predict", json={"nothing": "like it"})
    here = await server.post("/ultralytics/predict", json={"nothing": "like it"})

    assert "clients/label-studio" in json(there, 404)["detail"]
    assert list(json(here, 400)) == ["error"]
