"""Batches: their bodies, and with a real Triton, that each image is answered as if it were alone."""

import base64
import json as stdlib_json
from typing import Any

import httpx
import msgspec
import pytest

from app.api.batch.body import MAX_IMAGES, parse_batch
from app.api.receiving.content_type import JSON, URLENCODED
from app.errors import InvalidParameter, MalformedRequest
from app.main import create_app
from app.settings.schema import Settings
from tests.api.test_body import form, part
from tests.fakes import models
from tests.fakes.triton import FakeTriton
from tests.faults.corpus import bombs
from tests.support import SCENE, json, peak_below, sample_image, started

FORM = "multipart/form-data; boundary=b"


def document(images: Any, **members: Any) -> bytes:  # noqa: ANN401
    return stdlib_json.dumps({"images": images, **members}).encode()


def test_form_has_images_under_three_names_and_parameters_in_any_order() -> None:
    """A field without a file name holds base64 or an address; any other text is an error of that image only."""
    large = bytes(range(256)) * 10_000  # arrives in pieces
    files = [part("images", b"YQ==", "a.jpg"), part("boxes", b"pixel"), part("image", large, "b"), part("file", b"c", "x" * 300)]
    texts = [part("images", b"YQ=="), part("image", b"https://a.org/x"), part("file", b"***")]
    parsed = parse_batch(form(*files, *texts), FORM)

    assert parsed.images[:-1] == [b"YQ==", large, b"c", b"a", "https://a.org/x"]
    assert isinstance(parsed.images[-1], MalformedRequest)
    assert parsed.names == ["a.jpg", "b", "x" * 255, None, None, None]
    assert parsed.parameters == [("boxes", "pixel")]


def test_json_has_a_list_of_images_and_parameters() -> None:
    """`curl -d` declares a form unless it is told a type; some programs write a byte order mark."""
    given = ["DATA:image/png;BASE64,YQ==", "YQ", "-_8=", "data:,YQ==", "https://example.org/a.png", "HTTP://x"]
    parsed = parse_batch(b"\xef\xbb\xbf" + document(given, confidence=0.4, classes=["cat", 16]), URLENCODED)

    assert parsed.images == [b"a", b"a", b"\xfb\xff", b"a", *given[-2:]]
    assert parsed.names == [None] * 6
    assert parsed.parameters == [("confidence", "0.4"), ("classes", ["cat", "16"])]
    assert parse_batch(document(["YQ=="] * MAX_IMAGES), JSON).images == [b"a"] * MAX_IMAGES


def test_entry_without_an_image_is_an_error_in_its_place() -> None:
    for data, kind in (
        (form(part("images", b"a", "a"), part("images", b""), part("images", b"c", "c")), FORM),
        *((document(["YQ==", entry, "Yw=="]), JSON) for entry in ("", "***", 7)),
        (b'{"images": ["YQ==", "\xff", "Yw=="]}', JSON),
    ):
        first, second, third = parse_batch(data, kind).images
        assert (first, third) == (b"a", b"c")
        assert isinstance(second, MalformedRequest)


def test_too_many_images_are_rejected_before_they_take_memory() -> None:
    text = base64.b64encode(bytes(1000)).decode()
    for data, kind in ((form(*[part("images", bytes(1000))] * 10_000), FORM), (document([text] * 10_000), JSON)):
        with peak_below(4 * 2**20), pytest.raises(MalformedRequest, match="the batch size exceeds the maximum of 64 images"):
            parse_batch(data, kind)


