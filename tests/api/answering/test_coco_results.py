"""COCO results through HTTP, from the real Triton."""

import httpx

from tests.support import SCENE, json


async def test_a_result_has_what_coco_tools_read(client: httpx.AsyncClient) -> None:
    found = json(await client.post("/predict/six_columns?format=coco-results&image_id=139", content=SCENE))
    as_json = json(await client.post("/predict/six_columns?boxes=coco", content=SCENE))["detections"]

    assert found == [
        {"image_id": 139, "category_id": detection["class_id"], "bbox": detection["bbox"], "score": detection["confidence"]}
        for detection in as_json
    ]
    assert len(found) == 2
