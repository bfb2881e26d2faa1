"""POST /detect/batch with a real Triton: each image is answered as if it were alone, in a document, in lines or as COCO results."""

import base64
import gzip
from collections.abc import Callable
from typing import Any, NoReturn

import httpx
import msgspec
import pytest

from app.api.admission import middleware
from app.api.answering import problems
from app.api.batch.answer import ImagesAnswer
from app.errors import GatewayFull
from app.imaging.fit import Letterbox
from app.main import create_app
from app.pipeline.batch_request import BatchRequest
from app.pipeline.call import CallContext
from app.settings.schema import Settings
from tests.fakes import models
from tests.fakes.triton import FakeTriton
from tests.faults.corpus import bombs
from tests.support import SCENE, captured_log, in_cycles, json, sample_image, started

PATH = "/detect/batch?model=six_columns"
COCO = f"{PATH}&format=coco-results"
LINES = {"Accept": "application/x-ndjson"}
SCENES = [models.scene("BMP", shift=shift) for shift in (-16, -8, 0, 8, 16)]
EMPTY = models.scene("PNG", shift=10_000)
TRUNCATED, NOTHING = sample_image("chelsea.jpg")[:5000], b"this is not an image"

Files = list[tuple[str, tuple[str, bytes]]]


def form(*images: bytes, field: str = "images") -> Files:
    return [(field, (f"{number}.bin", image)) for number, image in enumerate(images)]


def as_json(*images: bytes, **members: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"images": [base64.b64encode(image).decode() for image in images], **members}


@pytest.fixture(scope="module")
async def alone(client: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
    answers = [await client.post("/predict/six_columns?boxes=pixel", content=scene) for scene in SCENES]
    return [json(answer)["detections"] for answer in answers]


@pytest.mark.parametrize("headers", [{}, LINES])
async def test_results_of_a_batch_are_released_at_once(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    with in_cycles(ImagesAnswer) as kept:
        for _ in range(3):
            assert (await client.post(PATH, files=form(*SCENES), headers=headers)).status_code == 200
    assert not kept


@pytest.mark.parametrize(("prefix", "field"), [("", "images"), ("/v1", "image"), ("", "file")])
async def test_each_image_of_a_form_is_answered_as_if_it_were_alone(
    client: httpx.AsyncClient, alone: list[list[dict[str, Any]]], prefix: str, field: str
) -> None:
    answer = json(await client.post(prefix + PATH, files=form(*SCENES, field=field), data={"boxes": "pixel"}))

    assert [result["detections"] for result in answer["results"]] == alone
    names = [(result["image_index"], result["filename"]) for result in answer["results"]]
    assert names == [(number, f"{number}.bin") for number in range(5)]
    first = answer["results"][0]
    assert list(first)[:5] == ["filename", "image_index", "detections", "num_detections", "status"]
    assert list(first)[5:] == ["pipeline", "image", "error"]
    assert (first["pipeline"], first["error"]) == (None, None)
    assert (answer["total_images"], answer["processed_images"], answer["failed_images"]) == (5, 5, 0)
    assert (answer["failures"], answer["status"], answer["model"]["name"]) == (None, "success", "six_columns")
    assert answer["total_time_ms"] > 0
    assert answer["request_id"]


@pytest.mark.parametrize(("coding", "encode"), [("identity", bytes), ("gzip", gzip.compress)])
async def test_each_image_of_json_is_answered_as_if_it_were_alone(
    client: httpx.AsyncClient, alone: list[list[dict[str, Any]]], coding: str, encode: Callable[[bytes], bytes]
) -> None:
    document = encode(msgspec.json.encode(as_json(*SCENES, model="six_columns", boxes="pixel")))
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    answer = json(await client.post("/detect/batch", content=document, headers=headers))

    assert [(result["filename"], result["detections"]) for result in answer["results"]] == [(None, found) for found in alone]


async def test_failed_images_have_the_problems_that_they_would_have_alone(client: httpx.AsyncClient) -> None:
    broken = [TRUNCATED, NOTHING, b"", bombs()["PNG RGBA header"]]
    answer = json(await client.post(PATH, files=form(SCENE, *broken, SCENE)))
    alone = [(await client.post("/predict/six_columns", files={"image": image})).json() for image in broken]

    assert [result["image_index"] for result in answer["results"]] == [0, 5]
    assert [failure["index"] for failure in answer["failures"]] == [1, 2, 3, 4]
    for failure, problem in zip(answer["failures"], alone, strict=True):
        assert failure["problem"] == problem | {"request_id": answer["request_id"]}
        assert failure["error"] == problem["detail"]
    assert (answer["processed_images"], answer["failed_images"], answer["status"]) == (2, 4, "partial")


async def test_lines_come_as_images_are_done(client: httpx.AsyncClient, alone: list[list[dict[str, Any]]]) -> None:
    response = await client.post(f"{PATH}&boxes=pixel", files=form(*SCENES, NOTHING), headers=LINES)
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


@pytest.mark.parametrize("headers", [{}, LINES])
@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("model=absent", 404, "unknown_model"),
        ("classes=unicorn&model=six_columns", 400, "invalid_parameter"),
        ("url=https://example.org/a.png", 400, "invalid_parameter"),
        ("format=image", 400, "invalid_parameter"),
    ],
)
async def test_error_common_to_all_images_is_a_single_problem(
    client: httpx.AsyncClient, query: str, status: int, code: str, headers: dict[str, str]
) -> None:
    response = await client.post(f"/detect/batch?{query}", files=form(SCENE, SCENE), headers=headers)

    assert json(response, status)["code"] == code
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("accept", "status", "kind"),
    [
        ("application/*;q=0.5, application/x-ndjson", 200, "application/x-ndjson"),
        ("application/x-ndjson;q=0, */*", 200, "application/json"),
        ("image/png", 406, "application/problem+json"),
    ],
)
async def test_accept_chooses_between_a_document_and_lines(client: httpx.AsyncClient, accept: str, status: int, kind: str) -> None:
    response = await client.post(PATH, files=form(SCENE), headers={"Accept": accept})
    chosen = await client.post(f"{PATH}&format=json", files=form(SCENE), headers=LINES)

    assert (response.status_code, response.headers["content-type"]) == (status, kind)
    assert status == 406 or response.headers["vary"] == "Accept"
    assert (chosen.status_code, chosen.headers["content-type"]) == (200, "application/json")