def test_error_says_what_is_wrong() -> None:
    rows = [
        *((data, FORM, "'images'") for data in (form(part("boxes", b"pixel")), b"--b--\r\n")),
        *((data, JSON, "'images'") for data in (document([]), b"{}")),
        (form(part("images[]", b"a", "a.jpg")), FORM, "in the field 'images[]'; expected it in 'images' (or 'image' or 'file')"),
        (form(*[part("x", b"")] * 81), FORM, "the form has too many parts; the maximum is 80"),
        (b'{"image": "YQ=="}', JSON, "unknown member 'image'; expected the images in \"images\", a list of base64"),
        (document(["YQ=="], boxes="x" * (1 << 16)), JSON, "more than 64 KiB beside its images"),
        (b'{"images": ["YQ=="], "images": ["YQ=="]}', JSON, "a member of the JSON object is given more than once"),
        *((data, JSON, "expected a JSON object such as") for data in (b'["YQ=="]', b"\xff", b'{"images": ' + b"[" * 100_000)),
        (document("YQ=="), JSON, 'has no list "images": it is a string; POST /detect takes a single image'),
    ]
    for data, kind, text in rows:
        with pytest.raises((MalformedRequest, InvalidParameter)) as caught:
            parse_batch(data, kind)
        assert text in caught.value.detail


PATH = "/detect/batch?model=six_columns"
COCO = f"{PATH}&format=coco-results"
LINES = {"Accept": "application/x-ndjson"}
SCENES = [models.scene("BMP", shift=shift) for shift in (-16, -8, 0, 8, 16)]
EMPTY = models.scene("PNG", shift=10_000)
TRUNCATED, NOTHING = sample_image("chelsea.jpg")[:5000], b"this is not an image"


def files_of(*images: bytes) -> list[tuple[str, tuple[str, bytes]]]:
    return [("images", (f"{number}.bin", image)) for number, image in enumerate(images)]


