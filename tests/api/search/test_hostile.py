"""Hostile input to the routes of search: a sentence, a status below 500, and nothing stored; odd but valid input comes back."""

from collections.abc import Iterator
from itertools import product
from typing import Any
from urllib.parse import quote

import httpx

from tests.api.search.conftest import picture
from tests.fakes.models import scene
from tests.support import SCENE, json

SQL = "'; DROP TABLE images; --"
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
NOT_KEPT = [
    *('{"a": NaN}', '{"a": 1e999}', r'{"a": "\u0000"}', r'{"\u0000": 1}', r'{"a": "\ud800"}', '{"a": [' + "[" * 9 + "]" * 9 + "]}"),
    *(DEEP, "[1]", "{", '{"a": "' + 10_000_000 * "x" + '"}', '{"a": "' + 20_000 * "x" + '"}'),
]
BAD_IDS = ["", "\0", "a\0b", 257 * "x", "a\x9fb", "a\nb", "a/b", "/", ".."]
NUMBERS = ["-1", "nan", 100 * "9", "2147483648", "", "' OR 1=1 --", "\0"]
FRACTIONS = ["nan", "inf", "1e999", "-0.1", "1.1", "", SQL]
TIMES = ["yesterday", "2026-01-01", "2026-13-01T00:00:00Z", "0001-01-01T00:00:00+14:00", "\0"]
FIELDS = [
    ("/search/image", "top_k page", NUMBERS),
    ("/search/image", "after before", TIMES),
    ("/search/image /search/hybrid /ingest", "metadata", NOT_KEPT),
    ("/search/image /search/object", "min_score", FRACTIONS),
    ("/search/image /ingest", "class_filter unheard_of", ["car"]),
    ("/search/object", "box_index", NUMBERS),
    ("/search/object", "class_filter", ["cra", "16"]),
    ("/faces/search", "face_index", NUMBERS),
    ("/faces/search /faces/identify", "confidence", FRACTIONS),
    ("/faces/identify", "threshold", FRACTIONS),
    ("/ingest", "image_id", BAD_IDS),
    ("/ingest", "image_path", ["\0", 5000 * "x", "", "a\nb"]),
    ("/ingest", "near_duplicate_threshold", [*FRACTIONS, "0.5"]),
]
LISTS = ["[", "{}", "[7]", '["a", "b"]', r'["\u0000"]', r'["\ud800"]', f'["{5000 * "x"}"]', DEEP, "x" * 40_000]
TEXTS: list[Any] = [None, {"a": "b"}, "", " \t ", 501 * "x", "a\0b", 1_000_000 * "字"]
NO_TEXT = [rb'{"text": "\ud800"}', b'{"text": "\xff"}', b"{", b"[]", b"", DEEP.encode(), b'{"text": ' + 100_000 * b"["]
FOLDERS = ["", "/", "/etc", "..", "photos", "a\0", "a" * 5000, SQL, "/proc/self/fd"]
NO_IMAGES = ["%00", "%ff", 257 * "x", quote(SQL), "a%2Fb", "..", "%0A", "x?include_embedding=perhaps", "x/thumbnail"]


def hostile() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and what httpx needs of all requests."""
    new = scene("PNG", "#fffff0")
    for path, name, value in (
        (*one, value) for paths, names, values in FIELDS for one in product(paths.split(), names.split()) for value in values
    ):
        if len(value) < 50_000:  # an address is never that long
            yield "POST", f"{path}?{name}={quote(value)}", {"content": new}
        yield "POST", path, {"files": {"image": new}, "data": {name: value}}
    for name, value in product(("image_ids", "image_paths"), LISTS):
        yield "POST", "/ingest/batch", {"files": [("images", new)], "data": {name: value}}
    for path in ("/search/ocr", "/ocr/search", "/search/text", "/search/hybrid"):
        yield from (("POST", path, {"json": {"text": value}}) for value in TEXTS)
        yield from (("POST", path, {"content": body, "headers": {"Content-Type": "application/json"}}) for body in NO_TEXT)
    yield from (("POST", f"/ocr/search?text=a&{name}={quote(value)}", {}) for name in ("page", "size") for value in NUMBERS)
    yield from (("POST", f"/ingest/directory?directory={quote(value)}", {}) for value in FOLDERS)
    yield "POST", "/ingest/directory", {"content": b"[1]"}
    yield from ((method, f"/query/image/{image}", {}) for image in NO_IMAGES for method in ("GET", "DELETE"))
    for path in ("/ingest/jobs", "/query/duplicates"):
        yield from (("GET", f"{path}/{name}", {}) for name in ("%00", quote(SQL), 300 * "x", "1"))
        yield from (("GET", f"{path}?{name}={quote(value)}", {}) for name in ("page", "size") for value in NUMBERS)
    for files, data in (
        *(({"image": new}, {"userid": name}) for name in ("", " ", "\0", 600 * "x")),
        ({"image": new}, {}),
        *((files, {"userid": "Ruth"}) for files in (None, [("image", SCENE)] * 65)),
        *(({"image": SCENE, "image2": wrong}, {"userid": "Ruth"}) for wrong in (picture(), b"no image")),
    ):
        yield "POST", "/v1/vision/face/register", {"files": files, "data": data}
    yield "POST", "/v1/vision/face/delete", {}


async def test_hostile_requests_are_refused_and_nothing_is_stored(searching: httpx.AsyncClient) -> None:
    await searching.post("/ingest?image_id=first", content=SCENE)
    before = json(await searching.get("/query/stats"))
    wrong = []
    for method, path, given in hostile():
        answer = await searching.request(method, path, **given)
        problem = answer.json()
        sentence = str(problem.get("detail") or problem.get("error") or "")
        if not (400 <= answer.status_code < 500 and len(sentence.split()) > 2):
            wrong.append((method, path[:100], str(given)[-100:], answer.status_code, answer.text[:200]))

    assert wrong == []
    assert json(await searching.get("/query/stats")) == before


ODD = [
    SQL,
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",  # from right to left
    "Screenshot 9.41\u202fAM\u3000\u200d",
    "e\u0301\u0323 Z\u0351\u036b\u0343\u036a\u0302\u036b \U0001f469\U0001f52c",  # combining, and outside of the first plane
    "%_\\$1 <b onclick=alert(1)>&amp;?a=b#c",
]


async def test_odd_but_valid_texts_come_back(searching: httpx.AsyncClient) -> None:
    """As id, path and metadata of an image; as a filter, and as words."""
    for odd in ODD:
        data = {"image_id": odd, "image_path": odd, "metadata": httpx.Response(200, json={odd: [odd]}).text}
        path = f"/query/image/{quote(odd, safe='')}"
        assert json(await searching.post("/ingest", files={"image": SCENE}, data=data), 201)["image_id"] == odd

        kept = json(await searching.get(path))["metadata"]
        assert (kept["image_id"], kept["image_path"], kept["metadata"]) == (odd, odd, {odd: [odd]})
        for filter_, count in ((data["metadata"], 1), ('{"other": 1}', 0)):
            found = json(await searching.post("/search/image", files={"image": SCENE}, data={"metadata": filter_}))["results"]
            assert [one["image_id"] for one in found] == [odd] * count
        for fuzzy in ("true", "false"):
            assert json(await searching.post("/ocr/search", json={"text": odd, "fuzzy": fuzzy}))["total_results"] == 0
        assert json(await searching.delete(path))["image_id"] == odd
