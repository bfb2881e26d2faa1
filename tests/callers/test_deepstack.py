"""Clients of DeepStack and CodeProject.AI, and the protocol of Frigate's detector `deepstack`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

from tests.callers.client import run
from tests.callers.conftest import KEY, MODEL, PATIENCE_SECONDS
from tests.callers.pictures import LINES, PAGE, PORTRAIT
from tests.support import IMAGES, sample_image

Object = tuple[Any, ...]
"""Label, confidence and corners in pixels."""

CAT = str(IMAGES / "chelsea.jpg")
SIDE = 640


@pytest.fixture
def no_image(tmp_path: Path) -> str:
    """A file that is not an image."""
    (tmp_path / "text.jpg").write_text("no image", encoding="utf-8")
    return str(tmp_path / "text.jpg")


@pytest.fixture
def crowd(tmp_path: Path) -> Path:
    """A region with more objects than Frigate has room for: 25 small pictures."""
    region = Image.new("RGB", (SIDE, SIDE))
    size = SIDE // 5
    pictures = [Image.open(IMAGES / name).convert("RGB").resize((size, size)) for name in ("chelsea.jpg", "astronaut.jpg")]
    for number in range(25):
        region.paste(pictures[number % 2], (number % 5 * size, number // 5 * size))
    region.save(tmp_path / "crowd.jpg", quality=90)
    return tmp_path / "crowd.jpg"


def to_settings(gateway: str, **others: object) -> str:
    """Return what the constructors of two clients take."""
    address = urlsplit(gateway)
    return json.dumps({"ip": address.hostname, "port": address.port, "timeout": PATIENCE_SECONDS, **others})


def expect(own: httpx.Client, confidence: float, image: bytes = sample_image("chelsea.jpg")) -> list[Object]:
    """Return the objects that /detect finds, which DeepStack describes in whole pixels."""
    found = own.post(f"/detect?boxes=pixel&confidence={confidence}", content=image).json()["detections"]
    assert found
    sides = ("x1", "y1", "x2", "y2")
    return [(one["class_name"], one["confidence"], *(pytest.approx(one[side], abs=0.51) for side in sides)) for one in found]


def read(predictions: list[dict[str, Any]]) -> list[Object]:
    """Return the objects of an answer."""
    return [tuple(one[name] for name in ("label", "confidence", "x_min", "y_min", "x_max", "y_max")) for one in predictions]


@pytest.mark.client("deepstack-python")
def test_deepstack_python(gateway: str, own: httpx.Client, no_image: str) -> None:
    """`DeepstackObject`: a photo with the default confidence, one with 0.1 as from Home Assistant, and a file that is no image."""
    (found, summary), error = run("deepstack-python", "deepstack_python", to_settings(gateway), CAT, no_image)
    ((sensitive, _),) = run("deepstack-python", "deepstack_python", to_settings(gateway, min_confidence=0.1), CAT)

    assert read(found) == expect(own, 0.45)
    assert read(sensitive) == expect(own, 0.1)
    assert (summary, error) == ({"cat": 1}, "Error from Deepstack request, status code: 400")


@pytest.mark.client("deepstack-python")
def test_deepstack_python_with_a_key(locked: str, own: httpx.Client) -> None:
    """A photo with a key and `custom_model`, an unknown model, and a wrong key."""
    calls = [
        {"api_key": KEY, "custom_model": MODEL},
        {"api_key": KEY, "custom_model": "nothing-like-it"},
        {"api_key": "wrong"},
    ]
    program = ("deepstack-python", "deepstack_python")
    ((found, _),), (unknown,), (wrong,) = (run(*program, to_settings(locked, **call), CAT) for call in calls)

    assert read(found) == expect(own, 0.45)
    assert unknown.startswith("Bad url supplied")
    assert wrong == "Error from Deepstack request, status code: 401"


@pytest.mark.client("codeproject-ai-api")
def test_codeproject_ai_api(gateway: str, own: httpx.Client) -> None:
    """`CodeProjectAIObject`: a photo, with the default model and with `custom_model`."""
    for custom in ({}, {"custom_model": MODEL}):
        found = run("codeproject-ai-api", "codeproject_ai", to_settings(gateway, min_confidence=0.3, **custom), CAT)
        assert read(found) == expect(own, 0.3)


@pytest.mark.client("deepstack-sdk")
def test_deepstack_sdk(gateway: str, own: httpx.Client, no_image: str, tmp_path: Path) -> None:
    """`Detection`: a photo as a file, array and Pillow image, a model by its name, an annotated output, a video, and no image."""
    found = run("deepstack-sdk", "sdk_detection", gateway, str(tmp_path), "", CAT, no_image)
    objects, error = found["pictures"]

    assert [tuple(one) for one in objects] == expect(own, 0.4)
    assert found["array"] == found["pillow"] == found["custom"] == objects
    assert [[one[0] for one in frame] for frame in found["video"].values()] == [["cat"]] * 2
    assert error == "Invalid image"
    with Image.open(tmp_path / "chelsea.jpg") as drawn, Image.open(CAT) as sent:
        assert drawn.size == sent.size
        assert drawn != sent
    assert (tmp_path / "found.mp4").stat().st_size


@pytest.mark.client("deepstack-sdk")
def test_deepstack_sdk_with_a_key(locked: str, own: httpx.Client, tmp_path: Path) -> None:
    """`ServerConfig` with a key, and with a wrong one."""
    right, wrong = (run("deepstack-sdk", "sdk_detection", locked, str(tmp_path), key, CAT) for key in (KEY, "wrong"))

    assert [tuple(one) for one in right["pictures"][0]] == expect(own, 0.4)
    assert wrong["pictures"] == ["Unknown error : 401 occured"]


@pytest.mark.parametrize(
    "client", [pytest.param(name, marks=pytest.mark.client(name)) for name in ("deepstack-python", "codeproject-ai-api")]
)
def test_faces(client: str, sight_url: str, sight: httpx.Client, tmp_path: Path) -> None:
    """Its class for faces: the face of a portrait, a page without one; `recognize` says that names of faces are not there."""
    (tmp_path / "page.png").write_bytes(PAGE)
    address = urlsplit(sight_url)
    pictures = str(IMAGES / "astronaut.jpg"), str(tmp_path / "page.png")
    ((portrait, page), error) = run(client, "faces", str(address.hostname), str(address.port), *pictures)
    own = sight.post("/faces/detect", content=PORTRAIT).json()["faces"]

    assert [set(face) for face in portrait] == [{"confidence", "x_min", "y_min", "x_max", "y_max"}]
    for face, expected in zip(portrait, own, strict=True):
        sides = [face[side] / 512 for side in ("x_min", "y_min", "x_max", "y_max")]
        assert face["confidence"] == expected["score"]
        assert sides == pytest.approx(expected["box"], abs=0.002)
    assert page == []
    assert error.endswith("/v1/vision/face/recognize raised error 404")


@pytest.mark.client("CodeProject.AI")
def test_text_and_comparisons(sight: httpx.Client) -> None:
    """Calls of its documentation, rewritten: the text of a page, two portraits compared, and one with a page without a face."""
    for path in ("/v1/image/ocr", "/v1/vision/ocr"):
        read = sight.post(path, files={"image": PAGE}, data={"min_confidence": "0.5"}).json()
        assert (read["success"], [one["label"] for one in read["predictions"]], read["count"]) == (True, LINES, 2)
        assert all(one["x_min"] < one["x_max"] and one["y_min"] < one["y_max"] for one in read["predictions"])
    path = "/v1/vision/face/match"
    same = sight.post(path, files={"image1": PORTRAIT, "image2": PORTRAIT}).json()
    none = sight.post(path, files={"image1": PORTRAIT, "image2": PAGE})
    assert (same["success"], same["similarity"]) == (True, pytest.approx(1, abs=1e-3))
    assert (none.status_code, none.json()["success"]) == (400, False)


Plugin = Callable[..., list[Any]]


@pytest.fixture
def plugin(own: httpx.Client) -> Plugin:
    """Run Frigate's detector with a region; return its rows, or the name of the error that ends it."""
    labels = own.get(f"/models/{MODEL}").json()["classes"]

    def detect(url: str, region: Path, api_key: str = "", labelmap: list[str] = labels) -> Any:  # noqa: ANN401
        config = {"api_url": url, "api_timeout": PATIENCE_SECONDS, "api_key": api_key, "labelmap": labelmap}
        (rows,) = run("deepstack-python", "frigate_deepstack", json.dumps(config), str(region))
        return rows

    return detect


