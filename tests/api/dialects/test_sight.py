"""Text, faces and vectors as Roboflow's and DeepStack's clients ask for them: what the gateway's own routes find."""

from base64 import b64encode
from pathlib import Path

import httpx
import msgspec
import pytest

from app.cascade.catalog import FILE
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.support import SCENE, json, started

IMAGE = {"type": "base64", "value": b64encode(SCENE).decode()}
WRONG = {"type": "base64", "value": b64encode(SCENE[:30]).decode()}


CASCADES = """
[doctr.steps.lines]
model = "ocr_detection"
[doctr.steps.text]
model = "ocr_recognition"
of = "lines"
crop = "corners"

[easy_ocr.steps.lines]
model = "ocr_detection"
"""


async def test_roboflow_reads_text(faces: httpx.AsyncClient) -> None:
    path = "/ocr/pp-ocr"
    own = json(await faces.post("/ocr/predict?min_rec_score=0", content=SCENE))
    one = json(await faces.post(path, json={"image": IMAGE}))
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


@pytest.mark.parametrize(
    ("path", "missing", "instead"),
    [
        ("/doctr/ocr", "no doctr", "/ocr/pp-ocr"),
        ("/easy_ocr/ocr", "no easy_ocr", "/ocr/pp-ocr"),
        ("/clip/embed_image", "no model clip", "/embed/image"),
        ("/clip/embed_text", "CLIP", "/embed/text"),
        ("/clip/compare", "CLIP", "/embed/text"),
    ],
)
async def test_a_model_that_roboflow_has_is_not_replaced_by_another(
    faces: httpx.AsyncClient, path: str, missing: str, instead: str
) -> None:
    for prefix, images in (("", IMAGE), ("/roboflow", [IMAGE, IMAGE])):
        error = json(await faces.post(prefix + path, json={"image": images}), 404)
        assert error.keys() == {"status", "message"}
        assert missing in error["message"]
        assert instead in error["message"]


async def test_roboflows_models_answer_when_they_have_been_added(
    settings: Settings, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    assert triton.poll() is None
    (tmp_path / FILE).write_text(CASCADES)
    (tmp_path / "routes.toml").write_text('[clip]\nto = "embedding"\n')
    own = msgspec.structs.replace(settings, model_repository=str(tmp_path), routes_file=str(tmp_path / "routes.toml"))
    async with started(create_app(own)) as server:
        vector = json(await server.post("/embed/image", content=SCENE))["embedding"]
        one = json(await server.post("/clip/embed_image", json={"image": IMAGE, "clip_version_id": "ViT-B-16"}))
        two = json(await server.post("/roboflow/clip/embed_image", json={"image": [IMAGE, IMAGE]}))
        text = json(await server.post("/doctr/ocr", json={"image": IMAGE}))
        unfit = json(await server.post("/easy_ocr/ocr", json={"image": IMAGE}), 502)

    assert one.keys() == {"inference_id", "frame_id", "time", "embeddings"}
    assert (one["embeddings"], two["embeddings"]) == ([vector], [vector, vector])
    assert (bool(text["result"]), text["predictions"]) == (True, None)
    assert "has no step text" in unfit["message"]


async def test_deepstack_reads_text(faces: httpx.AsyncClient) -> None:
    for path in ("/v1/image/ocr", "/deepstack/v1/vision/ocr"):
        found = json(await faces.post(path, files={"image": SCENE}, data={"min_confidence": "0.8"}))
        assert [one["label"] for one in found["predictions"]] == ["r"]
        assert (found["success"], found["count"], found["command"], found["message"]) == (True, 1, "ocr", "Found r")


async def test_deepstack_finds_and_compares_faces(faces: httpx.AsyncClient) -> None:
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
