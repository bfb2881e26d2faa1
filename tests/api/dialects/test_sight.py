"""Text, faces and vectors as Roboflow's and DeepStack's clients ask for them: what the gateway's own routes find."""

from base64 import b64encode

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import SCENE, json, started

IMAGE = {"type": "base64", "value": b64encode(SCENE).decode()}
WRONG = {"type": "base64", "value": b64encode(SCENE[:30]).decode()}


@pytest.mark.parametrize("path", ["/doctr/ocr", "/ocr/pp-ocr", "/easy_ocr/ocr"])
async def test_roboflow_reads_text(faces: httpx.AsyncClient, path: str) -> None:
    """A list is answered by a list; an image of it that fails lets the request fail."""
    own = json(await faces.post("/ocr/predict?min_rec_score=0", content=SCENE))
    one = json(await faces.post(path, json={"image": IMAGE, "generate_bounding_boxes": True}))
    two = json(await faces.post(f"/roboflow{path}", json={"image": [IMAGE, IMAGE], "generate_bounding_boxes": True}))
    plain = json(await faces.post(path, json={"image": IMAGE, "generate_bounding_boxes": False}))

    for answer in (one, *two):
        assert (answer["result"], answer["image"], answer["parent_id"]) == (own["full_text"], own["image"], None)
        for found, region in zip(answer["predictions"], own["regions"], strict=True):
            x, y = region["box"][::2], region["box"][1::2]
            assert (found["class"], found["confidence"], found["class_id"]) == (region["text"], region["rec_score"], 0)
            assert found["x"] - found["width"] / 2 == pytest.approx(min(x), abs=0.01)
            assert found["y"] + found["height"] / 2 == pytest.approx(max(y), abs=0.01)
    assert (plain["result"], plain["image"], plain["predictions"]) == (own["full_text"], None, None)
    assert json(await faces.post(path, json={"image": [IMAGE, WRONG]}), 422).keys() == {"status", "message"}


async def test_roboflow_describes_images(faces: httpx.AsyncClient) -> None:
    own = json(await faces.post("/embed/image", content=SCENE))["embedding"]
    one = json(await faces.post("/clip/embed_image", json={"image": IMAGE, "clip_version_id": "ViT-B-16"}))
    two = json(await faces.post("/roboflow/clip/embed_image", json={"image": [IMAGE, IMAGE]}))

    assert one.keys() == {"inference_id", "frame_id", "time", "embeddings"}
    assert (one["embeddings"], two["embeddings"]) == ([own], [own, own])


async def test_deepstack_reads_text(faces: httpx.AsyncClient) -> None:
    for path in ("/v1/image/ocr", "/deepstack/v1/vision/ocr"):
        found = json(await faces.post(path, files={"image": SCENE}, data={"min_confidence": "0.8"}))
        assert [one["label"] for one in found["predictions"]] == ["r"]
        assert (found["success"], found["count"], found["command"], found["message"]) == (True, 1, "ocr", "Found r")


async def test_deepstack_finds_and_compares_faces(faces: httpx.AsyncClient) -> None:
    """Faces have no labels, and no names."""
    own = json(await faces.post("/faces/detect?confidence=0.4", content=SCENE))["faces"]
    found = json(await faces.post("/v1/vision/face", files={"image": SCENE}))["predictions"]
    assert [(one["confidence"], "label" in one) for one in found] == [(face["score"], False) for face in own]
    assert found[0]["x_min"] == pytest.approx(own[0]["box"][0] * 200, abs=1)
    same = json(await faces.post("/v1/vision/face/match", files={"image1": SCENE, "image2": SCENE}))
    assert (same["success"], same["similarity"]) == (True, 1.0)
    for action in ("register", "recognize", "list", "delete"):
        error = json(await faces.post(f"/v1/vision/face/{action}", data={"userid": "a"}), 404)
        assert (error["success"], "`nereid serve --search` turns it on" in error["error"]) == (False, True)


async def test_faces_are_off_by_default(settings: Settings, triton: EmbeddedTriton) -> None:
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns"))) as server:
        for path, names in (("face", ["image"]), ("face/match", ["image1", "image2"])):
            error = json(await server.post(f"/v1/vision/{path}", files=dict.fromkeys(names, SCENE)), 404)
            assert "NEREID_FACES" in error["error"]
