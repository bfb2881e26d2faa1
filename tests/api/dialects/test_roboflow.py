"""The dialect of Roboflow, as `inference-sdk` and its users' own programs speak it."""

import json as stdlib_json
from base64 import b64decode, b64encode
from io import BytesIO
from random import Random
from typing import Any
from uuid import UUID

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from tests.api.dialects.conformance import Box, Conformance, Sent, random_scene
from tests.fakes import models
from tests.fakes.https import Host
from tests.support import SCENE, json

V1 = "/infer/object_detection"
V0 = "/six_columns/1"
TEXT = b64encode(models.scene("PNG")).decode()
IMAGE = {"type": "base64", "value": TEXT}


class _RoboflowConformance(Conformance):
    name = "roboflow"
    paths = (V1, V0, "/model/add")

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401
        assert answer["image"] == {"width": width, "height": height}
        assert set(answer) == {"inference_id", "time", "image", "predictions"}
        return [
            Box(
                one["class"],
                one["confidence"],
                (
                    one["x"] - one["width"] / 2,
                    one["y"] - one["height"] / 2,
                    one["x"] + one["width"] / 2,
                    one["y"] + one["height"] / 2,
                ),
            )
            for one in answer["predictions"]
        ]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401
        return set(answer) == {"status", "message"} and answer["status"] == status and bool(answer["message"])


class TestV1(_RoboflowConformance):
    """Roboflow's self-hosted inference server."""

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        content = {"model_id": "six_columns/1", "image": {"type": "base64", "value": b64encode(image).decode()}}
        return Sent(V1, {"json": {**content, "confidence": confidence, "disable_active_learning": False, "source": None}})

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "json": {**sent.arguments["json"], "api_key": key}})


class TestV0(_RoboflowConformance):
    """Roboflow's hosted API."""

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        """The hosted API takes base64 declared as a form, and percentages."""
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        return Sent(V0, {"content": b64encode(image), "headers": headers, "params": {"confidence": confidence * 100}})

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "params": {**sent.arguments["params"], "api_key": key}})


@pytest.mark.parametrize("seed", range(24))
async def test_parameters_mean_what_they_mean_to_the_gateway(server: httpx.AsyncClient, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    image, _, _ = random_scene(random)
    model = random.choice(["six_columns", "yolo_head", "yolox_head", "half_four_tensors"])
    own: dict[str, Any] = {"confidence": 0.4, "iou": 0.3, "boxes": "cxcywh", "max_detections": 300}
    v1: dict[str, Any] = {}
    v0: dict[str, Any] = {}
    if model == "six_columns":
        del own["iou"]
    if random.random() < 0.6:
        own["confidence"] = v1["confidence"] = random.choice([0.05, 0.3, 0.85])
        v0["confidence"] = own["confidence"] * random.choice([1, 100])
    if random.random() < 0.6:
        own["iou"] = v1["iou_threshold"] = v0["overlap"] = random.choice([0.0, 0.2, 0.45, 0.7])
    if random.random() < 0.5:
        names = random.sample(["red", "blue"], random.randint(1, 2))
        own["classes"] = v0["classes"] = ",".join(names)
        v1["class_filter"] = names
    else:  # of some clients without a filter
        v0["classes"], v1["class_filter"] = "", []
    if random.random() < 0.5:
        own["max_detections"] = v1["max_detections"] = v0["max_detections"] = random.randint(1, 3)
    expected = json(await server.post(f"/predict/{model}", params=own, content=image))["detections"]
    first = json(
        await server.post(V1, json={"model_id": model, "image": {"type": "base64", "value": b64encode(image).decode()}, **v1})
    )
    second = json(await server.post(f"/{model}/1", params=v0, files={"file": ("a.jpg", image)}))

    for answer in (first, second):
        boxes = [[one[name] for name in ("x", "y", "width", "height", "confidence", "class_id")] for one in answer["predictions"]]
        wanted = [[*one["bbox"], one["confidence"], one["class_id"]] for one in expected]
        np.testing.assert_allclose(boxes, wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["blue", "dragon"], ["blue"]),
        (["dragon"], []),
        (["red,blue"], []),
        (["red,blue", "red"], ["red"]),
        ("red,blue", ["red", "blue"]),
    ],
)
async def test_classes_that_the_model_does_not_have_are_left_out(
    server: httpx.AsyncClient, names: str | list[str], found: list[str]
) -> None:
    """A name in a list may have a comma; a text, and the `classes` of v0, are names separated by commas."""
    v1 = json(await server.post(V1, json={"image": IMAGE, "class_filter": names}))
    v0 = json(await server.post(V0, params={"classes": f"{found[0]},dragon" if found else "dragon"}, content=SCENE))

    assert [one["class"] for one in v1["predictions"]] == found
    assert [one["class"] for one in v0["predictions"]] == found[:1]


