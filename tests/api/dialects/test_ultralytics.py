"""The dialect of the Ultralytics Platform and HUB, as their documents describe it."""

import base64
from typing import Any, ClassVar

import httpx
import pytest

from tests.api.dialects.conformance import Box, Conformance, Sent, with_header
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

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002
        return list(answer) == ["error"] and isinstance(answer["error"], str)

    def with_key(self, sent: Sent, key: str) -> Sent:
        return with_header(sent, "Authorization", f"Bearer {key}")


FILE: dict[str, Any] = {"files": {"file": SCENE}}


async def predict(client: httpx.AsyncClient, path: str = "/predict", **data: str) -> dict[str, Any]:
    answer: dict[str, Any] = json(await client.post(path, **FILE, data=data))
    return answer


async def test_an_answer_has_what_is_documented(server: httpx.AsyncClient) -> None:
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


@pytest.mark.parametrize("yes", ["true", "True", "1"])
async def test_boxes_can_be_fractions_with_as_many_decimals_as_wanted(server: httpx.AsyncClient, yes: str) -> None:
    pixels = (await predict(server))["images"][0]
    fractions = (await predict(server, normalize=yes, decimals="2"))["images"][0]
    height, width = pixels["shape"]
    box = pixels["results"][0]["box"]

    expected = {name: round(value / (width if name[0] == "x" else height), 2) for name, value in box.items()}
    assert fractions["results"][0]["box"] == pytest.approx(expected, abs=1e-9)


async def test_the_image_can_be_the_text_of_a_source(server: httpx.AsyncClient) -> None:
    source = base64.b64encode(SCENE).decode()
    expected = (await predict(server))["images"][0]["results"]
    sent: list[dict[str, Any]] = [{"data": {"source": source}}, {"files": {"source": (None, source)}}]
    for arguments in sent:
        assert json(await server.post("/predict", **arguments))["images"][0]["results"] == expected


async def test_the_source_is_fetched_from_an_allowed_host(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, client = remote
    expected = (await predict(client))["images"][0]["results"]
    sent: list[dict[str, Any]] = [
        {"data": {"source": host.url("/scene.bmp")}},
        {"files": {"source": (None, host.url("/scene.bmp"))}},
    ]
    for arguments in sent:
        assert json(await client.post("/predict", **arguments))["images"][0]["results"] == expected


async def test_a_model_in_the_path(server: httpx.AsyncClient) -> None:
    answer = await predict(server, "/api/models/yolo_head/predict")
    unknown = await server.post("/api/models/nothing-like-it/predict", **FILE)

    assert answer["metadata"]["model"] == "yolo_head"
    assert unknown.status_code == 404


async def test_hub_sdk_learns_that_its_key_is_valid_and_its_model_exists(server: httpx.AsyncClient) -> None:
    """It asks below the dialect's name, because the gateway has paths like these of its own."""
    path = "/ultralytics/v1/predict/yolo_head"

    assert json(await server.post("/ultralytics/v1/auth")) == {"success": True}
    assert json(await server.get("/ultralytics/v1/models/yolo_head")) == {"data": {"id": "yolo_head"}}
    assert (await server.get("/ultralytics/v1/models/nothing-like-it")).status_code == 404
    assert (await predict(server, path, conf="0.3"))["metadata"]["model"] == "yolo_head"
    assert (await server.post(path.removeprefix("/ultralytics"), **FILE, data={"conf": "0.3"})).status_code == 400


async def test_an_overlap_that_the_model_does_not_leave_is_no_error(server: httpx.AsyncClient) -> None:
    """Ultralytics' clients always send an overlap; `/detect` would reject it."""
    answer = await predict(server, "/api/models/half_four_tensors/predict", iou="0.95")
    own = await server.post("/detect?iou=0.95&model=half_four_tensors", content=SCENE)

    assert len(answer["images"][0]["results"]) == 2
    assert own.status_code == 400


@pytest.mark.parametrize("name", ["conf", "iou", "imgsz", "decimals", "normalize"])
@pytest.mark.parametrize("value", ["-1", "x", "1e999", "nan", "2000", "\ud7ff", ""])
async def test_a_bad_parameter_is_named(server: httpx.AsyncClient, name: str, value: str) -> None:
    response = await server.post("/predict", **FILE, data={name: value})

    assert response.status_code == 400
    assert response.json()["error"].startswith(f"{name}: expected ")


async def test_json_at_the_same_path_names_the_program_for_label_studio(server: httpx.AsyncClient) -> None:
    there = await server.post("/predict", json={"nothing": "like it"})
    here = await server.post("/ultralytics/predict", json={"nothing": "like it"})

    assert "clients/label-studio" in json(there, 404)["detail"]
    assert here.status_code == 400
    assert list(here.json()) == ["error"]
