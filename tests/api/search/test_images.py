"""Images are indexed and found, as clients of OpenProcessor ask for it, on a real database and a real Triton."""

import asyncio
from base64 import b64encode
from typing import Any
from uuid import UUID

import httpx
import pytest
from blake3 import blake3

from tests.api.search.conftest import OpenGateway, index, picture
from tests.fakes.models import scene
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
KEYS = {"status", "image_id", "num_detections", "num_faces", "embedding_norm", "imohash", "indexed", "near_duplicate", "ocr"} | {
    *("existing_image_id", "existing_image_path", "message", "error", "errors", "total_time_ms", "request_id"),
    *("is_completed", "updated"),
}
PARTS = ("detections", "embedding", "faces", "face_embeddings", "ocr")
BATCH = {"status", "total", "processed", "duplicates", "errors_count", "indexed", "near_duplicates", "deferred_ops"} | {
    *("duplicate_details", "error_details", "near_duplicate_details", "image_ids", "total_time_ms", "request_id"),
    *("completed", "updated", "left_out"),
}


async def ingest(client: httpx.AsyncClient, image: bytes = SCENE, status: int = 201, **form: Any) -> Any:  # noqa: ANN401
    return json(await client.post("/v1/ingest", files={"image": image}, data=form), status)


async def test_image_is_indexed_once_with_all_its_parts(searching: httpx.AsyncClient) -> None:
    first = await ingest(searching, image_id="première 1.bmp", image_path="/x/1.bmp", metadata='{"place": "🚗 north"}')
    again = await ingest(searching, status=200, image_id="another")
    other = await ingest(searching, OTHER)
    replaced = await ingest(searching, scene("PNG", "green"), image_id="première 1.bmp")

    assert ({*first}, first["status"], first["image_id"]) == (KEYS, "success", "première 1.bmp")
    assert (first["num_detections"], first["num_faces"], first["errors"]) == (2, 2, None)
    assert first["indexed"] == {"global": True, "vehicles": 1, "people": 1, "faces": 2, "ocr": 1}
    assert first["ocr"] == {"num_texts": 1, "full_text": "r", "indexed": True}
    assert (first["imohash"], first["embedding_norm"] > 0) == (blake3(SCENE).hexdigest(), True)
    assert (again["status"], again["image_id"], again["indexed"]) == ("duplicate", "another", None)
    assert (again["existing_image_id"], again["existing_image_path"]) == ("première 1.bmp", "/x/1.bmp")
    assert (UUID(other["image_id"]).version, other["status"]) == (4, "success")
    assert replaced["status"] == "success"
    assert (await ingest(searching))["status"] == "success"  # the first one is no more


async def test_near_duplicates_are_grouped(searching: httpx.AsyncClient) -> None:
    await ingest(searching, image_id="one")
    first = (await ingest(searching, scene("PNG"), image_id="two"))["near_duplicate"]
    second = (await ingest(searching, scene("TIFF"), image_id="three"))["near_duplicate"]
    alone = await ingest(searching, scene("GIF"), detect_near_duplicates="false")

    assert first == {"action": "created_group", "group_id": first["group_id"], "similarity": 1.0, "matched_image": "one"}
    assert (second["action"], second["group_id"]) == ("joined_group", first["group_id"])
    assert alone["near_duplicate"] is None


async def test_images_of_a_batch_succeed_or_fail_alone(searching: httpx.AsyncClient) -> None:
    await ingest(searching, image_id="known")
    images = [("images", (f"{index}.bmp", content)) for index, content in enumerate([SCENE, b"junk", OTHER, scene("PNG")])]
    form = {"image_ids": '["a", "b", null, "d"]', "image_paths": '[null, "/b", null, null]', "defer_heavy_ops": "true"}
    answer = json(await searching.post("/v1/ingest/batch", files=images, data=form), 201)

    assert ({*answer}, answer["status"], answer["deferred_ops"]) == (BATCH, "partial", 0)
    numbers = ("total", "processed", "duplicates", "errors_count", "near_duplicates")
    assert [answer[name] for name in numbers] == [4, 2, 1, 1, 1]
    assert answer["indexed"] == {"global": 2, "vehicles": 2, "people": 2, "faces": 4, "ocr": 2}
    assert answer["duplicate_details"] == [{"image_id": "a", "existing_image_id": "known", "imohash": blake3(SCENE).hexdigest()}]
    (error,) = answer["error_details"]
    assert (error["image_id"], error["index"], error["filename"], error["problem"]["status"]) == ("b", 1, "1.bmp", 415)
    (near,) = answer["near_duplicate_details"]
    assert (near["image_id"], near["matched_image"]) == ("d", "known")
    assert [*answer["image_ids"][:2], answer["image_ids"][3]] == ["known", None, "d"]
    json(await searching.get(f"/query/image/{answer['image_ids'][2]}"))
    again = json(await searching.post("/ingest/batch", files=images[:1]))
    assert (again["status"], again["duplicates"], again["image_ids"]) == ("success", 1, ["known"])
    twice = json(await searching.post("/ingest/batch", files=images[2:], data={"image_ids": '["a", "a"]'}), 400)
    assert "two images have the same id" in twice["detail"]