def to_rows(objects: list[Object], labelmap: list[str]) -> list[list[Any]]:
    """Return the rows of Frigate's detector for objects: label, score and the sides as shares of the region."""
    pixel = 1 / SIDE
    return [
        [labelmap.index(name), score, *(pytest.approx(at.expected * pixel, abs=pixel) for at in (y1, x1, y2, x2))]
        for name, score, x1, y1, x2, y2 in objects
    ]


@pytest.mark.client("Frigate")
def test_frigate_has_room_for_twenty(gateway: str, locked: str, own: httpx.Client, plugin: Plugin, crowd: Path) -> None:
    """Its detector `deepstack`, rewritten: a region of 25 objects, of which it gets the 20 that it has room for."""
    labelmap = own.get(f"/models/{MODEL}").json()["classes"]
    objects = expect(own, 0.4, crowd.read_bytes())
    path = "/v1/vision/detection"

    assert len(objects) > 20
    assert plugin(gateway + path, crowd) == to_rows(objects[:20], labelmap)
    assert plugin(f"{locked}{path}?max_objects=20", crowd, KEY) == to_rows(objects[:20], labelmap)
    assert plugin(f"{locked}{path}?max_objects=20&api_key={KEY}", crowd) == to_rows(objects[:20], labelmap)
    assert plugin(f"{locked}{path}?max_objects=20", crowd, "wrong") == []


@pytest.mark.client("Frigate")
def test_frigate_with_its_own_labels(gateway: str, own: httpx.Client, plugin: Plugin, crowd: Path) -> None:
    """Its detector, rewritten, with a labelmap that lacks classes of the model: with `classes` in `api_url`, no object is lost."""
    labelmap = ["person"]
    people = [one for one in expect(own, 0.4, crowd.read_bytes()) if one[0] == "person"]
    url = f"{gateway}/v1/vision/detection"

    assert len(plugin(url, crowd, labelmap=labelmap)) < len(people)
    assert plugin(f"{url}?classes=person", crowd, labelmap=labelmap) == to_rows(people, labelmap)
