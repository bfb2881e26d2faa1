"""POST /detect through HTTP, with the real model: what goes in, what comes out, what is refused."""

import base64
import json as stdlib_json
import re
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.config import Settings
from app.main import create_app
from tests.conftest import REPOSITORY, free_port, json, picture, started
from tests.reference import iou

CAT = picture("chelsea.jpg")
JPEG = {"Content-Type": "image/jpeg"}


def corners(detection: dict[str, Any]) -> tuple[float, ...]:
    """Take x1 y1 x2 y2."""
    return tuple(detection[key] for key in ("x1", "y1", "x2", "y2"))


@pytest.fixture(scope="module")
async def cat(client: httpx.AsyncClient) -> dict[str, Any]:
    """Post the cat the plain way."""
    answer: dict[str, Any] = json(await client.post("/detect", content=CAT, headers=JPEG))
    return answer


def found(answer: dict[str, Any]) -> list[Any]:
    """Take what must be the same however a picture is sent."""
    return [answer["detections"], answer["image"], answer["model"]]


def test_the_answer_is_complete(cat: dict[str, Any]) -> None:
    """A cat is found, and every member of the contract is there."""
    (detection,) = cat["detections"]
    assert list(detection) == ["x1", "y1", "x2", "y2", "confidence", "class", "class_id", "class_name"]
    assert detection["class_name"] == "cat"
    assert detection["class"] == detection["class_id"] == 15
    assert detection["confidence"] > 0.8
    assert all(0 <= value <= 1 for value in corners(detection))
    assert cat["num_detections"] == 1
    assert cat["status"] == "success"
    assert cat["image"] == {"width": 451, "height": 300}
    assert cat["model"] == {"name": "yolo11n", "version": "1", "backend": "triton", "device": "cpu"}
    assert cat["total_time_ms"] > 0
    assert cat["request_id"]


@pytest.mark.parametrize("path", ["/detect", "/v1/detect", "/predict/yolo11n", "/v1/predict/yolo11n"])
async def test_every_path_answers_alike(client: httpx.AsyncClient, cat: dict[str, Any], path: str) -> None:
    """The version prefix and the model in the path change nothing."""
    assert found(json(await client.post(path, content=CAT, headers=JPEG))) == found(cat)


@pytest.mark.parametrize("kind", ["image/jpeg", "image/png", "application/octet-stream", "IMAGE/JPEG; x=y", ""])
async def test_a_raw_body_is_read_whatever_picture_it_claims_to_be(
    client: httpx.AsyncClient, cat: dict[str, Any], kind: str
) -> None:
    """The first bytes tell what it is."""
    assert found(json(await client.post("/detect", content=CAT, headers={"Content-Type": kind}))) == found(cat)


@pytest.mark.parametrize("field", ["image", "file"])
async def test_a_form_holds_picture_and_parameters(client: httpx.AsyncClient, field: str) -> None:
    """Form fields are parameters as those of the query are."""
    form = {"confidence": "0.01", "classes": "cat", "max_detections": "1", "boxes": "pixel"}
    answer = json(await client.post("/detect", files={field: ("cat.jpg", CAT)}, data=form))

    assert [d["class_name"] for d in answer["detections"]] == ["cat"]
    assert answer["detections"][0]["x2"] > 1


@pytest.mark.parametrize("prefix", ["", "data:image/jpeg;base64,"])
async def test_json_holds_picture_and_parameters(client: httpx.AsyncClient, cat: dict[str, Any], prefix: str) -> None:
    """Base64, with or without a data URL around it; lists are lists."""
    body = {"image": prefix + base64.b64encode(CAT).decode(), "confidence": 0.4, "classes": ["cat", 16]}

    assert found(json(await client.post("/detect", json=body))) == found(cat)


async def test_units_agree(client: httpx.AsyncClient, cat: dict[str, Any]) -> None:
    """Normalized, pixel and COCO boxes are one box."""
    pixel = json(await client.post("/detect?boxes=pixel", content=CAT))["detections"][0]
    coco = json(await client.post("/detect?boxes=coco", content=CAT))["detections"][0]

    x1, y1, x2, y2 = corners(pixel)
    assert corners(pixel) == pytest.approx(np.array(corners(cat["detections"][0])) * [451, 300, 451, 300], abs=0.01)
    assert coco["bbox"] == pytest.approx([x1, y1, x2 - x1, y2 - y1], abs=0.011)


async def test_parameters_choose(client: httpx.AsyncClient) -> None:
    """Confidence, classes and their number narrow what is returned."""
    scene = picture("coffee.jpg")
    everything = json(await client.post("/detect?confidence=0.05", content=scene))["detections"]
    cups = json(await client.post("/detect?confidence=0.05&classes=cup, 44", content=scene))["detections"]
    one = json(await client.post("/detect?confidence=0.05&max_detections=1", content=scene))["detections"]

    scores = [d["confidence"] for d in everything]
    assert scores == sorted(scores, reverse=True)
    assert cups == [d for d in everything if d["class_name"] in {"cup", "spoon"}]
    assert 0 < len(cups) < len(everything)
    assert one == everything[:1]


