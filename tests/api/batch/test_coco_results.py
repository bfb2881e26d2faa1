"""COCO results of a batch through HTTP, from the real Triton: all images in one list, or an error."""

from typing import Any

import httpx
import pytest

from app.api.admission import middleware
from app.api.answering import problems
from app.imaging.fit import Letterbox
from tests.api.batch.test_route import LINES, NOTHING, SCENES, TRUNCATED, Files, as_json, form
from tests.fakes import models
from tests.support import captured_log, json

PATH = "/detect/batch?model=six_columns&format=coco-results"
EMPTY = models.scene("PNG", shift=10_000)
"""An image without objects."""


@pytest.fixture(scope="module")
async def alone(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    """The results of each scene alone, as images 0, 1, 2 and so on."""
    answers = [
        json(await client.post(f"/predict/six_columns?format=coco-results&image_id={number}", content=scene))
        for number, scene in enumerate(SCENES)
    ]
    assert all(answers)
    return [result for answer in answers for result in answer]


def renumbered(results: list[dict[str, Any]], image_ids: list[int]) -> list[dict[str, Any]]:
    return [{**result, "image_id": image_ids[result["image_id"]]} for result in results]


async def test_all_images_are_in_one_list(client: httpx.AsyncClient, alone: list[dict[str, Any]]) -> None:
    from_form = await client.post(PATH, files=form(*SCENES))
    from_json = await client.post("/detect/batch", json=as_json(*SCENES, model="six_columns", format="coco-results"))

    assert json(from_form) == json(from_json) == alone
    assert from_form.headers["content-type"] == "application/json"


@pytest.mark.parametrize("ids", [[139, 285, 632, 0, 2**53], [4, 3, 2, 1, 0]])
async def test_the_caller_numbers_the_images(client: httpx.AsyncClient, alone: list[dict[str, Any]], ids: list[int]) -> None:
    text = ", ".join(map(str, ids))
    expected = renumbered(alone, ids)

    assert json(await client.post(f"{PATH}&image_ids={text}", files=form(*SCENES))) == expected
    assert json(await client.post(PATH, data={"image_ids": text}, files=form(*SCENES))) == expected
    assert json(await client.post(PATH, json=as_json(*SCENES, image_ids=text))) == expected


async def test_an_image_without_objects_has_no_results(client: httpx.AsyncClient, alone: list[dict[str, Any]]) -> None:
    files = form(EMPTY, SCENES[0], EMPTY, SCENES[1], EMPTY)
    found = json(await client.post(PATH, files=files))

    assert found == renumbered([result for result in alone if result["image_id"] < 2], [1, 3])
    assert json(await client.post(PATH, files=form(EMPTY, EMPTY))) == []


@pytest.mark.parametrize(
    ("ids", "detail"),
    [
        ("1,2", "expected 5, one for each image, found 2"),
        ("1,2,3,4,5,6", "expected 5, one for each image, found 6"),
        ("1,2,3,4,1", "expected a different number for each image"),
        ("1,2,3,4,-1", "expected whole numbers from 0 to 9007199254740992, separated by commas"),
        ("1,2,3,4,9007199254740993", "expected whole numbers from 0 to 9007199254740992, separated by commas"),
        ("1,2,3,4,x", "expected whole numbers from 0 to 9007199254740992, separated by commas"),
        ("1,,3,4,5", "expected whole numbers from 0 to 9007199254740992, separated by commas"),
        ("", "expected whole numbers from 0 to 9007199254740992, separated by commas"),
    ],
)
async def test_numbers_that_fit_no_images_are_rejected(client: httpx.AsyncClient, ids: str, detail: str) -> None:
    for query in ({}, {"format": "coco-results"}):
        problem = json(await client.post("/detect/batch", params={"image_ids": ids, **query}, files=form(*SCENES)), 400)

        assert (problem["code"], problem["detail"]) == ("invalid_parameter", f"image_ids: {detail}")


@pytest.mark.parametrize(
    ("files", "index"), [(form(SCENES[0], TRUNCATED, NOTHING, SCENES[1]), 1), (form(NOTHING, *SCENES), 0), (form(TRUNCATED), 0)]
)
async def test_no_image_is_left_out_in_silence(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, files: Files, index: int
) -> None:
    calls = captured_log(monkeypatch, middleware)
    response = await client.post(PATH, files=files)
    failures = json(await client.post("/detect/batch?model=six_columns", files=files))["failures"]
    expected = failures[0]["problem"]
    problem = json(response, expected["status"])

    assert failures[0]["index"] == index
    assert problem["code"] == expected["code"]
    where = f"{len(failures)} of {len(files)} images failed; at index {index}: " if len(files) > 1 else ""
    assert problem["detail"] == where + expected["detail"]
    assert response.headers["content-type"] == "application/problem+json"
    line = calls[0].kwargs
    assert (line["images"], line["failed"], line["code"]) == (len(files), len(failures), expected["code"])


async def test_an_unexpected_failure_tells_nothing(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = captured_log(monkeypatch, problems)
    monkeypatch.setattr(Letterbox, "fit", lambda *_, **__: 1 / 0)
    problem = json(await client.post(PATH, files=form(SCENES[0])), 500)

    assert problem["code"] == "internal_error"
    assert isinstance(calls[0].kwargs["exc_info"], ZeroDivisionError)


async def test_format_counts_more_than_accept(client: httpx.AsyncClient, alone: list[dict[str, Any]]) -> None:
    results = await client.post(PATH, files=form(*SCENES), headers=LINES)
    document = await client.post("/detect/batch?model=six_columns&format=json", files=form(*SCENES), headers=LINES)

    assert json(results) == alone
    assert json(document)["processed_images"] == 5
    assert document.headers["content-type"] == "application/json"
