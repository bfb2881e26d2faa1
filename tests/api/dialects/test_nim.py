"""The dialect of NVIDIA NIM for Object Detection, as aiperf and nv-ingest read it."""

import base64
from typing import Any

import httpx
import pytest

from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.fakes.https import Host
from tests.support import SCENE, json, sample_image


def to_input(image: bytes) -> dict[str, str]:
    return {"type": "image_url", "url": f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"}


class TestConformance(Conformance):
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


async def test_request_fails_with_one_of_its_images(server: httpx.AsyncClient) -> None:
    """The answer has no place for an error of one image."""
    answer = await infer(server, to_input(SCENE), to_input(b"this is not an image"), status=415)

    assert answer["error"].startswith("1 of 2 images failed; at index 1: the data is not an image")
    for count, status in ((0, 400), (64, 200), (65, 400)):
        await infer(server, *[to_input(SCENE)] * count, status=status)


async def test_images_are_fetched_from_an_allowed_host(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, client = remote
    fetched = {"type": "image_url", "url": host.url("/scene.bmp")}
    (expected,) = (await infer(client, to_input(SCENE)))["data"]

    assert (await infer(client, fetched))["data"] == [expected]
    answer = await infer(client, fetched, to_input(SCENE), fetched)
    assert answer["data"] == [{**expected, "index": index} for index in range(3)]


async def test_model_can_be_named(server: httpx.AsyncClient) -> None:
    await infer(server, to_input(SCENE), model="nvidia/nothing-like-it", status=404)
    asked = json(await server.post("/v1/infer?model=yolo_head", json={"input": [to_input(SCENE)]}))

    assert asked["data"][0]["bounding_boxes"].keys() <= {"red", "blue"}


IMAGE = '"type": "image_url", "url":'
HUGE = f'{{{IMAGE} ""}},' * 100_000
HOSTILE = [
    *('{"input": "x"}', '{"input": [1]}', '{"input": [[]]}', '{"input": [{}]}', '{"input": [{"type": "text", "url": "data:,"}]}'),
    *(f'{{"input": [{{{IMAGE} "{url}"}}]}}' for url in ("", "data:", "data:image/png,abc", "https://example.org/a.jpg", "\\ud800")),
    *(f'{{"threshold": {value}, "input": [{{{IMAGE} "data:,"}}]}}' for value in ("NaN", '"x"', "1e999", "-1", "9" * 5000)),
    f'{{"model": "\\ud800", "input": [{{{IMAGE} "QUJD"}}]}}',
    f'{{"input": {"[" * 5000}{"]" * 5000}}}',
    f'{{"input": [{HUGE}{{}}]}}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: body[:40])
async def test_invalid_body_is_a_short_client_error(server: httpx.AsyncClient, body: str) -> None:
    for mark in (b"", b"\xef\xbb\xbf"):
        response = await server.post("/v1/infer", content=mark + body.encode(), headers={"Content-Type": "application/json"})

        assert 400 <= response.status_code < 500
        assert response.json()["error"]
        assert len(response.content) < 1000


async def test_content_type_other_than_json_is_rejected(server: httpx.AsyncClient) -> None:
    """A body of another type would be parsed while others wait, even if it looks like JSON."""
    for content_type in ("application/octet-stream", "image/jpeg", "multipart/form-data; boundary=b"):
        response = await server.post("/v1/infer", content=b'{"input": []}', headers={"Content-Type": content_type})
        assert json(response, 415)["error"].startswith("send application/json")


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