@pytest.fixture(scope="module")
async def alone(client: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
    answers = [await client.post("/predict/six_columns?boxes=pixel", content=scene) for scene in SCENES]
    return [json(answer)["detections"] for answer in answers]


async def test_each_image_of_a_form_is_answered_as_if_it_were_alone(
    client: httpx.AsyncClient, alone: list[list[dict[str, Any]]]
) -> None:
    answer = json(await client.post(f"/v1{PATH}", files=files_of(*SCENES), data={"boxes": "pixel"}))
    encoded = document([base64.b64encode(image).decode() for image in SCENES], model="six_columns", boxes="pixel")
    in_json = json(await client.post("/detect/batch", content=encoded, headers={"Content-Type": JSON}))

    assert [result["detections"] for result in answer["results"]] == alone
    assert [(result["filename"], result["detections"]) for result in in_json["results"]] == [(None, found) for found in alone]
    names = [(result["image_index"], result["filename"]) for result in answer["results"]]
    assert names == [(number, f"{number}.bin") for number in range(5)]
    assert [answer[name] for name in ("total_images", "processed_images", "failed_images", "failures")] == [5, 5, 0, None]
    assert (answer["status"], answer["model"]["name"]) == ("success", "six_columns")


async def test_failed_images_have_the_problems_that_they_would_have_alone(client: httpx.AsyncClient) -> None:
    broken = [TRUNCATED, NOTHING, b"", bombs()[1]]
    answer = json(await client.post(PATH, files=files_of(SCENE, *broken, SCENE)))
    alone = [(await client.post("/predict/six_columns", files={"image": image})).json() for image in broken]

    assert [result["image_index"] for result in answer["results"]] == [0, 5]
    assert [failure["index"] for failure in answer["failures"]] == [1, 2, 3, 4]
    for failure, problem in zip(answer["failures"], alone, strict=True):
        assert failure["problem"] == problem | {"request_id": answer["request_id"]}
        assert failure["error"] == problem["detail"]
    assert (answer["processed_images"], answer["failed_images"], answer["status"]) == (2, 4, "partial")


async def test_lines_come_as_images_are_done(client: httpx.AsyncClient, alone: list[list[dict[str, Any]]]) -> None:
    response = await client.post(f"{PATH}&boxes=pixel", files=files_of(*SCENES, NOTHING), headers=LINES)
    *images, summary = [msgspec.json.decode(line) for line in response.content.splitlines()]
    by_index = {line["index"]: line for line in images}

    assert response.headers["content-type"] == "application/x-ndjson"
    assert sorted(by_index) == list(range(6))
    assert [by_index[index]["detections"] for index in range(5)] == alone
    assert all((by_index[index]["status"], by_index[index]["filename"]) == (200, f"{index}.bin") for index in range(5))
    assert (by_index[5]["status"], by_index[5]["problem"]["code"]) == (415, "unsupported_format")
    assert "detections" not in by_index[5]
    assert (summary["total_images"], summary["processed_images"], summary["failed_images"]) == (6, 5, 1)
    assert (summary["status"], summary["request_id"]) == ("partial", response.headers["x-request-id"])
    assert "index" not in summary


async def test_error_common_to_all_images_is_a_single_problem(client: httpx.AsyncClient) -> None:
    for query, status, code in (
        ("model=absent", 404, "unknown_model"),
        ("classes=unicorn&model=six_columns", 400, "invalid_parameter"),
        ("url=https://example.org/a.png", 400, "invalid_parameter"),
    ):
        for headers in ({}, LINES):
            response = await client.post(f"/detect/batch?{query}", files=files_of(SCENE, SCENE), headers=headers)
            assert json(response, status)["code"] == code


async def test_body_has_a_limit_of_its_own(settings: Settings) -> None:
    own = msgspec.structs.replace(settings, max_file_size_mb=0.01, max_batch_size_mb=0.5)
    image, small = SCENE[:9000], models.scene("PNG")
    async with started(create_app(own)) as client:
        response = await client.post(PATH, files=files_of(*[image] * 30))
        assert json(response)["failures"][29]["problem"]["code"] == "invalid_image"  # truncated, but let in
        response = await client.post(PATH, files=files_of(small, bytes(10_486), small))
        assert json(response)["processed_images"] == 2
        alone = json(await client.post("/predict/six_columns", content=bytes(10_486)), 413)
        (failure,) = json(response)["failures"]
        assert failure["problem"] == alone | {"request_id": failure["problem"]["request_id"]}
        too_large = await client.post("/detect/batch", files=files_of(*[image] * 64))
        assert json(too_large, 413)["detail"] == "the limit is 0.5 MiB"


async def test_deadline_holds_for_all_images(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    fake, client = gateway
    fake.may_answer.clear()
    answer = json(await client.post("/detect/batch?timeout_ms=200", files=files_of(*[SCENE] * 64)))
    fake.may_answer.set()

    assert {failure["problem"]["status"] for failure in answer["failures"]} <= {504, 429}
    assert (answer["failed_images"], answer["status"], answer["results"], answer["model"]) == (64, "all_failed", [], None)


async def test_coco_results_of_all_images_are_in_one_list(client: httpx.AsyncClient) -> None:
    """The caller may number the images; one without objects has no results."""
    ids = [139, 285, 632, 0, 2**53]
    numbered = {"image_ids": ", ".join(map(str, ids))}
    alone = [
        result
        for id_, scene in zip(ids, SCENES, strict=True)
        for result in json(await client.post(f"/predict/six_columns?format=coco-results&image_id={id_}", content=scene))
    ]
    for query, data in ((numbered, {}), ({}, numbered)):
        params = {"model": "six_columns", "format": "coco-results", **query}
        response = await client.post("/detect/batch", headers=LINES, params=params, data=data, files=files_of(*SCENES))
        assert (json(response), response.headers["content-type"]) == (alone, "application/json")
    found = json(await client.post(COCO, files=files_of(EMPTY, SCENES[3], EMPTY)))
    assert found == [{**result, "image_id": 1} for result in alone if result["image_id"] == 0]


async def test_no_image_is_left_out_of_coco_results_in_silence(client: httpx.AsyncClient) -> None:
    for files, index in ((files_of(SCENES[0], TRUNCATED, NOTHING, SCENES[1]), 1), (files_of(TRUNCATED), 0)):
        failures = json(await client.post(PATH, files=files))["failures"]
        expected = failures[0]["problem"]
        problem = json(await client.post(COCO, files=files), expected["status"])
        where = f"{len(failures)} of {len(files)} images failed; at index {index}: " if len(files) > 1 else ""
        assert (failures[0]["index"], problem["code"], problem["detail"]) == (index, expected["code"], where + expected["detail"])