@pytest.mark.parametrize("number", [1, 2, 5])
async def test_a_list_of_images_is_answered_by_a_list(server: httpx.AsyncClient, number: int) -> None:
    answer = json(await server.post(V1, json={"image": [IMAGE] * number, "confidence": "best"}))

    assert [[one["class"] for one in each["predictions"]] for each in answer] == [["red", "blue"]] * number
    assert len({each["inference_id"] for each in answer}) == number
    assert len({UUID(one["detection_id"]) for each in answer for one in each["predictions"]}) == 2 * number
    assert all(0 < each["time"] < 60 for each in answer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": [IMAGE] * 65}, "exceeds the maximum of 64"),
        ({"image": []}, "the list of images is empty"),
        ({"image": [[IMAGE]]}, '"type": "base64"'),
        ({"image": None}, '"type": "base64"'),
        ({"image": {"type": "base64", "value": ""}}, "empty"),
        ({"image": {"type": "base64", "value": "é"}}, "not base64"),
        ({"image": {"type": "numpy", "value": "gASV"}}, "'numpy' are not supported"),
        ({"image": {"type": "url", "value": "https://example.org/a.jpg"}}, "NEREID_URL_HOSTS"),
        ({"image": [IMAGE, {"type": "url", "value": "file:///etc/passwd"}]}, "NEREID_URL_HOSTS"),
        ({"image": [IMAGE, {"type": "url", "value": "x"}], "visualize_predictions": True}, "visualize_predictions"),
        ({"confidence": 40}, "confidence: expected a number from 0 to 1"),
        ({"iou_threshold": "x"}, "iou_threshold: expected a number from 0 to 1"),
        ({"max_detections": 10**30}, "max_detections: expected a whole number"),
        ({"class_filter": [["red"]]}, '"class_filter" is a list; expected a string, a finite number'),
        ({"class_filter": ["x" * 2**16]}, "the JSON object has more than 64 KiB beside its image"),
        ({"confidence": [0.4]}, '"confidence" is a list'),
    ],
)
async def test_errors_say_what_is_wrong(server: httpx.AsyncClient, changes: dict[str, Any], message: str) -> None:
    answer = json(await server.post(V1, json={"image": IMAGE, **changes}), status=400)

    assert message in answer["message"]


@pytest.mark.parametrize("model_id", ["nothing-like-it/1", "six_columns/9", "a/b/c", "", "/1", "six_columns/0", "six_columns/-1"])
async def test_a_model_that_does_not_exist(server: httpx.AsyncClient, model_id: str) -> None:
    for path in (V1, "/model/add"):
        answer = json(await server.post(path, json={"image": IMAGE, "model_id": model_id}), status=404)

        assert answer["message"]


async def test_a_body_may_be_declared_as_curl_does(server: httpx.AsyncClient) -> None:
    content = msgspec.json.encode({"image": IMAGE})
    form = await server.post(V1, content=content, headers={"Content-Type": "application/x-www-form-urlencoded"})
    text = await server.post(V1, content=content, headers={"Content-Type": "image/png"})

    assert len(json(form)["predictions"]) == 2
    assert "application/json" in json(text, status=415)["message"]


async def test_models_are_listed_and_added(server: httpx.AsyncClient) -> None:
    listed = json(await server.get("/model/registry"))["models"]
    added = json(await server.post("/model/add", json={"model_id": "six_columns", "api_key": "any"}))["models"]

    assert {
        "model_id": "six_columns/1",
        "task_type": "object-detection",
        "batch_size": None,
        "input_height": 128,
        "input_width": 128,
    } in listed
    assert not any(model["model_id"].startswith("efficientnet") for model in listed)
    assert added[0] == {**added[0], "model_id": "six_columns"}
    assert added[1:] == [model for model in listed if model["model_id"] != "six_columns/1"]
    assert "classifier" in json(await server.post("/model/add", json={"model_id": "efficientnet_lite0"}), status=400)["message"]


@pytest.mark.parametrize("number", [0, 1, 3])
async def test_pictures_are_drawn(server: httpx.AsyncClient, number: int) -> None:
    foreign = {"url": "https://example.org/a.jpg", "version": "1.0.0"}
    content = {"image": [IMAGE] * number if number else IMAGE, "visualize_predictions": 1 if number else True, **foreign}
    answer = json(await server.post(V1, json=content))

    for each in answer if number else [answer]:
        with Image.open(BytesIO(b64decode(each["visualization"]))) as picture:
            assert (picture.format, picture.size) == ("JPEG", (200, 100))
        assert len(each["predictions"]) == 2


