"""Searches, as clients of OpenProcessor send them, on a real database and a real Triton."""

from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.search.postgres.engine import PostgresEngine
from tests.api.search.conftest import OpenGateway
from tests.api.search.pictures import index, picture
from tests.support import NEEDS_BYTES, json

LEFT, RIGHT = (10, 10, 89, 89), (110, 10, 189, 89)
BOTH, SWAPPED, RED = picture(LEFT, RIGHT), picture(RIGHT, LEFT), picture(LEFT)
ENDING = {"search_time_ms", "total_time_ms", "request_id"}


@pytest.fixture(scope="module")
async def found(gateway: httpx.AsyncClient, engine: PostgresEngine) -> httpx.AsyncClient:
    """A gateway with three images."""
    await index(engine, gateway, "both", BOTH, ["Main Street 5", "EXIT"], camera=1)
    await index(engine, gateway, "swapped", SWAPPED, ["北京 railway station"], camera=2)
    await index(engine, gateway, "red", RED, camera=2, tags=["a", "b"])
    return gateway


def ids(answer: dict[str, Any]) -> list[str]:
    return [result["image_id"] for result in answer["results"]]


async def test_images_like_another_one_are_found(found: httpx.AsyncClient) -> None:
    response = await found.post("/v1/search/image?top_k=2&min_score=0.1", files={"image": BOTH})
    answer = json(response)

    assert answer.keys() == {"status", "query_type", "results", "total_results", *ENDING}
    assert (answer["status"], answer["query_type"], answer["total_results"]) == ("success", "image", 2)
    first = {"image_id": "both", "image_path": "/images/both.png", "score": 1.0, "metadata": {"camera": 1}}
    assert answer["results"][0] == first
    assert 0.1 <= answer["results"][1]["score"] < 1
    assert ids(json(await found.post("/search/image?min_score=1", content=BOTH))) == ["both"]
    assert ids(json(await found.post("/search/image?top_k=2&page=1&min_score=0", content=BOTH)))[:1] not in ([], ["both"])
    assert "search;dur=" in response.headers["server-timing"]
    assert 'nereid_search_seconds_count{operation="nearest"}' in (await found.get("/metrics")).text


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"metadata": '{"camera": 2}'}, ["red", "swapped"]),
        ({"metadata": '{"tags": ["b"]}'}, ["red"]),
        ({"after": "2020-01-31T12:00:00+02:00", "before": "2100-01-01T00:00:00Z"}, ["both", "red", "swapped"]),
        ({"before": "2020-01-31T12:00:00Z"}, []),
    ],
)
async def test_filters_choose_by_metadata_and_time(found: httpx.AsyncClient, filters: dict[str, str], expected: list[str]) -> None:
    answer = json(await found.post("/search/image", params={"min_score": "0", **filters}, content=RED))
    assert sorted(ids(answer)) == expected
    body = {"image": b64encode(RED).decode(), "metadata": {"camera": 1}, "min_score": 0}
    assert ids(json(await found.post("/search/image", json=body))) == ["both"]
    words = json(await found.post("/search/ocr", json={"text": "exit", "metadata": {"camera": 2}}))
    assert (words["results"], words["total_results"]) == ([], 0)


async def test_objects_like_another_one_are_found(found: httpx.AsyncClient) -> None:
    answer = json(await found.post("/search/object?box_index=0&min_score=0.5", files={"image": SWAPPED}))
    cars = json(await found.post("/search/object?box_index=1&class_filter=0,2", files={"image": SWAPPED}))
    none = json(await found.post("/search/object?class_filter=bus&class_filter=boat", files={"image": SWAPPED}))

    assert answer["query_type"] == "object"
    assert answer["query_object"].keys() == {"box", "class_id", "class_name", "category"}
    assert (answer["query_object"]["class_id"], answer["query_object"]["category"]) == (0, "person")
    assert sorted(ids(answer)) == ["both", "red", "swapped"]
    assert {result["category"] for result in answer["results"]} == {"person"}
    assert all(len(result["box"]) == 4 and 0 < result["confidence"] <= 1 for result in answer["results"])
    assert (sorted(ids(cars)), cars["results"][0]["class_name"]) == (["both", "swapped"], "car")
    assert none["results"] == []
    assert json(await found.post("/search/object?box_index=2", content=SWAPPED), 400)["detail"].startswith(
        "box_index: 2 were found"
    )


@pytest.mark.parametrize("path", ["/search/face", "/v1/faces/search"])
async def test_faces_like_another_one_are_found(found: httpx.AsyncClient, path: str) -> None:
    answer = json(await found.post(f"{path}?face_index=0&top_k=10&min_score=0.7", files={"image": SWAPPED}))
    any_face = json(await found.post(f"{path}?min_score=0", files={"image": SWAPPED}))

    assert answer["query_face"].keys() == {"box", "landmarks", "score", "quality"}
    assert sorted(ids(answer)) == ["both", "red", "swapped"]
    best = answer["results"][0]
    shown = {"face_id", "image_id", "image_path", "score", "person_id", "person_name", "box", "confidence", "metadata"}
    assert (best.keys(), best["score"]) == (shown, pytest.approx(1, abs=0.01))
    assert (best["person_id"], best["person_name"]) == (None, None)
    assert any_face["total_results"] == 5
    assert any_face["results"][-1]["score"] == pytest.approx(max(0, 1 - 0.4 * 2**0.5 / 0.6), abs=0.02)
    beyond = json(await found.post(f"{path}?face_index=7", content=SWAPPED), 400)
    assert (beyond["code"], beyond["detail"].partition(":")[0]) == ("invalid_parameter", "face_index")
    assert json(await found.post(path, content=picture()), 400)["code"] == "no_face"


