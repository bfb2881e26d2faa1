"""The dialect of Label Studio's ML backends, asked as Label Studio asks."""

from base64 import b64encode
from collections.abc import AsyncIterator
from json import dumps
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app import main
from app.api.dialects import labeling_config
from app.api.dialects.label_studio_regions import describe
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.api.answering.test_native import detections
from tests.api.dialects.conformance import Box, Conformance, Sent
from tests.fakes.https import HOST, LOOPBACK, Host, redirect, response, serving
from tests.support import SCENE, json, started

HEADERS = {"User-Agent": "heartex/1.20.0", "Accept": "*/*"}
"""What Label Studio sends with each request."""
CONFIG = """<View>
  <Image name="image" value="$image"/>
  <RectangleLabels name="label" toName="image" model_score_threshold="{threshold}"{others}>
    <Label value="red"/><Label value="Blue" background="#00f"/>
  </RectangleLabels>
</View>"""
NAME = "label-studio"
"""Of the host where Label Studio is."""
ENCODED = b64encode(SCENE).decode()


def config(threshold: float = 0.25, others: str = "") -> str:
    return CONFIG.format(threshold=threshold, others=f" {others}" if others else "")


def request(*images: Any, label_config: str = "", key: str = "image") -> dict[str, Any]:  # noqa: ANN401 - any JSON
    tasks = [
        {"id": number, "data": {key: image}, "meta": {}, "project": 12, "annotations": [], "predictions": []}
        for number, image in enumerate(images)
    ]
    params = {"login": None, "password": None, "hostname": "http://localhost:8080", "context": None}
    label_config = label_config or config()
    return {"json": {"tasks": tasks, "project": "12.1699", "label_config": label_config, "params": params}, "headers": HEADERS}


class TestConformance(Conformance):
    name = "label-studio"
    paths = ("/predict", "/setup")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        return Sent("/predict", request(b64encode(image).decode(), label_config=config(confidence)))

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401
        (prediction,) = answer["results"]
        assert prediction["model_version"] == "six_columns:1"
        for region in prediction["result"]:
            assert (region["from_name"], region["to_name"], region["type"]) == ("label", "image", "rectanglelabels")
            assert (region["original_width"], region["original_height"], region["image_rotation"]) == (width, height, 0)
            assert region["value"]["rotation"] == 0
        return [_to_box(region, width, height) for region in prediction["result"]]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002
        return list(answer) == ["error"] and bool(answer["error"])

    def with_key(self, sent: Sent, key: str) -> Sent:
        """Label Studio sends the user and password that are set with the backend."""
        name, _, secret = key.partition(".")
        return sent._replace(arguments={**sent.arguments, "auth": (name, secret)})


def _to_box(region: dict[str, Any], width: int, height: int) -> Box:
    value = region["value"]
    x, y = value["x"] * width / 100, value["y"] * height / 100
    corners = x, y, x + value["width"] * width / 100, y + value["height"] * height / 100
    return Box(value["rectanglelabels"][0].lower(), region["score"], corners)


