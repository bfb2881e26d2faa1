"""Vectors of images, of several images and of boxes: those that the network gives for the pixels it gets."""

import httpx
import numpy as np
import pytest

from tests.support import SCENE, json


async def test_the_vector_of_an_image_has_length_1_and_is_that_of_predict(client: httpx.AsyncClient) -> None:
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
    assert answer["model"]["name"] == "embedding"
    assert answer["embedding_norm"] > 0
    assert answer.keys() >= {"total_time_ms", "request_id"}


async def test_an_index_is_not_there_yet(client: httpx.AsyncClient) -> None:
    problem = json(await client.post("/embed/image?index=true", content=SCENE), 404)

    assert problem["code"] == "not_offered"
    assert "is not there yet" in problem["detail"]


async def test_another_task_is_the_wrong_one(client: httpx.AsyncClient) -> None:
    wrong = json(await client.post("/embed/image?model=six_columns", content=SCENE), 400)
    also_wrong = json(await client.post("/detect?model=embedding", content=SCENE), 400)

    assert (wrong["code"], also_wrong["code"]) == ("wrong_task", "wrong_task")
    assert "POST /embed/image" in also_wrong["detail"]
