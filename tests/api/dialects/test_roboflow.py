"""The dialect of Roboflow, as `inference-sdk` and its users' own programs speak it."""

from base64 import b64encode
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.dialects.conformance import URLENCODED, Box, Conformance, Sent, random_scene
from tests.fakes import models
from tests.fakes.http import Host
from tests.support import SCENE, json

V1 = "/infer/object_detection"
V0 = "/six_columns/1"


def to_image(image: bytes) -> dict[str, str]:
    return {"type": "base64", "value": b64encode(image).decode()}


IMAGE = to_image(models.scene("PNG"))


class _RoboflowConformance(Conformance):
    name = "roboflow"
    paths = (V1, V0, "/model/add")

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401
        assert answer["image"] == {"width": width, "height": height}
        assert set(answer) == {"inference_id", "time", "image", "predictions"}
        found = []
        for one in answer["predictions"]:
            x, y, half_width, half_height = one["x"], one["y"], one["width"] / 2, one["height"] / 2
            corners = (x - half_width, y - half_height, x + half_width, y + half_height)
            found.append(Box(one["class"], one["confidence"], corners))
        return found

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401
        return set(answer) == {"status", "message"} and answer["status"] == status and bool(answer["message"])


class TestV1(_RoboflowConformance):
    """Roboflow's self-hosted inference server."""

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        content = {"model_id": "six_columns/1", "image": to_image(image)}
        return Sent(V1, {"json": {**content, "confidence": confidence, "disable_active_learning": False, "source": None}})

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "json": {**sent.arguments["json"], "api_key": key}})


class TestV0(_RoboflowConformance):
    """Roboflow's hosted API, which takes base64 declared as a form, and percentages."""

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        arguments = {"headers": {"Content-Type": URLENCODED}, "params": {"confidence": confidence * 100}}
        return Sent(V0, {"content": b64encode(image), **arguments})

    def with_key(self, sent: Sent, key: str) -> Sent:
        return sent._replace(arguments={**sent.arguments, "params": {**sent.arguments["params"], "api_key": key}})


@pytest.mark.parametrize("seed", range(4))
async def test_parameters_mean_what_they_mean_to_the_gateway(server: httpx.AsyncClient, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - no secret
    image, _, _ = random_scene(random)
    model = random.choice(["yolo_head", "yolox_head", "half_four_tensors"])
    confidence, iou = random.choice([0.05, 0.3, 0.85]), random.choice([0.0, 0.2, 0.45, 0.7])
    names, count = random.sample(["red", "blue"], random.randint(1, 2)), random.randint(1, 3)
    classes = {"classes": ",".join(names), "max_detections": count}
    own: dict[str, Any] = {"confidence": confidence, "iou": iou, "boxes": "cxcywh", **classes}
    v1 = {"confidence": confidence, "iou_threshold": iou, "class_filter": names, "max_detections": count}
    v0: dict[str, Any] = {"confidence": confidence * 100, "overlap": iou, **classes}
    expected = json(await server.post(f"/predict/{model}", params=own, content=image))["detections"]
    first = json(await server.post(V1, json={"model_id": model, "image": to_image(image), **v1}))
    second = json(await server.post(f"/{model}/1", params=v0, files={"file": ("a.jpg", image)}))

    for answer in (first, second):
        boxes = [[one[name] for name in ("x", "y", "width", "height", "confidence", "class_id")] for one in answer["predictions"]]
        np.testing.assert_allclose(boxes, [[*one["bbox"], one["confidence"], one["class_id"]] for one in expected], atol=1e-6)


async def test_classes_that_the_model_does_not_have_are_left_out(server: httpx.AsyncClient) -> None:
    """A name in a list may have a comma; a text, and the `classes` of v0, are names separated by commas."""
    for names, found in ((["blue", "dragon"], ["blue"]), (["red,blue", "red"], ["red"]), ("red,blue", ["red", "blue"])):
        v1 = json(await server.post(V1, json={"image": IMAGE, "class_filter": names}))
        v0 = json(await server.post(V0, params={"classes": f"{found[0]},dragon"}, content=SCENE))
        assert [one["class"] for one in v1["predictions"]] == found
        assert [one["class"] for one in v0["predictions"]] == found[:1]


async def test_errors_say_what_is_wrong(server: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"image": [IMAGE] * 65}, "exceeds the maximum of 64"),
        ({"image": []}, "the list of images is empty"),
        ({"image": [[IMAGE]]}, '"type": "base64"'),
        ({"image": {"type": "numpy", "value": "gASV"}}, "'numpy' are not supported"),
        ({"image": [IMAGE, {"type": "url", "value": "file:///etc/passwd"}]}, "NEREID_URL_HOSTS"),
        ({"image": [IMAGE, {"type": "url", "value": "x"}], "visualize_predictions": True}, "visualize_predictions"),
        ({"confidence": 40}, "confidence: expected a number from 0 to 1"),
        ({"class_filter": ["x" * 2**16]}, "the JSON object has more than 64 KiB beside its image"),
    ]
    for changes, message in rows:
        assert message in json(await server.post(V1, json={"image": IMAGE, **changes}), 400)["message"]


