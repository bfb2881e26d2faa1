"""Faces: those that the detector finds, described and compared; off unless the setting is on."""

from base64 import b64encode
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image, ImageChops, ImageDraw

from tests.fakes.models import FACE, RECTANGLES, SIZE
from tests.support import SCENE, json


def bmp(image: Image.Image) -> bytes:
    image.save(file := BytesIO(), "BMP")
    return file.getvalue()


NOBODY = bmp(Image.new("RGB", (64, 64), "white"))


async def test_faces_are_off_by_default(client: httpx.AsyncClient) -> None:
    for route in ("detect", "recognize", "verify"):
        problem = json(await client.post(f"/faces/{route}", files={"image": SCENE}), 404)
        assert problem["code"] == "not_offered"
        assert "NEREID_FACES=true" in problem["detail"]
        assert "biometric" in problem["detail"]


async def test_faces_are_drawn_where_accept_prefers_a_picture(faces: httpx.AsyncClient) -> None:
    drawn = await faces.post("/faces/detect", content=SCENE, headers={"Accept": "image/png"})
    vectors = await faces.post("/faces/recognize", content=SCENE, headers={"Accept": "image/png"})

    assert drawn.headers["Content-Type"] == "image/png"
    picture, scene = (Image.open(BytesIO(data)).convert("RGB") for data in (drawn.content, SCENE))
    assert picture.size == scene.size
    assert ImageChops.difference(picture, scene).getbbox() is not None
    assert json(vectors, 406)["code"] == "not_acceptable"


async def test_faces_have_boxes_and_landmarks_as_fractions_and_vectors_of_length_1(faces: httpx.AsyncClient) -> None:
    answer = json(await faces.post("/v1/faces/detect?confidence=0.5", files={"image": SCENE}))
    surer = json(await faces.post("/faces/detect?confidence=0.85", content=SCENE))
    described = json(await faces.post("/faces/recognize", content=SCENE))
    nobody = json(await faces.post("/faces/recognize", content=NOBODY))

    assert (answer["num_faces"], answer["image"]) == (2, {"width": 200, "height": 100})
    for face, score, corners in zip(answer["faces"], (0.9, 0.8), RECTANGLES.values(), strict=True):
        box = np.array(corners) / [*SIZE, *SIZE]
        points = box[:2] + FACE * (box[2:] - box[:2])
        assert face.keys() == {"box", "landmarks", "score", "quality"}
        assert face["score"] == pytest.approx(score, abs=1e-3)
        assert face["box"] == pytest.approx(box, abs=0.01)
        assert face["landmarks"] == pytest.approx(points.ravel(), abs=0.02)
        assert 0 < face["quality"] < face["score"]  # the eyes are near each other
    assert surer["faces"] == answer["faces"][:1]
    vectors = np.array(described["embeddings"])
    assert described["faces"] == answer["faces"]
    assert (vectors.shape, described["truncated"]) == ((2, 12), False)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-6)
    # The first face is red, the other one blue.
    red, _, blue = vectors.reshape(2, 3, 4).sum(axis=2).T
    assert (red > blue).tolist() == [True, False]
    assert (nobody["faces"], nobody["num_faces"], nobody["embeddings"]) == ([], 0, [])


async def test_largest_faces_of_two_images_are_compared(faces: httpx.AsyncClient) -> None:
    """In the scene that is the red face, which is also the surer one; in the other image the blue one."""
    scene = Image.open(BytesIO(SCENE))
    turned = Image.new("RGB", SIZE, "white")
    ImageDraw.Draw(turned).rectangle((10, 10, 29, 29), "red")
    ImageDraw.Draw(turned).rectangle((100, 10, 179, 89), "blue")
    same = json(await faces.post("/faces/verify", files={"image1": SCENE, "image2": bmp(scene.resize((400, 200)))}))
    files, data = {"image2": bmp(turned), "image1": SCENE}, {"confidence": "0.3"}
    other = json(await faces.post("/faces/verify?threshold=0.01", files=files, data=data))
    encoded = [b64encode(image).decode() for image in (SCENE, bmp(turned))]
    in_json = json(await faces.post("/faces/verify", json={"images": encoded}))

    assert (same["match"], same["threshold"]) == (True, 0.6)
    assert same["similarity"] == pytest.approx(1, abs=0.05)
    assert (same["image1"], same["image2"]) == ({"num_faces": 2, "face_used": 0}, {"num_faces": 2, "face_used": 0})
    assert other["image2"] == {"num_faces": 2, "face_used": 1}
    assert other["similarity"] == pytest.approx(1 - 0.4 * 2**0.5 / 0.6, abs=0.02)
    assert (other["match"], other["threshold"]) == (True, 0.01)
    assert (in_json["similarity"], in_json["match"]) == (other["similarity"], False)


async def test_image_without_a_face_is_named(faces: httpx.AsyncClient) -> None:
    problem = json(await faces.post("/faces/verify", files={"image1": SCENE, "image2": NOBODY}), 400)
    alone = json(await faces.post("/faces/verify", files={"image1": SCENE}), 400)
    broken = json(await faces.post("/faces/verify", files={"image1": b"nothing", "image2": SCENE}), 415)
    twice = json(await faces.post("/faces/verify", files=[(name, SCENE) for name in ("image1", "image1", "image2")]), 400)

    assert (problem["code"], problem["detail"].partition(":")[0]) == ("no_face", "image2")
    assert "found 1" in alone["detail"]
    assert "index 0" in broken["detail"]
    assert twice["detail"] == "image1 is given more than once"
