"""The dialect of NVIDIA NIM for Object Detection, as aiperf and nv-ingest read it."""

import base64
from typing import Any

import httpx
import pytest

from tests.api.dialects.conformance import Box, Conformance, Sent, with_header
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
        found = [
            Box(
                label,
                one["confidence"],
                (one["x_min"] * width, one["y_min"] * height, one["x_max"] * width, one["y_max"] * height),
            )
            for label, group in image["bounding_boxes"].items()
            for one in group
        ]
        return sorted(found, key=lambda box: -box.score)

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002
        return list(answer) == ["error"] and bool(answer["error"])

    def with_key(self, sent: Sent, key: str) -> Sent:
        return with_header(sent, "Authorization", f"Bearer {key}")


async def infer(client: httpx.AsyncClient, *images: dict[str, str], **members: Any) -> httpx.Response:  # noqa: ANN401
    return await client.post("/v1/infer", json={"input": images, **members})


async def test_members_of_others_are_ignored(server: httpx.AsyncClient) -> None:
    assert len(json(await infer(server, to_input(SCENE), version="1.0.0", timeout_ms=1))["data"]) == 1


async def test_several_images_are_answered_in_their_order(server: httpx.AsyncClient) -> None:
    photo = sample_image("chelsea.jpg")
    answer = json(await infer(server, to_input(SCENE), to_input(photo), to_input(SCENE)))

    assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert [list(one["bounding_boxes"]) for one in answer["data"]] == [["red", "blue"], [], ["red", "blue"]]
    assert answer["usage"] == {"images_size_mb": pytest.approx((2 * len(SCENE) + len(photo)) / 1e6, abs=1e-6)}


async def test_a_request_fails_with_one_of_its_images(server: httpx.AsyncClient) -> None:
    """The answer has no place for an error of one image."""
    response = await infer(server, to_input(SCENE), to_input(b"this is not an image"))

    assert response.status_code == 415
    assert response.json()["error"].startswith("1 of 2 images failed; at index 1: the data is not an image")


@pytest.mark.parametrize("count", [0, 64, 65])
async def test_the_number_of_images_is_limited(server: httpx.AsyncClient, count: int) -> None:
    response = await infer(server, *[to_input(SCENE)] * count)

    assert response.status_code == (200 if count == 64 else 400), response.text


async def test_images_are_fetched_from_an_allowed_host(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, client = remote
    fetched = {"type": "image_url", "url": host.url("/scene.bmp")}
    (expected,) = json(await infer(client, to_input(SCENE)))["data"]

    assert json(await infer(client, fetched))["data"] == [expected]
    answer = json(await infer(client, fetched, to_input(SCENE), fetched))
    assert answer["data"] == [{**expected, "index": index} for index in range(3)]


async def test_the_model_can_be_named(server: httpx.AsyncClient) -> None:
    named = await infer(server, to_input(SCENE), model="nvidia/nothing-like-it")
    asked = await server.post("/v1/infer?model=yolo_head", json={"input": [to_input(SCENE)]})

    assert named.status_code == 404
    assert json(asked)["data"][0]["bounding_boxes"].keys() <= {"red", "blue"}


HOSTILE = [
    *('{"input": "x"}', '{"input": {}}', '{"input": [1]}', '{"input": [[]]}', '{"input": [{}]}', '{"input": [null]}'),
    '{"input": [{"type": "image_url", "url": null}]}',
    '{"input": [{"type": "image_url", "url": ""}]}',
    '{"input": [{"type": "image_url", "url": "data:"}]}',
    *(f'{{"input": [{{"type": "image_url", "url": "{url}"}}]}}' for url in ("https://example.org/a.jpg", "file:///etc/passwd")),
    '{"input": [{"type": "image_url", "url": "data:image/png,abc"}]}',
    '{"input": [{"type": "image_url", "url": "\\ud800"}]}',
    '{"input": [{"type": "image_url", "url": "ü"}]}',
    '{"input": [{"type": "text", "url": "data:,"}]}',
    '{"input": [{"type": "image_url", "url": "data:,"}], "threshold": NaN}',
    *(f'{{"threshold": {value}, "input": []}}' for value in ('"x"', "1e999", "-1", "[]", "9" * 5000)),
    '{"model": "\\ud800", "input": [{"type": "image_url", "url": "QUJD"}]}',
    '{"model": 7, "input": []}',
    '{"input": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"x": ' + '{"x": ' * 5000,
    '{"input": [' + '{"type": "image_url", "url": ""},' * 100_000 + "{}]}",
]


@pytest.mark.parametrize("body", HOSTILE, ids=lambda body: body[:40])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
async def test_an_invalid_body_is_a_client_error(server: httpx.AsyncClient, body: str, mark: bytes) -> None:
    response = await server.post("/v1/infer", content=mark + body.encode(), headers={"Content-Type": "application/json"})

    assert 400 <= response.status_code < 500
    assert response.json()["error"]
    assert len(response.content) < 1000


async def test_content_types_other_than_json_are_rejected(server: httpx.AsyncClient) -> None:
    """A body of another type would be parsed while others wait, even if it looks like JSON."""
    for content_type in ("application/octet-stream", "image/jpeg", "multipart/form-data; boundary=b"):
        response = await server.post("/v1/infer", content=b'{"input": []}', headers={"Content-Type": content_type})

        assert response.status_code == 415
        assert response.json()["error"].startswith("send application/json")


@pytest.mark.parametrize("prefix", ["", "/nim"])
async def test_models_are_listed_for_clients_of_both_services(server: httpx.AsyncClient, prefix: str) -> None:
    answer = json(await server.get(f"{prefix}/v1/models"))
    ids = [model["id"] for model in answer["data"]]

    assert answer == json(await server.get("/models"))
    assert answer["object"] == "list"
    assert ids[0] == "six_columns"
    assert "yolo_head" in ids


async def test_the_first_model_of_the_metadata_is_the_default_one(server: httpx.AsyncClient) -> None:
    """nv-ingest reads the version, and takes what stands before the colon for the model's name."""
    answer = json(await server.get("/v1/metadata"))

    assert answer["version"]
    assert answer["modelInfo"][0]["shortName"] == "six_columns:1"


async def test_without_triton_the_service_is_alive_but_not_ready(server: httpx.AsyncClient, lonely: httpx.AsyncClient) -> None:
    for path, message in (("live", "Service is live."), ("ready", "Service is ready.")):
        assert json(await server.get(f"/v1/health/{path}")) == {"object": "health.response", "message": message}
    ready = await lonely.get("/v1/health/ready")

    assert (ready.status_code, ready.headers["retry-after"]) == (503, "5")
    assert ready.json()["error"] == "the service is not ready"
    assert (await lonely.get("/v1/health/live")).status_code == 200
    assert (await lonely.get("/v1/models")).status_code == 503
