"""The dialects of NVIDIA NIM for Object Detection, and of the Ultralytics Platform and HUB; and the function for CVAT."""

import base64
import sys
from runpy import run_path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import httpx
import pytest

from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.fakes.http import Host, scripted
from tests.support import ROOT, SCENE, json, sample_image


def to_input(image: bytes) -> dict[str, str]:
    return {"type": "image_url", "url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}


class TestNim(Conformance):
    name = "nim"
    pixel_error = 3000 * 5e-7
    paths = ("/v1/infer",)

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        """Send a list of one image, as aiperf does."""
        return Sent("/v1/infer", {"json": {"input": [to_input(image)], "threshold": confidence}})

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401
        (image,) = answer["data"]
        assert image["index"] == 0
        sides = {"x_min": width, "y_min": height, "x_max": width, "y_max": height}
        found = [
            Box(label, one["confidence"], tuple(one[side] * size for side, size in sides.items()))
            for label, group in image["bounding_boxes"].items()
            for one in group
        ]
        return sorted(found, key=lambda box: -box.score)


async def infer(client: httpx.AsyncClient, *images: dict[str, str], status: int = 200, **members: Any) -> Any:  # noqa: ANN401
    return json(await client.post("/v1/infer", json={"input": images, **members}), status)


async def test_several_images_are_answered_in_their_order(server: httpx.AsyncClient) -> None:
    """Members of others are ignored."""
    photo = sample_image("chelsea.jpg")
    answer = await infer(server, to_input(SCENE), to_input(photo), to_input(SCENE), version="1.0.0", timeout_ms=1)

    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert [list(one["bounding_boxes"]) for one in answer["data"]] == [["red", "blue"], [], ["red", "blue"]]
    assert answer["usage"] == {"images_size_mb": pytest.approx((2 * len(SCENE) + len(photo)) / 1e6, abs=1e-6)}


async def test_models_are_listed_as_the_gateway_lists_them(server: httpx.AsyncClient) -> None:
    """And nv-ingest reads the version, and takes what stands before the colon of the first name for the model's."""
    for prefix in ("", "/nim"):
        answer = json(await server.get(f"{prefix}/v1/models"))
        assert answer == json(await server.get("/models"))
        assert (answer["object"], answer["data"][0]["id"]) == ("list", "six_columns")
    metadata = json(await server.get("/v1/metadata"))

    assert metadata["version"]
    assert metadata["modelInfo"][0]["shortName"] == "six_columns:1"


async def test_service_without_triton_is_alive_but_not_ready(server: httpx.AsyncClient, lonely: httpx.AsyncClient) -> None:
    for path, message in (("live", "Service is live."), ("ready", "Service is ready.")):
        assert json(await server.get(f"/v1/health/{path}")) == {"object": "health.response", "message": message}
    ready = await lonely.get("/v1/health/ready")

    assert (json(ready, 503)["error"], ready.headers["retry-after"]) == ("the service is not ready", "5")
    assert (await lonely.get("/v1/health/live")).status_code == 200
    assert (await lonely.get("/v1/models")).status_code == 503


class TestUltralytics(Conformance):
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


async def predict(client: httpx.AsyncClient, path: str = "/predict", **data: str) -> Any:  # noqa: ANN401
    return json(await client.post(path, **FILE, data=data))


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
    for named in (path, "/api/models/yolo_head/predict"):
        assert (await predict(server, named, conf="0.3"))["metadata"]["model"] == "yolo_head"
    json(await server.get("/ultralytics/v1/models/nothing-like-it"), 404)
    json(await server.post("/api/models/nothing-like-it/predict", **FILE), 404)
    json(await server.post(path.removeprefix("/ultralytics"), **FILE, data={"conf": "0.3"}), 400)


async def test_bad_parameter_is_named(server: httpx.AsyncClient) -> None:
    for name in ("conf", "iou", "imgsz", "decimals", "normalize"):
        for value in ("-1", "nan", "2000", ""):
            response = await server.post("/predict", **FILE, data={name: value})
            assert json(response, 400)["error"].startswith(f"{name}: expected ")


async def test_json_at_the_same_path_names_the_program_for_label_studio(server: httpx.AsyncClient) -> None:
    there = await server.post("/predict", json={"nothing": "like it"})
    here = await server.post("/ultralytics/predict", json={"nothing": "like it"})

    assert "clients/label-studio" in json(there, 404)["detail"]
    assert list(json(here, 400)) == ["error"]


def test_redirect_does_not_take_the_key_of_the_function_for_cvat_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a line break after the key, as from a file, show it in an error."""
    monkeypatch.setenv("NEREID_KEY", "camera.secret\n")
    sdk = MagicMock(auto_annotation=MagicMock(BadFunctionError=RuntimeError))  # which has an error of its own
    monkeypatch.setitem(sys.modules, "cvat_sdk", sdk)
    monkeypatch.setitem(sys.modules, "cvat_sdk.auto_annotation", sdk.auto_annotation)
    create = run_path(str(ROOT / "examples" / "cvat" / "nereid_function.py"))["create"]
    with scripted() as other:
        redirect = f"HTTP/1.1 308 Moved\r\nContent-Length: 0\r\nConnection: close\r\nLocation: {other.url}/models\r\n\r\n"
        with scripted(redirect.encode()) as server, pytest.raises(RuntimeError, match="Nereid answers 308 to /models"):
            create(server.url)

    assert [b"X-API-Key: camera.secret\r\n" in asked for asked in server.asked] == [True]
    assert other.asked == []