async def test_model_that_does_not_exist_is_404(server: httpx.AsyncClient) -> None:
    for model_id in ("nothing-like-it/1", "six_columns/9", "a/b/c", "", "six_columns/-1"):
        for path in (V1, "/model/add"):
            assert json(await server.post(path, json={"image": IMAGE, "model_id": model_id}), 404)["message"]
    for version, status in (("7", 404), ("9" * 5000, 400)):
        json(await server.post(f"/six_columns/{version}", content=SCENE), status)


async def test_thresholds_of_v0_are_fractions_or_percentages(server: httpx.AsyncClient) -> None:
    for name, value in (("confidence", "101"), ("overlap", "nan")):
        answer = json(await server.post(f"{V0}?{name}={value}", content=SCENE), 400)
        assert answer["message"] == f"{name}: expected a number from 0 to 100"
    for confidence, count in (("0.99", 0), ("1", 2)):  # of which 1 is one percent
        assert len(json(await server.post(V0, params={"confidence": confidence}, content=SCENE))["predictions"]) == count


async def test_gateways_own_paths_stay_its_own(server: httpx.AsyncClient) -> None:
    """A model whose name is a number; below the dialect's name, `predict` is one like any other."""
    own = await server.post("/predict/7", content=SCENE)
    other = await server.post("/roboflow/predict/7", content=SCENE)

    assert own.json()["code"] == "unknown_model"
    assert own.headers["content-type"] == "application/problem+json"
    assert json(other, 404) == {"status": 404, "message": own.json()["detail"]}
    assert (await server.get(V0)).json()["code"] == "not_found"


async def test_images_are_fetched_from_hosts_that_are_allowed(remote: tuple[Host, httpx.AsyncClient]) -> None:
    host, server = remote
    url = host.url("/scene.bmp")
    image = {"type": "url", "value": url}
    one = json(await server.post(V1, json={"image": image}))
    two = json(await server.post(V1, json={"image": [image, IMAGE]}))
    v0 = json(await server.post(V0, params={"image": url}))

    assert [len(answer["predictions"]) for answer in (one, *two, v0)] == [2] * 4
    assert json(await server.post(V0, params={"image": f"{url}x"}), 424)["message"]


async def test_model_that_roboflow_has_is_not_replaced_by_another(faces: httpx.AsyncClient) -> None:
    for path, instead in (("/doctr/ocr", "/ocr/pp-ocr"), ("/clip/embed_image", "/embed/image"), ("/clip/compare", "/embed/text")):
        error = json(await faces.post(f"/roboflow{path}", json={"image": [IMAGE, IMAGE]}), 404)
        assert instead in error["message"]