async def results(server: httpx.AsyncClient, *images: Any, **others: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    found: list[dict[str, Any]] = json(await server.post("/predict", **request(*images, **others)))["results"]
    return found


def labels(prediction: dict[str, Any]) -> list[tuple[str, str]]:
    return [(region["from_name"], region["value"]["rectanglelabels"][0]) for region in prediction["result"]]


async def test_health_and_set_up(server: httpx.AsyncClient) -> None:
    """The gateway's own `/health` remains to all others; the version is that of predictions."""
    assert json(await server.get("/health", headers=HEADERS)) == {"status": "UP", "model_class": "Nereid"}
    assert json(await server.get("/label-studio/health")) == {"status": "UP", "model_class": "Nereid"}
    assert "triton" in json(await server.get("/health"))
    hello = {"project": "12.1699", "hostname": "http://localhost:8080", "access_token": "0" * 40, "extra_params": None}
    for schema in (None, "", "<View></View>", config()):
        answer = json(await server.post("/setup", json={**hello, "schema": schema}, headers=HEADERS))

        assert answer == {"model_version": "six_columns:1"}


async def test_versions_are_those_that_projects_may_name(server: httpx.AsyncClient) -> None:
    """Label Studio does not say for which project it asks."""
    found = json(await server.get("/versions", headers=HEADERS))["versions"]

    assert {"six_columns:1", "yolo_head:1"} <= set(found)
    assert "probabilities:1" not in found


async def test_the_model_may_be_that_of_the_project(server: httpx.AsyncClient) -> None:
    """`model_path` names it, as in the example for YOLO; a model that does not exist or is no detector is an error."""
    chosen = config(others='model_path="yolo_head.pt"')
    (prediction,) = await results(server, ENCODED, label_config=chosen)
    version = json(await server.post("/setup", json={"schema": chosen}, headers=HEADERS))

    assert prediction["model_version"] == version["model_version"] == "yolo_head:1"
    for name, status in (("yolov8m.pt", 404), ("../../etc", 404), ("probabilities", 400)):
        wrong = config(others=f'model_path="{name}"')
        for path, body in (("/predict", request(ENCODED, label_config=wrong)["json"]), ("/setup", {"schema": wrong})):
            answer = await server.post(path, json=body, headers=HEADERS)

            assert (answer.status_code, bool(answer.json()["error"])) == (status, True)


async def test_each_event_of_a_project_is_accepted(server: httpx.AsyncClient) -> None:
    """Events are ignored: Label Studio adds the backend's address as a webhook by itself."""
    event = {"action": "ANNOTATION_CREATED", "annotation": {"id": 1}, "project": {"id": 12}, "task": {"id": 1}}

    assert (await server.post("/webhook", json=event)).status_code == 201


async def test_labels_are_those_of_the_project(server: httpx.AsyncClient) -> None:
    """`predicted_values` map them, else names in any case; results may have another name for a label; other labels are left out."""
    one = '<Image name="i" value="$image"/><RectangleLabels name="{}" toName="i">{}</RectangleLabels>'
    for inside, expected in (
        ('<Label value="Car" predicted_values="truck, red ,bus"/><Label value="BLUE"/>', [("r", "Car"), ("r", "BLUE")]),
        ('<Label value="red" predicted_values="truck"/>', [("r", "red")]),
        ('<Label value="red" alias="rot" predicted_values="red"/>', [("r", "rot")]),
        ('<View><Header value="x"/><Label value="Blue"/></View>', [("r", "Blue")]),
        ('<Label value="person"/>', []),
        ("", []),
    ):
        (prediction,) = await results(server, ENCODED, label_config=f"<View>{one.format('r', inside)}</View>")

        assert sorted(labels(prediction)) == sorted(expected)
        assert (prediction["score"] == 0) == (not expected)


async def test_several_controls_have_labels_and_thresholds_of_their_own(server: httpx.AsyncClient) -> None:
    """Only controls of the first image count; controls of other kinds, and those to be skipped, get nothing."""
    whole = """<?xml version="1.0" encoding="UTF-8"?><!-- all of them --><View>
      <Choices name="c" toName="i"><Choice value="red"/></Choices>
      <RectangleLabels name="no" toName="i" model_skip="true"><Label value="red"/></RectangleLabels>
      <RectangleLabels name="a" toName="i" score_threshold="0.05"><Label value="red"/></RectangleLabels>
      <RectangleLabels name="b" toName="i"><Label value="blue"/></RectangleLabels>
      <RectangleLabels name="never" toName="i" model_score_threshold="1"><Label value="red"/></RectangleLabels>
      <RectangleLabels name="text" toName="t"><Label value="red"/></RectangleLabels>
      <RectangleLabels name="other" toName="j"><Label value="red"/></RectangleLabels>
      <Text name="t" value="$text"/><Image name="i" value="$picture"/><Image name="j" value="$second"/></View>"""
    (prediction,) = await results(server, ENCODED, label_config=whole, key="picture")

    assert sorted(labels(prediction)) == [("a", "red"), ("b", "blue")]


async def test_each_task_has_a_result(server: httpx.AsyncClient) -> None:
    """Results have the order of the tasks. A failed task has no `result`: Label Studio logs it and goes on."""
    data_url = f"data:image/bmp;base64,{ENCODED}"
    found = await results(server, ENCODED, "", data_url, 7, "/data/upload/1/a.jpg", "s3://bucket/a.jpg", f" {ENCODED}")

    assert ["result" in each for each in found] == [True, False, True, False, False, False, True]
    assert all(each["error"] for each in found if "result" not in each)
    assert "NEREID_LABEL_STUDIO_URL" in found[4]["error"]
    (unnamed,) = await results(server, ENCODED, key="$undefined$")
    assert unnamed["result"]


async def test_of_too_many_tasks_the_first_gets_a_result(server: httpx.AsyncClient) -> None:
    """Label Studio then asks for each alone; as many as a batch may have are answered at once."""
    assert len(await results(server, *[ENCODED] * 64)) == 64
    assert len(await results(server, *[ENCODED] * 65)) == 1


@pytest.mark.parametrize(
    "label_config",
    [
        "",
        "<View>",
        "<View></View>",
        '<!DOCTYPE x [<!ENTITY e "x">]><View>&e;</View>',
        '<View><Image name="image" value="&e;"/></View>',
        "\x00",
        "\udc00",
        "<View>" * 9000,
        "<View/>" + " " * (1 << 16),
        config(2),
        config().replace("$image", "image"),
        config().replace("$image", "$im\\age"),
        config().replace("$image", "$im&#34;age"),
        config().replace('"0.25"', '"nan"'),
        config().replace('"0.25"', '"high"'),
        config().replace("RectangleLabels", "EllipseLabels"),
        config(others='model_point_threshold="2"'),
        config().replace('toName="image"', ""),
        config().replace("</View>", '<RectangleLabels name="a" toName="image"/>' * 16 + "</View>"),
    ],
)
async def test_a_bad_configuration_is_400(server: httpx.AsyncClient, label_config: str) -> None:
    body = {**request(ENCODED)["json"], "label_config": label_config}
    answer = await server.post("/predict", content=dumps(body), headers={**HEADERS, "Content-Type": "application/json"})

    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.parametrize("tasks", [[], [7], [{}], [{"data": 1}], [{"data": {}}], [None], {}, "x", [[]], [{"data": {"image": []}}]])
async def test_bad_tasks_are_400(server: httpx.AsyncClient, tasks: object) -> None:
    answer = await server.post("/predict", json={**request()["json"], "tasks": tasks}, headers=HEADERS)

    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.fixture
async def remote(
    settings: Settings, triton: EmbeddedTriton, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Host, Host, httpx.AsyncClient]]:
    """A Label Studio at a private address, without TLS, another host, and an application that may fetch from both."""
    assert triton.poll() is None
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    async with serving(scheme="http") as studio, serving(HOST) as other:
        other.names[NAME] = [LOOPBACK]
        monkeypatch.setattr(
            main, "Fetcher", lambda hosts, max_bytes, **others: other.fetcher(*hosts, max_bytes=max_bytes, **others)
        )
        own = msgspec.structs.replace(
            settings,
            model="six_columns",
            url_hosts=f"*.example.org:{other.port}",
            label_studio_url=studio.url("/", NAME),
            label_studio_token_file=str(token),
        )
        async with started(create_app(own)) as client:
            yield studio, other, client