@pytest.mark.parametrize("name", ["model", "model_name"])
async def test_the_model_can_be_named(client: httpx.AsyncClient, name: str) -> None:
    """Both names of the parameter work."""
    answer = json(await client.post(f"/detect?{name}=six_columns", content=CAT))

    assert answer["model"]["name"] == "six_columns"


def encoded(form: str, mode: str, **options: Any) -> bytes:  # noqa: ANN401
    """Save the cat in another format and mode."""
    file = BytesIO()
    upright = Image.open(BytesIO(CAT))
    upright.convert(mode).save(file, form, **options)
    return file.getvalue()


def sixteen_bit() -> bytes:
    """Save the grey cat with 16 bits a pixel."""
    grey = np.asarray(Image.open(BytesIO(CAT)).convert("L")).astype(np.uint16) * 257
    file = BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    return file.getvalue()


def palette(**options: Any) -> bytes:  # noqa: ANN401
    """Save the cat with a palette."""
    file = BytesIO()
    Image.open(BytesIO(CAT)).quantize(256).save(file, "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        (encoded("PNG", "RGB"), encoded("BMP", "RGB")),
        (encoded("WEBP", "RGB", lossless=True), encoded("BMP", "RGB")),
        (encoded("GIF", "P"), encoded("PNG", "P")),
        (encoded("PNG", "RGBA"), encoded("BMP", "RGB")),
        (encoded("PNG", "L"), encoded("BMP", "L")),
        (encoded("PNG", "LA"), encoded("BMP", "L")),
        (encoded("JPEG", "CMYK", quality=98), encoded("BMP", "RGB")),
        (encoded("PNG", "1"), encoded("BMP", "1")),
        (sixteen_bit(), encoded("BMP", "L")),
        (palette(transparency=3), palette()),
        (palette(transparency=bytes(range(256))), palette()),
    ],
    ids=["png", "webp", "gif", "rgba", "grey", "grey-alpha", "cmyk", "bilevel", "16-bit", "palette-colour", "palette-alpha"],
)
async def test_encodings_do_not_change_what_is_found(client: httpx.AsyncClient, variant: bytes, plain: bytes) -> None:
    """Every format and mode gives the boxes of its plain RGB equivalent."""
    theirs = json(await client.post("/detect", content=plain))["detections"]
    ours = json(await client.post("/detect", content=variant))["detections"]

    assert [d["class_name"] for d in ours] == [d["class_name"] for d in theirs]
    assert all(iou(corners(a), corners(b)) > 0.95 for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_boxes_are_those_of_the_upright_picture(client: httpx.AsyncClient, cat: dict[str, Any], orientation: int) -> None:
    """However a camera was held, sizes and boxes are those that a viewer shows."""
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored: Image.Image = Image.open(BytesIO(CAT))
    if orientation in back:
        stored = stored.transpose(back[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = BytesIO()
    stored.save(file, "JPEG", quality=95, exif=exif)
    answer = json(await client.post("/detect", content=file.getvalue()))

    assert answer["image"] == {"width": 451, "height": 300}
    (detection,) = answer["detections"]
    assert iou(corners(detection), corners(cat["detections"][0])) > 0.95


@pytest.mark.parametrize(
    ("query", "body", "headers", "status", "code"),
    [
        ("", b"", JPEG, 400, "malformed_request"),
        ("", b"{}", {"Content-Type": "application/json"}, 400, "malformed_request"),
        ("", b"--x", {"Content-Type": "multipart/form-data"}, 400, "malformed_request"),
        ("?confidence=2", CAT, JPEG, 400, "invalid_parameter"),
        ("?confidence=nan", CAT, JPEG, 400, "invalid_parameter"),
        ("?confidence=0.1&confidence=0.2", CAT, JPEG, 400, "invalid_parameter"),
        ("?classes=unicorn", CAT, JPEG, 400, "invalid_parameter"),
        ("?treshold=1", CAT, JPEG, 400, "invalid_parameter"),
        ("?model=nobody", CAT, JPEG, 404, "unknown_model"),
        ("?model=..%2F..%00", CAT, JPEG, 404, "unknown_model"),
        ("", CAT, {"Content-Type": "text/html"}, 415, "unsupported_media_type"),
        ("", CAT, {"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ("", b"%PDF-1.7", JPEG, 415, "unsupported_format"),
        ("", CAT[:20_000], JPEG, 422, "broken_picture"),
    ],
)
async def test_what_is_wrong_is_said(  # noqa: PLR0913, PLR0917 - a table
    client: httpx.AsyncClient, query: str, body: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    """Every refusal is a problem with its own code."""
    response = await client.post(f"/detect{query}", content=body, headers=headers)

    problem = json(response, status)
    assert response.headers["content-type"].startswith("application/problem+json")
    assert problem["code"] == code
    assert problem["status"] == status
    assert problem["request_id"] == response.headers["x-request-id"]
    assert set(problem) == {"type", "title", "status", "detail", "code", "request_id"}


async def test_a_bomb_is_refused_by_its_header(client: httpx.AsyncClient) -> None:
    """A small file with too many pixels is never decoded."""
    file = BytesIO()
    Image.new("1", (13000, 13000)).save(file, "PNG")

    assert json(await client.post("/detect", content=file.getvalue()), 413)["code"] == "picture_too_large"


async def test_a_body_too_large_is_refused(settings: Settings, triton: object) -> None:  # noqa: ARG001
    """By its announced length, and while it streams in without one."""
    small = Settings(triton_urls=settings.triton_url, max_file_size_mb=0.02, log_level="error")

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(CAT), 4096):
            yield CAT[start : start + 4096]

    async with started(create_app(small)) as client:
        announced = await client.post("/detect", content=CAT)
        streamed = await client.post("/detect", content=chunks())

    assert "content-length" not in streamed.request.headers
    assert json(announced, 413)["code"] == json(streamed, 413)["code"] == "body_too_large"


async def test_routes_and_methods_that_are_not_there_are_problems_too(client: httpx.AsyncClient) -> None:
    """404 and 405 have the one shape, and every header."""
    for response, status, code in (
        (await client.get("/nowhere"), 404, "not_found"),
        (await client.get("/detect"), 405, "method_not_allowed"),
    ):
        assert json(response, status)["code"] == code
        assert re.fullmatch(r"[0-9.]+ms", response.headers["x-process-time"])
        assert "total;dur=" in response.headers["server-timing"]


async def test_a_model_that_was_not_pulled_says_how(settings: Settings, triton: object, tmp_path: Path) -> None:  # noqa: ARG001
    """A listed model that Triton does not have is a 404 with the command that gets it, and is in the list."""
    catalogue = (REPOSITORY / "models.toml").read_text(encoding="utf-8")
    (tmp_path / "models.toml").write_text(catalogue.replace("[yolo11n]", "[never_pulled]"), encoding="utf-8")
    async with started(create_app(msgspec.structs.replace(settings, model_repository=str(tmp_path)))) as client:
        response = await client.post("/predict/never_pulled", content=CAT)
        models = {model["name"]: model for model in json(await client.get("/models"))["models"]}

    assert "./just pull never_pulled" in json(response, 404)["detail"]
    assert models["never_pulled"]["state"] == "not_pulled"
    assert models["yolo11n"]["state"] == "ready"
    assert models["yolo11n"]["classes"][15] == "cat"
    assert models["yolo11n"]["licence"].startswith("AGPL-3.0")


async def test_stages_are_told(client: httpx.AsyncClient) -> None:
    """Server-Timing has every stage of a detection."""
    response = await client.post("/detect", content=CAT)

    stages = [part.split(";")[0] for part in response.headers["server-timing"].split(", ")]
    assert stages == ["read", "model", "queue", "decode", "infer", "post", "total"]


@pytest.mark.parametrize(("given", "is_echoed"), [("abc-1.2_Z", True), ("a b", False), ("x" * 65, False)])
async def test_a_request_id_is_echoed_if_it_is_well_formed(client: httpx.AsyncClient, given: str, is_echoed: bool) -> None:  # noqa: FBT001
    """Else the request gets one of ours."""
    response = await client.post("/detect", content=CAT, headers={"X-Request-ID": given})

    assert (response.headers["x-request-id"] == given) is is_echoed
    assert json(response)["request_id"] == response.headers["x-request-id"]


async def test_no_triton_is_a_503_and_loses_nothing() -> None:
    """Detection says when to come back, health says what is down, liveness does not care."""
    alone = Settings(triton_urls=f"127.0.0.1:{free_port()}", log_level="error")
    async with started(create_app(alone)) as client:
        response = await client.post("/detect", content=CAT)

        assert json(response, 503)["code"] == "triton_unavailable"
        assert response.headers["retry-after"] == "1"
        assert json(await client.get("/health"), 503)["triton"]["status"] == "unreachable"
        assert json(await client.get("/readyz"), 503)["status"] == "not_ready"
        assert json(await client.get("/models"), 503)["code"] == "triton_unavailable"
        assert json(await client.get("/livez"))["status"] == "alive"


async def test_a_deadline_that_passes_is_a_504_and_triton_survives(settings: Settings, client: httpx.AsyncClient) -> None:
    """The answer is given up on, not the RPC."""
    hasty = Settings(triton_urls=settings.triton_url, timeout_seconds=0.015, log_level="error")
    async with started(create_app(hasty)) as impatient:
        codes = {json(await impatient.post("/detect", content=CAT), 504)["code"] for _ in range(5)}

    assert codes == {"deadline_passed"}
    assert json(await client.post("/detect", content=CAT))["num_detections"] == 1


async def test_an_unexpected_failure_tells_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller gets an id, the log gets the rest."""
    monkeypatch.setattr("app.detector.letterbox.place", lambda *_, **__: 1 / 0)
    async with started(create_app(settings)) as client:
        problem = json(await client.post("/detect", content=CAT), 500)

    assert problem["code"] == "internal"
    assert "ZeroDivision" not in stdlib_json.dumps(problem)