async def test_all_faces_of_an_image_are_identified(found: httpx.AsyncClient) -> None:
    """By registered ones before indexed ones, which have no names; another face in the image does not show that name."""
    answer = json(await found.post("/faces/identify?top_k=2&threshold=0.6", files={"image": BOTH}))
    nobody = json(await found.post("/faces/identify", content=picture()))
    json(await found.post("/v1/vision/face/register", files={"image": RED}, data={"userid": "Ruth"}))
    red, blue = json(await found.post("/faces/identify?threshold=0", files={"image": BOTH}))["results"]
    json(await found.post("/v1/vision/face/delete", data={"userid": "Ruth"}))

    assert (answer["num_faces"], nobody["num_faces"], nobody["results"]) == (2, 0, [])
    for result in answer["results"]:
        assert result.keys() == {"query_face", "identified", "best_match", "all_matches"}
        assert (result["identified"], result["best_match"]) == (True, result["all_matches"][0])
        assert len(result["all_matches"]) == 2
    assert (red["best_match"]["person_name"], red["best_match"]["score"]) == ("Ruth", pytest.approx(1, abs=0.01))
    assert {match["person_name"] for match in red["all_matches"]} == {None, "Ruth"}
    assert (blue["identified"], {match["person_name"] for match in blue["all_matches"]}) == (True, {None})


async def test_words_in_images_are_found(found: httpx.AsyncClient) -> None:
    answer = json(await found.post("/search/ocr?text=main%20street"))
    fuzzy = json(await found.post("/ocr/search?text=main%20stret&page=0&size=5"))
    exact = json(await found.post("/v1/ocr/search", json={"text": "main stret", "fuzzy": False}))
    chinese = json(await found.post("/ocr/search", json={"text": "北京"}))
    longest = json(await found.post("/ocr/search", json={"text": "Main Street".ljust(499) + "5", "fuzzy": False}))

    (result,) = answer["results"]
    assert (answer["query_type"], answer["query_text"], answer["total_results"]) == ("ocr", "main street", 1)
    assert result["matched_text"] == "Main Street 5"
    assert (result["text_box"], result["full_text"]) == ([0.1, 0.2, 0.5, 0.4], "Main Street 5\nEXIT")
    assert {"status", "query", "total_results", "page", "size", "results"} <= fuzzy.keys()
    assert (fuzzy["query"], fuzzy["page"], fuzzy["size"], ids(fuzzy)) == ("main stret", 0, 5, ["both"])
    assert (fuzzy["results"][0]["num_texts"], fuzzy["results"][0]["highlight"]) == (2, ["Main Street 5"])
    assert (exact["results"], ids(chinese), ids(longest)) == ([], ["swapped"], ["both"])


async def test_description_needs_a_model(found: httpx.AsyncClient) -> None:
    problem = json(await found.post("/search/text?text=a%20red%20car"), 404)
    assert problem["detail"].startswith("texts cannot be described: there is no model embedding_text")


@NEEDS_BYTES
async def test_vectors_of_texts_are_compared_with_those_of_the_same_size_only(
    open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path
) -> None:
    (tmp_path / "routes.toml").write_text('[embedding_text]\nto = "letters"\n')
    async with open_gateway(routes_file=str(tmp_path / "routes.toml")) as client:
        nothing = json(await client.post("/search/text?text=ab"))
        await index(own_engine, client, "both", BOTH, ["ab"])
        problem = json(await client.post("/search/text", json={"text": "ab"}), 502)
        words = json(await client.post("/search/hybrid", json={"text": "ab"}))

    assert (nothing["results"], nothing["query_type"]) == ([], "text")
    assert "describes them by 4 numbers, embedding:1 describes images by 12" in problem["detail"]
    assert words["results"][0]["ranks"] == {"words": 1}


async def test_ranks_of_images_and_words_are_joined(found: httpx.AsyncClient) -> None:
    by_both = json(await found.post("/search/hybrid?text=station&top_k=2", files={"image": BOTH}))
    by_image = json(await found.post("/search/hybrid?top_k=1&page=1", content=BOTH))

    assert (by_both["query_type"], by_both["query_text"], by_both["total_results"]) == ("hybrid", "station", 2)
    first, second = by_both["results"]
    assert (first["image_id"], first["ranks"].keys()) == ("swapped", {"image", "words"})
    assert (first["matched_text"], second["ranks"]) == ("北京 railway station", {"image": 1})
    assert by_image["results"][0]["ranks"] == {"image": 2}
    assert ids(json(await found.post("/search/hybrid?text=station"))) == ["swapped"]