async def test_v0_formats(server: httpx.AsyncClient) -> None:
    both = json(await server.post(f"{V0}?format=image_and_json&labels=true&stroke=3", files={"file": ("a.jpg", SCENE)}))
    picture = await server.post(f"{V0}?format=image", files={"file": ("a.jpg", SCENE)})

    assert picture.headers["content-type"] == "image/jpeg"
    assert b64decode(both["visualization"])[:2] == picture.content[:2] == b"\xff\xd8"
    assert len(both["predictions"]) == 2


@pytest.mark.parametrize(
    ("content", "content_type"),
    [
        (TEXT.encode(), "application/x-www-form-urlencoded"),
        (TEXT.encode(), "application/json"),
        (f"data:image/png;base64,{TEXT}".encode(), "application/x-www-form-urlencoded"),
        (SCENE, "application/x-www-form-urlencoded"),
        (SCENE, "image/bmp"),
    ],
)
async def test_v0_bodies(server: httpx.AsyncClient, content: bytes, content_type: str) -> None:
    """`inference-sdk` declares base64 to be JSON; files are sent as they are."""
    answer = json(await server.post(V0, content=content, headers={"Content-Type": content_type}))

    assert len(answer["predictions"]) == 2


@pytest.mark.parametrize("confidence", ["101", "-1", "x", "nan"])
async def test_v0_thresholds_are_fractions_or_percentages(server: httpx.AsyncClient, confidence: str) -> None:
    for name in ("confidence", "overlap"):
        answer = json(await server.post(f"{V0}?{name}={confidence}", files={"file": ("a.jpg", SCENE)}), status=400)

        assert answer["message"] == f"{name}: expected a number from 0 to 100"


async def test_the_gateways_own_paths_stay_its_own(server: httpx.AsyncClient) -> None:
    """A model whose name is a number; below the dialect's name, `predict` is one like any other."""
    own = await server.post("/predict/7", content=SCENE)
    other = await server.post("/roboflow/predict/7", content=SCENE)

    assert own.json()["code"] == "unknown_model"
    assert own.headers["content-type"] == "application/problem+json"
    assert json(other, status=404) == {"status": 404, "message": own.json()["detail"]}
    assert (await server.get(V0)).json()["code"] == "not_found"


@pytest.mark.parametrize(("version", "status"), [("0", 404), ("7", 404), ("9" * 19, 404), ("9" * 5000, 400)])
async def test_versions_that_no_model_has(server: httpx.AsyncClient, version: str, status: int) -> None:
    assert (await server.post(f"/six_columns/{version}", content=SCENE)).status_code == status


VALUES: list[Any] = [
    None, True, -1, 0, 10**400, 1e308, "", "x", "NaN", "\ud83d\ude00", "\u0000", [], {}, [[]], [None] * 2000, {"a": {"b": [1]}},
    {"type": 1}, {"type": "base64", "value": 7}, {"type": "url", "value": "\u2028"}, [IMAGE, 1], [IMAGE] * 3,
]  # fmt: skip
NAMES = [
    "image", "model_id", "api_key", "confidence", "iou_threshold", "class_filter", "max_detections", "class_agnostic_nms",
    "visualize_predictions", "model", "version", "url", "unknown", "id",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
async def test_any_json_is_answered_or_refused(server: httpx.AsyncClient, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    for _ in range(60):
        content = {"image": IMAGE} | {name: random.choice(VALUES) for name in random.sample(NAMES, random.randint(1, 4))}
        text = stdlib_json.dumps(content).replace('"NaN"', random.choice(["NaN", "1e999", '"\\ud800"', "1"]))
        for path in (V1, "/model/add", V0):
            response = await server.post(path, content=text.encode(), headers={"Content-Type": "application/json"})

            assert response.status_code < 500, (path, text[:300], response.text)
            assert response.status_code == 200 or set(response.json()) == {"status", "message"}, text[:300]


async def test_images_are_fetched_from_hosts_that_are_allowed(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, server = remote
    url = host.url("/scene.bmp")
    image = {"type": "url", "value": url}
    alone = json(await server.post(V1, json={"image": image, "visualize_predictions": True}))
    one = json(await server.post(V1, json={"image": [image]}))
    two = json(await server.post(V1, json={"image": [image, IMAGE]}))
    v0 = json(await server.post(V0, params={"image": url}))
    gone = json(await server.post(V0, params={"image": f"{url}x"}), status=424)

    assert b64decode(alone["visualization"])[:2] == b"\xff\xd8"
    assert [len(answer["predictions"]) for answer in (alone, *one, *two, v0)] == [2] * 5
    assert gone["message"]