async def test_images_are_fetched_from_label_studio(remote: tuple[Host, Host, httpx.AsyncClient]) -> None:
    """With the token, which no other host gets, not even one that Label Studio redirects to."""
    studio, other, client = remote
    studio.answers |= {
        "/data/upload/1/a%20b.bmp": response(SCENE),
        "/data/local-files/?d=a.bmp": response(SCENE),
        "/tasks/1/resolve/": redirect(other.url("/scene.bmp")),
    }
    other.answers["/scene.bmp"] = response(SCENE)
    images = [
        "/data/upload/1/a b.bmp",
        "/data/local-files/?d=a.bmp",
        studio.url("/data/upload/1/a b.bmp", NAME),
        other.url("/scene.bmp"),
        "/tasks/1/resolve/",
        ENCODED,
        "//files.example.org/x",
        other.url("/scene.bmp", NAME),
        studio.url("/data/upload/1/a b.bmp"),
        "http://user@label-studio/x",
        f"/{'x' * 3000}",
    ]
    found = await results(client, *images)

    assert ["result" in each for each in found] == [True] * 6 + [False] * 5
    assert "2048 characters" in found[10]["error"]
    assert {headers.get("authorization") for _, headers in studio.requests} == {"Token 0123456789abcdef"}
    assert [path for path, _ in studio.requests].count("/data/upload/1/a%20b.bmp") == 2
    assert {headers.get("authorization") for _, headers in other.requests} == {None}


async def test_an_image_that_cannot_be_fetched_is_the_error_of_its_request(remote: tuple[Host, Host, httpx.AsyncClient]) -> None:
    answer = await remote[2].post("/predict", **request("/data/upload/1/missing.jpg"))

    assert answer.status_code == 424
    assert answer.json() == {"error": "the host of the image answered with status 404"}


async def test_only_tasks_may_use_label_studio(remote: tuple[Host, Host, httpx.AsyncClient]) -> None:
    studio, _, client = remote
    url = studio.url("/data/upload/1/a.bmp", NAME)
    for path, body in (("/detect", {"image": url}), ("/detect/batch", {"images": [url]})):
        answer = await client.post(path, json=body)

        assert "only https is supported" in answer.text
    assert not studio.requests


def test_a_class_without_a_label_is_named_by_its_id() -> None:
    """A project may use the class id as a label."""
    found = detections([[10, 35, 40, 65]], [0.5], [7])
    controls = labeling_config.read(config().replace('value="red"', 'value="7"'))
    (prediction,) = msgspec.json.decode(describe([found], controls))["results"]

    assert [region["value"]["rectanglelabels"] for region in prediction["result"]] == [["7"]]