async def test_known_image_gets_what_it_lacks(open_gateway: OpenGateway) -> None:
    """Parts that were not wanted, or whose model was not there; another path and metadata."""
    without = {"task_models": "embedding=nothing,text_recognition=nothing"}
    async with open_gateway(**without) as client:
        images = [("images", SCENE)]
        batch = json(await client.post("/ingest/batch", files=images, data={"image_ids": '["one"]', "enable_clip": "false"}), 201)
        assert (batch["left_out"], batch["indexed"]["vehicles"]) == ({"ocr": 1}, 0)
        again = await ingest(client, image_id="one", status=200, image_path="/moved", metadata='{"new": 1}', enable_clip="false")
        assert (again["status"], again["updated"]) == ("duplicate", ["path", "metadata"])
        before = json(await client.get("/query/image/one"))
        assert (before["parts"]["ocr"]["state"], before["parts"].get("embedding")) == ("left_out", None)
    async with open_gateway() as client:
        done = await ingest(client, status=200)
        assert (done["image_id"], done["status"], done["is_completed"], done["indexed"]["vehicles"]) == ("one", "success", True, 1)
        assert (await ingest(client, status=200))["status"] == "duplicate"
        hits = json(await client.post("/search/image", files={"image": SCENE}, data={"metadata": '{"new": 1}'}))["results"]
        assert [(hit["image_id"], hit["image_path"]) for hit in hits] == [("one", "/moved")]
        after = json(await client.get("/query/image/one"))
    assert after["metadata"]["indexed_at"] == before["metadata"]["indexed_at"]
    assert {part: state["state"] for part, state in after["parts"].items()} == dict.fromkeys(PARTS, "there")
    assert after["parts"]["embedding"]["model"] == "embedding:1"


async def test_same_image_sent_at_once_with_different_parts_gets_all(searching: httpx.AsyncClient) -> None:
    form = [{name: "false"} for name in ("enable_clip", "enable_ocr", "enable_faces")]
    statuses = [
        response.status_code
        for response in await asyncio.gather(
            *(searching.post("/ingest", content=SCENE, params={"image_id": "one", **given}) for given in form)
        )
    ]
    parts = json(await searching.get("/query/image/one"))["parts"]
    assert (sorted(statuses), {*parts}) == ([200, 200, 201], {*PARTS})


