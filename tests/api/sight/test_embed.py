"""Vectors of images, of several images, of boxes and of texts: those that the network gives for what it gets."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.api.sight.conftest import OpenGateway
from tests.support import NEEDS_BYTES, SCENE, json


async def test_vector_of_an_image_has_length_1_and_is_that_of_predict(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/v1/embed/image?image_id=first&use_cache=false&index=false", files={"image": SCENE}))
    predicted = json(await client.post("/predict/embedding", content=SCENE))
    vector = np.array(answer["embedding"])

    assert vector.shape == (12,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    # The upper left quarter of the stretched scene is white but for the red rectangle.
    red, green, _ = vector.reshape(3, 2, 2)[:, 0, 0]
    assert red > green
    assert predicted["embedding"] == answer["embedding"]
    given = {name: answer[name] for name in ("image_id", "status", "indexed", "image")}
    assert given == {"image_id": "first", "status": "success", "indexed": False, "image": {"width": 200, "height": 100}}
    assert (answer["model"]["name"], answer["embedding_norm"] > 0) == ("embedding", True)


async def test_image_of_a_batch_has_a_vector_or_an_error(client: httpx.AsyncClient) -> None:
    alone = json(await client.post("/embed/image", content=SCENE))
    files = [("images", (f"{index}.bmp", content)) for index, content in enumerate((SCENE, b"nothing", SCENE))]
    answer = json(await client.post("/embed/batch?use_cache=true", files=files))
    first, broken, last = answer["results"]

    assert [answer[name] for name in ("total", "successful", "failed", "status")] == [3, 2, 1, "partial"]
    assert first["embedding"] == last["embedding"] == alone["embedding"]
    assert (first["index"], first["filename"], first["status"], first["error"]) == (0, "0.bmp", "success", None)
    assert (broken["index"], broken["filename"], broken["status"], broken["embedding"]) == (1, "1.bmp", "error", None)
    assert broken["error"].startswith("the data is not an image")
    assert last["index"] == 2


async def test_vector_of_a_box_is_that_of_what_it_cuts_out(client: httpx.AsyncClient) -> None:
    boxes = [[0.1, 0.3, 0.4, 0.9], [0, 0, 1, 1], [0.999999, 0.999999, 1, 1]]
    whole = json(await client.post("/embed/image", content=SCENE))["embedding"]
    forms: list[dict[str, Any]] = [
        {"json": {"image": b64encode(SCENE).decode(), "boxes": boxes}},
        {"files": {"image": SCENE}, "data": {"boxes": str(boxes)}},
    ]
    for form in forms:
        answer = json(await client.post("/embed/boxes", **form))
        assert (answer["num_boxes"], answer["status"], answer["image"]) == (3, "success", {"width": 200, "height": 100})
        assert [one["box"] for one in answer["boxes"]] == boxes
        red, all_of_it, corner = (np.array(one["embedding"]).reshape(3, 4) for one in answer["boxes"])
        assert red == pytest.approx(np.array([[0.5] * 4, [0] * 4, [0] * 4]), abs=1e-6)
        assert all_of_it.ravel().tolist() == whole
        assert np.ptp(corner) == pytest.approx(0, abs=1e-6)  # of white
    none = json(await client.post("/embed/boxes?boxes=[]", content=SCENE))
    assert (none["boxes"], none["num_boxes"], none["model"]) == ([], 0, None)


@pytest.mark.parametrize(
    "boxes",
    [None, "", "[[0, 0, 1]]", "[[0, 0, 1, 2]]", "[[0.5, 0, 0.5, 1]]", f"[{'[0, 0, 1, 1], ' * 100}[0, 0, 1, 1]]", "[" * 9999],
)
async def test_boxes_are_at_most_a_hundred_of_four_fractions(client: httpx.AsyncClient, boxes: str | None) -> None:
    data = {} if boxes is None else {"boxes": boxes}
    problem = json(await client.post("/embed/boxes", files={"image": SCENE}, data=data), 400)

    assert (problem["code"], problem["detail"].partition(": ")[0]) == ("invalid_parameter", "boxes")


async def test_model_of_another_task_is_rejected(client: httpx.AsyncClient) -> None:
    assert json(await client.post("/embed/image?model=six_columns", content=SCENE), 400)["code"] == "wrong_task"
    wrong = json(await client.post("/detect?model=embedding", content=SCENE), 400)
    assert (wrong["code"], "POST /embed/image" in wrong["detail"]) == ("wrong_task", True)


async def test_text_needs_a_model(client: httpx.AsyncClient) -> None:
    problem = json(await client.post("/embed/text", json={"text": "a red car"}), 404)

    assert problem["code"] == "unknown_model"
    assert problem["detail"].startswith("texts cannot be described: there is no model embedding_text")
    for content in (b"{}", b"[]", b'{"text": 3}', b'{"text": ""}', b'{"text": "%s"}' % (b"x" * 4097)):
        assert json(await client.post("/embed/text", content=content), 400)["code"] == "malformed_request"


@NEEDS_BYTES
async def test_vector_of_a_text_is_that_of_a_model_whose_input_is_text(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/v1/embed/text?model=letters", json={"text": "abß"}))

    counts = np.array([1, 1, 0, 2])  # of a, b, c and other bytes
    assert answer["embedding"] == pytest.approx(counts / np.linalg.norm(counts), abs=1e-6)
    assert (answer["embedding_norm"], answer["text"], answer["status"]) == (pytest.approx(6**0.5), "abß", "success")
    assert json(await client.post("/embed/text?model=embedding", json={"text": "a"}), 502)["code"] == "unsupported_model"
    assert json(await client.post("/embed/text?model=six_columns", json={"text": "a"}), 400)["code"] == "wrong_task"


async def test_route_describes_all_images_of_a_batch_by_the_same_model(open_gateway: OpenGateway, tmp_path: Path) -> None:
    """Vectors of different models cannot be compared; otherwise the canary would get every second image."""
    file = tmp_path / "routes.toml"
    file.write_text('[vectors]\nto = "embedding"\ncanary = { to = "faces_description", share = 0.5 }\n')
    async with open_gateway(routes_file=str(file)) as client:
        answer = json(await client.post("/embed/batch?model=vectors", files=[("images", SCENE)] * 4))
    assert answer["status"] == "success"
    assert len({one["model"]["name"] for one in answer["results"]}) == 1