async def test_body_has_a_limit_of_its_own(settings: Settings) -> None:
    own = msgspec.structs.replace(settings, max_file_size_mb=0.01, max_batch_size_mb=0.5)
    image, small = SCENE[:9000], models.scene("PNG")
    async with started(create_app(own)) as client:
        response = await client.post(PATH, files=form(*[image] * 30))
        assert json(response)["failures"][29]["problem"]["code"] == "invalid_image"  # truncated, but let in
        response = await client.post(PATH, files=form(small, bytes(10_486), small))
        assert json(response)["processed_images"] == 2
        alone = json(await client.post("/predict/six_columns", content=bytes(10_486)), 413)
        (failure,) = json(response)["failures"]
        assert failure["problem"] == alone | {"request_id": failure["problem"]["request_id"]}
        too_large = await client.post("/detect/batch", files=form(*[image] * 64))
        assert json(too_large, 413)["detail"] == "the limit is 0.5 MiB"


async def test_deadline_holds_for_all_images(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    fake, client = gateway
    fake.may_answer.clear()
    answer = json(await client.post("/detect/batch?timeout_ms=200", files=form(*[SCENE] * 64)))
    fake.may_answer.set()

    assert {failure["problem"]["status"] for failure in answer["failures"]} <= {504, 429}
    assert (answer["failed_images"], answer["status"], answer["results"], answer["model"]) == (64, "all_failed", [], None)


async def test_batch_has_more_time_for_more_images(
    gateway: tuple[FakeTriton, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining: list[float] = []

    async def fail(_: object, __: object, ___: object, call: CallContext) -> NoReturn:
        remaining.append(call.deadline.remaining)
        raise GatewayFull("as if there were no memory")

    monkeypatch.setattr(BatchRequest, "open", fail)
    for images, query, least, most in ((1, "", 0, 5), (64, "", 10, 20), (64, "?timeout_ms=3000", 0, 3)):
        json(await gateway[1].post(f"/detect/batch{query}", files=form(*[SCENE] * images)), 429)
        assert least < remaining.pop() <= most


async def test_log_and_metrics_count_images(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = captured_log(monkeypatch, middleware)
    for headers in ({}, LINES):
        await client.post(PATH, files=form(SCENE, NOTHING, SCENE), headers=headers)
    text = (await client.get("/metrics")).text

    for line in [call.kwargs for call in calls[:2]]:
        assert (line["route"], line["model"], line["status"]) == ("/detect/batch", "six_columns", 200)
        assert (line["images"], line["failed"], line["failures"], line["detections"]) == (3, 1, {"unsupported_format": 1}, 4)
        assert line["image_bytes"] == 2 * len(SCENE) + len(NOTHING)
        assert line["response_bytes"] > 100
        assert "read" in line["stages"]
    assert 'api_requests_total{endpoint="/detect/batch",status="200"}' in text
    assert 'api_batch_images_total{status="415"}' in text


async def test_coco_results_of_all_images_are_in_one_list(client: httpx.AsyncClient) -> None:
    """The caller may number the images; one without objects has no results."""
    alone: list[dict[str, Any]] = []
    for ids in ([0, 1, 2, 3, 4], [139, 285, 632, 0, 2**53]):
        text = ", ".join(map(str, ids))
        alone = [
            result
            for id_, scene in zip(ids, SCENES, strict=True)
            for result in json(await client.post(f"/predict/six_columns?format=coco-results&image_id={id_}", content=scene))
        ]
        numbered = {} if ids[0] == 0 else {"image_ids": text}
        for query, data in ((numbered, {}), ({}, numbered)):
            params = {"model": "six_columns", "format": "coco-results", **query}
            response = await client.post("/detect/batch", headers=LINES, params=params, data=data, files=form(*SCENES))
            assert (json(response), response.headers["content-type"]) == (alone, "application/json")
        in_json = as_json(*SCENES, model="six_columns", format="coco-results", **numbered)
        assert json(await client.post("/detect/batch", json=in_json)) == alone
    found = json(await client.post(COCO, files=form(EMPTY, SCENES[3], EMPTY)))
    assert found == [{**result, "image_id": 1} for result in alone if result["image_id"] == 0]


@pytest.mark.parametrize(
    ("ids", "detail"),
    [
        ("1,2", "expected 5, one for each image, found 2"),
        ("1,2,3,4,1", "expected a different number for each image"),
        *((f"1,2,3,4,{id_}", "expected whole numbers from 0 to 9007199254740992") for id_ in ("-1", "9007199254740993", "x", "")),
    ],
)
async def test_numbers_that_fit_no_images_are_rejected(client: httpx.AsyncClient, ids: str, detail: str) -> None:
    for query in ({}, {"format": "coco-results"}):
        problem = json(await client.post("/detect/batch", params={"image_ids": ids, **query}, files=form(*SCENES)), 400)

        assert problem["code"] == "invalid_parameter"
        assert problem["detail"].startswith(f"image_ids: {detail}")


@pytest.mark.parametrize(
    ("files", "index"), [(form(SCENES[0], TRUNCATED, NOTHING, SCENES[1]), 1), (form(NOTHING, *SCENES), 0), (form(TRUNCATED), 0)]
)
async def test_no_image_is_left_out_of_coco_results_in_silence(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, files: Files, index: int
) -> None:
    calls = captured_log(monkeypatch, middleware)
    response = await client.post(COCO, files=files)
    failures = json(await client.post(PATH, files=files))["failures"]
    expected = failures[0]["problem"]
    problem = json(response, expected["status"])

    where = f"{len(failures)} of {len(files)} images failed; at index {index}: " if len(files) > 1 else ""
    assert (failures[0]["index"], problem["code"], problem["detail"]) == (index, expected["code"], where + expected["detail"])
    assert response.headers["content-type"] == "application/problem+json"
    line = calls[0].kwargs
    assert (line["images"], line["failed"], line["code"]) == (len(files), len(failures), expected["code"])


async def test_unexpected_failure_tells_nothing(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = captured_log(monkeypatch, problems)
    monkeypatch.setattr(Letterbox, "fit", lambda *_, **__: 1 / 0)

    assert json(await client.post(COCO, files=form(SCENES[0])), 500)["code"] == "internal_error"
    assert isinstance(calls[0].kwargs["exc_info"], ZeroDivisionError)