async def test_vector_of_embed_image_may_be_kept(searching: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    kept = json(await searching.post("/embed/image?index=true&image_id=mine", content=SCENE))
    again = json(await searching.post("/embed/image?index=true", content=SCENE))
    plain = json(await searching.post("/embed/image?image_id=mine", content=SCENE))

    indexed = [(each["indexed"], each["image_id"]) for each in (kept, again, plain)]
    assert indexed == [(True, "mine"), (True, "mine"), (False, "mine")]
    assert kept["embedding"] == plain["embedding"]
    assert json(await client.post("/embed/image?index=true", content=SCENE), 404)["code"] == "not_offered"
    assert json(await searching.post("/embed/image?index=true&image_id=%01", content=OTHER), 400)["code"] == "invalid_parameter"


LEFT, RIGHT = (10, 10, 89, 89), (110, 10, 189, 89)
BOTH, SWAPPED, RED = picture(LEFT, RIGHT), picture(RIGHT, LEFT), picture(LEFT)


@pytest.fixture(scope="module")
async def found(gateway: httpx.AsyncClient) -> httpx.AsyncClient:
    await index(gateway, "both", BOTH, ["Main Street 5", "EXIT"], camera=1)
    await index(gateway, "swapped", SWAPPED, ["北京 railway station"], camera=2)
    await index(gateway, "red", RED, camera=2, tags=["a", "b"])
    return gateway


def ids(answer: dict[str, Any]) -> list[str]:
    return [result["image_id"] for result in answer["results"]]


async def test_images_like_another_one_are_found(found: httpx.AsyncClient) -> None:
    response = await found.post("/v1/search/image?top_k=2&min_score=0.1", files={"image": BOTH})
    answer = json(response)

    members = {"status", "query_type", "results", "total_results", "search_time_ms", "total_time_ms", "request_id"}
    assert answer.keys() == members
    assert (answer["status"], answer["query_type"], answer["total_results"]) == ("success", "image", 2)
    assert answer["results"][0] == {"image_id": "both", "image_path": "/images/both.png", "score": 1.0, "metadata": {"camera": 1}}
    assert 0.1 <= answer["results"][1]["score"] < 1
    assert ids(json(await found.post("/search/image?min_score=1", content=BOTH))) == ["both"]
    assert ids(json(await found.post("/search/image?top_k=2&page=1&min_score=0", content=BOTH)))[:1] not in ([], ["both"])
    assert "search;dur=" in response.headers["server-timing"]
    assert 'nereid_search_seconds_count{operation="nearest"}' in (await found.get("/metrics")).text


async def test_filters_choose_by_metadata_and_time(found: httpx.AsyncClient) -> None:
    filters: list[tuple[dict[str, str], list[str]]] = [
        ({"metadata": '{"camera": 2}'}, ["red", "swapped"]),
        ({"metadata": '{"tags": ["b"]}'}, ["red"]),
        ({"after": "2020-01-31T12:00:00+02:00", "before": "2100-01-01T00:00:00Z"}, ["both", "red", "swapped"]),
        ({"before": "2020-01-31T12:00:00Z"}, []),
    ]
    for chosen, expected in filters:
        answer = json(await found.post("/search/image", params={"min_score": "0", **chosen}, content=RED))
        assert sorted(ids(answer)) == expected
    sign = "/search/image?min_score=0&before=2020-01-31T12:00:00+02:00"  # which is not encoded
    assert ids(json(await found.post(sign, content=RED))) == []
    body = {"image": b64encode(RED).decode(), "metadata": {"camera": 1}, "min_score": 0}
    assert ids(json(await found.post("/search/image", json=body))) == ["both"]
    words = json(await found.post("/search/ocr", json={"text": "exit", "metadata": {"camera": 2}}))
    assert (words["results"], words["total_results"]) == ([], 0)


async def test_faces_like_another_one_are_found(found: httpx.AsyncClient) -> None:
    path = "/v1/faces/search"
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
    assert json(await found.post("/search/ocr?text=main%20street&min_score=1"))["results"] == []
    assert (result["text_box"], result["full_text"]) == ([0.1, 0.2, 0.5, 0.4], "Main Street 5\nEXIT")
    assert {"status", "query", "total_results", "page", "size", "results"} <= fuzzy.keys()
    assert (fuzzy["query"], fuzzy["page"], fuzzy["size"], ids(fuzzy)) == ("main stret", 0, 5, ["both"])
    assert (fuzzy["results"][0]["num_texts"], fuzzy["results"][0]["highlight"]) == (2, ["Main Street 5"])
    assert (exact["results"], ids(chinese), ids(longest)) == ([], ["swapped"], ["both"])


async def test_hybrid_search_ranks_by_words_and_by_the_look_of_an_image(found: httpx.AsyncClient) -> None:
    by_words = json(await found.post("/search/hybrid", json={"text": "main street"}))
    by_image = json(await found.post("/search/hybrid", files={"image": SWAPPED}))
    by_both = json(await found.post("/search/hybrid?text=main%20street", files={"image": SWAPPED}))

    assert (by_words["query_text"], ids(by_words)[0]) == ("main street", "both")
    assert ("query_text" in by_image, ids(by_image)[0]) == (False, "swapped")
    assert by_both["query_text"] == "main street"
    assert {found["image_id"]: sorted(found["ranks"]) for found in by_both["results"]}["both"] == ["image", "words"]
