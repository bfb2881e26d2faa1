"""Hostile input to the routes of search: a sentence, a status below 500, and nothing stored; odd but valid input comes back."""

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.fakes.models import scene
from tests.support import SCENE, json

SQL = "'; DROP TABLE images; --"
DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000
NOT_KEPT = [
    *(
        '{"a": NaN}',
        '{"a": Infinity}',
        '{"a": 1e999}',
        r'{"a": "\u0000"}',
        r'{"\u0000": 1}',
        r'{"a": "\ud800"}',
        r'{"a": "\udc00x"}',
    ),
    *('{"a": [' + "[" * 9 + "]" * 9 + "]}", DEEP, "[1]", '"a"', "{", "{'a': 1}", '{"a": "' + 10_000_000 * "x" + '"}'),
    '{"a": "' + 20_000 * "x" + '"}',
]
BAD_IDS = ["", "\0", "a\0b", 257 * "x", "\u202e", "a\nb", "a/b", "/", ".."]
TOO_MUCH = ["-1", "nan", "inf", 100 * "9", "2147483648", "9223372036854775808", "", "' OR 1=1 --", "\0"]
NO_FRACTION = ["nan", "inf", "-inf", "1e999", "-0.1", "1.1", "", SQL]
OF_FRACTIONS = {
    "/search/image": ["min_score"],
    "/search/object": ["min_score"],
    "/faces/search": ["min_score", "confidence"],
    "/faces/identify": ["threshold", "confidence"],
    "/ingest": ["near_duplicate_threshold"],
}
OF_NUMBERS = {
    "/search/image": ["top_k", "page"],
    "/search/object": ["top_k", "page", "box_index"],
    "/search/hybrid": ["top_k", "page"],
    "/faces/search": ["top_k", "page", "face_index"],
    "/faces/identify": ["top_k", "page"],
}
TIMES = ["yesterday", "2026-01-01", "9999999999999", "2026-13-01T00:00:00Z", "-0001-01-01T00:00:00Z", "NaN", "\0", SQL]
TEXTS: list[Any] = [None, {"a": "b"}, "", " \t ", 501 * "x", "a\0b", 1_000_000 * "字"]
NO_TEXT = [rb'{"text": "\ud800"}', b'{"text": "\xff"}', b"{", b"[]", DEEP.encode(), b'{"text": ' + 100_000 * b"[", b"\xff\xfe"]
GETS = [
    *(
        "/query/image/%00",
        "/query/image/%ff",
        f"/query/image/{257 * 'x'}",
        f"/query/image/{quote(SQL)}",
        "/query/image/%F0%9F%91%8D",
    ),
    *("/query/image/x?include_embedding=perhaps", "/query/image/%00/thumbnail", "/ingest/jobs/%00", f"/ingest/jobs/{quote(SQL)}"),
    *(f"/query/duplicates/{quote(name)}" for name in ("\0", SQL, 300 * "x")),
    *(
        f"{path}?{name}={quote(value)}"
        for path, names in {
            "/ingest/jobs": ("page", "size"),
            "/query/duplicates": ("page", "size", "min_size"),
        }.items()
        for name in names
        for value in TOO_MUCH
    ),
]
NAMES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        ("POST", "/v1/vision/face/register", {"files": {"image": SCENE}, "data": {"userid": name}})
        for name in ("", "\0", 600 * "x")
    ),
]


def hostile() -> list[tuple[str, str, dict[str, Any]]]:
    """Return method, path and what httpx needs of all requests."""
    pictures = [(path, name, value) for path, names in OF_NUMBERS.items() for name in names for value in TOO_MUCH]
    pictures += [(path, name, value) for path, names in OF_FRACTIONS.items() for name in names for value in NO_FRACTION]
    pictures += [(path, "metadata", value) for path in ("/search/image", "/search/hybrid") for value in NOT_KEPT]
    pictures += [("/search/image", name, value) for name in ("after", "before") for value in TIMES]
    pictures += [("/ingest", "image_path", value) for value in ("\0", 5000 * "x", "", "a\nb")]
    new = scene("PNG", "#fffff0")
    requests: list[tuple[str, str, dict[str, Any]]] = []
    for path, name, value in pictures:
        if len(value) < 50_000:  # an address is never that long
            requests.append(("POST", f"{path}?{name}={quote(value)}", {"content": SCENE}))
        requests.append(("POST", path, {"files": {"image": SCENE}, "data": {name: value}}))
    requests += [("POST", f"/ingest?image_id={quote(value)}", {"content": new}) for value in BAD_IDS]
    requests += [("POST", "/ingest", {"files": {"image": new}, "data": {"metadata": value}}) for value in NOT_KEPT]
    lists = ["[", "{}", "[7]", '["a", "b"]', r'["\u0000"]', r'["\ud800"]', f'["{5000 * "x"}"]', DEEP, "[" * 9999, "NaN"]
    fields = [(name, value) for name in ("image_ids", "image_paths") for value in lists]
    requests += [("POST", "/ingest/batch", {"files": [("images", new)], "data": {name: value}}) for name, value in fields]
    requests += [
        ("POST", path, {"json": {"text": value}}) for path in ("/search/ocr", "/ocr/search", "/search/text") for value in TEXTS
    ]
    requests += [("POST", path, {"content": body}) for path in ("/search/ocr", "/ocr/search") for body in NO_TEXT]
    requests += [("POST", f"/ocr/search?text=a&{name}={quote(value)}", {}) for name in ("page", "size") for value in TOO_MUCH]
    folders = ["", "/", "/etc", "..", "\0", "a" * 5000, SQL, "/proc/self/fd"]
    requests += [("POST", f"/ingest/directory?directory={quote(value)}", {}) for value in folders]
    requests += [
        (method, path, {}) for path in GETS for method in (("GET", "DELETE") if path.startswith("/query/image/") else ("GET",))
    ]
    return requests + NAMES


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


ODD = {
    "SQL": SQL,
    "right to left": "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
    "combining": "e\u0301\u0323 " + "Z\u0351\u036b\u0343\u036a\u0302\u036b",
    "outside of the first plane": "\U0001f469\u200d\U0001f52c".replace("\u200d", ""),
    "wildcards": "%_\\$1",
    "markup": "<b onclick=alert(1)>&amp;?a=b#c",
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_odd_but_valid_texts_come_back(searching: httpx.AsyncClient, odd: str) -> None:
    """As id, path and metadata of an image; as a filter, and as words."""
    data = {"image_id": odd, "image_path": odd, "metadata": httpx.Response(200, json={odd: [odd]}).text}
    assert json(await searching.post("/ingest", files={"image": SCENE}, data=data), 201)["image_id"] == odd

    kept = json(await searching.get(f"/query/image/{quote(odd, safe='')}"))["metadata"]
    assert (kept["image_id"], kept["image_path"], kept["metadata"]) == (odd, odd, {odd: [odd]})
    for filter_, count in ((data["metadata"], 1), ('{"other": 1}', 0)):
        found = json(await searching.post("/search/image", files={"image": SCENE}, data={"metadata": filter_}))["results"]
        assert [one["image_id"] for one in found] == [odd] * count
    for fuzzy in ("true", "false"):
        assert json(await searching.post("/ocr/search", json={"text": odd, "fuzzy": fuzzy}))["total_results"] == 0
    assert json(await searching.delete(f"/query/image/{quote(odd, safe='')}"))["image_id"] == odd
