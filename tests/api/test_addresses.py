"""Images that are fetched from an address; and memory that the body of a request takes is counted."""

import asyncio
import base64
import gzip
import random
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from app import main
from app.api.admission import middleware
from app.api.answering import problems
from app.api.application import Application
from app.api.receiving import body
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.resilience.admission import Admission
from app.resilience.fairness import ANYBODY
from app.resilience.uploads import Upload
from app.settings.schema import Settings
from tests.fakes.https import Host, redirect, response, serving
from tests.fakes.triton import FakeTriton
from tests.support import SCENE, call, captured_log, eventually, json, receiving, started

NOISE = random.Random(0).randbytes(1 << 20)  # noqa: S311 - an image that hardly shrinks


async def test_all_memory_of_a_body_that_is_parsed_is_counted(
    gateway: tuple[FakeTriton, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    add = Upload.add

    def noted(upload: Upload, nbytes: int) -> None:
        add(upload, nbytes)
        counted.append(nbytes)

    monkeypatch.setattr(Upload, "add", noted)
    plain = msgspec.json.encode({"image": base64.urlsafe_b64encode(NOISE).decode()})
    data = gzip.compress(plain)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert json(await gateway[1].post("/detect", content=data, headers=headers), 415)["code"] == "unsupported_format"

    assert sum(counted) == len(data) + len(plain) + body.parsing_bytes(len(plain), "application/json")


CANARY = "canary7f3a"


class Remote(NamedTuple):
    host: Host
    client: httpx.AsyncClient
    app: Application


@pytest.fixture
async def remote(
    settings: Settings, triton: EmbeddedTriton, admissions: list[Admission], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Remote]:
    assert triton.poll() is None
    assert not admissions
    async with serving() as host:
        host.answers["/scene.bmp"] = response(SCENE)
        monkeypatch.setattr(main, "Fetcher", lambda hosts, max_bytes, **others: host.fetcher(*hosts, max_bytes=max_bytes, **others))
        own = msgspec.structs.replace(settings, model="six_columns", url_hosts=f"*.example.org:{host.port}", max_file_size_mb=1)
        app = create_app(own)
        async with started(app) as client:
            yield Remote(host, client, app)
        assert all(admission.upload_memory.own_bytes == admission.memory.own_bytes == 0 for admission in admissions)


@pytest.fixture
def admissions(monkeypatch: pytest.MonkeyPatch) -> list[Admission]:
    made: list[Admission] = []
    create = Admission.__init__

    def create_and_note(admission: Admission, *arguments: Any) -> None:  # noqa: ANN401
        create(admission, *arguments)
        made.append(admission)

    monkeypatch.setattr(Admission, "__init__", create_and_note)
    return made


async def test_image_is_fetched_and_detected(remote: Remote) -> None:
    host, client, _ = remote
    url = host.url("/scene.bmp")
    for request in (
        {"params": {"url": url, "classes": "red"}},
        {"json": {"image": url, "classes": ["red"]}},
        {"files": {"url": (None, url), "classes": (None, "red")}},
    ):
        answer = await client.post("/detect", **request)
        assert [found["class_name"] for found in json(answer)["detections"]] == ["red"]
        assert [entry.partition(";")[0] for entry in answer.headers["server-timing"].split(", ")][:3] == ["read", "fetch", "model"]
    assert len(host.requests) == 3


async def test_batch_has_images_and_addresses(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    host, client, _ = remote
    logged = captured_log(monkeypatch, middleware)
    wrong = ["http://images.example.org/scene.bmp", "https://elsewhere.test/", host.url("/missing.bmp"), "https://" + "x" * 5000]
    images = [host.url("/scene.bmp"), base64.b64encode(SCENE).decode(), *wrong, host.url("/scene.bmp")]
    answer = json(await client.post("/detect/batch", json={"images": images}))
    lines = await client.post("/detect/batch", json={"images": images}, headers={"Accept": "application/x-ndjson"})

    assert [result["image_index"] for result in answer["results"]] == [0, 1, 6]
    assert all(result["num_detections"] == 2 for result in answer["results"])
    codes = ["url_not_allowed", "url_not_allowed", "image_not_fetched", "url_not_allowed"]
    assert [failure["problem"]["code"] for failure in answer["failures"]] == codes
    statuses = {line["index"]: line["status"] for line in map(msgspec.json.decode, lines.content.splitlines()[:-1])}
    assert [statuses[index] for index in range(7)] == [200, 200, 400, 400, 424, 400, 200]
    assert [line.kwargs["url_hosts"] for line in logged] == [["images.example.org"]] * 2


async def test_batch_leaves_room_to_fetch_single_images(remote: Remote, admissions: list[Admission]) -> None:
    host, client, app = remote
    host.answers["/slow"] = asyncio.StreamWriter.wait_closed
    data = msgspec.json.encode({"images": [host.url("/slow")] * 64})
    may_leave = asyncio.Event()
    received = receiving({"type": "http.request", "body": data, "more_body": False})

    async def leaving() -> Any:  # noqa: ANN401
        message = await received()
        if message["type"] == "http.disconnect":
            await may_leave.wait()
        return message

    batch = asyncio.create_task(call(app, leaving, "/detect/batch", headers={"Content-Type": "application/json"}))
    await eventually(lambda: host.open_connections == 8)

    assert len(json(await client.post("/detect", params={"url": host.url("/scene.bmp")}))["detections"]) == 2
    assert admissions[0].batch_memory.own_bytes > 0
    may_leave.set()
    assert (await batch).problem["code"] == "client_gone"
    await eventually(lambda: not host.open_connections)
    assert admissions[0].batch_memory.own_bytes == 0


async def test_address_in_the_query_leaves_no_room_for_a_body(remote: Remote) -> None:
    """A form sends an empty address for a field that was not filled in, which is none."""
    host, client, _ = remote
    url = host.url("/scene.bmp")
    assert json(await client.post("/detect", files={"image": SCENE}, data={"url": " "}))["num_detections"] == 2
    assert json(await client.post("/detect", params={"url": ""}, content=SCENE))["num_detections"] == 2
    assert json(await client.post("/detect", json={"url": ""}), 400)["detail"] == "the url is empty"
    problem = json(await client.post("/detect", params={"url": url}, content=SCENE), 400)
    assert problem["detail"] == "with `url` in the query, send no body"
    assert json(await client.post("/detect", json={"url": url, "image": url}), 400)["detail"] == "url is given more than once"
    assert not host.requests


async def test_address_without_an_image_is_an_error_of_the_caller(remote: Remote) -> None:
    host, client, _ = remote
    host.answers |= {
        "/redirect": redirect("https://169.254.169.254/latest"),
        "/page": response(b"<!doctype html>", "200 OK", "Content-Type: text/html"),
        "/large": response(bytes(2**20 + 1)),
        "/broken": response(SCENE[:100]),
    }
    for url, status, code in (
        ("https://127.0.0.1/", 400, "url_not_allowed"),
        ("https://x" + "x" * 5000, 400, "invalid_parameter"),
        (host.url("/redirect"), 424, "image_not_fetched"),
        (host.url("/page"), 415, "unsupported_format"),
        (host.url("/large"), 413, "body_too_large"),
        (host.url("/broken"), 422, "invalid_image"),
    ):
        problem = json(await client.post("/detect", json={"image": url}), status)
        assert problem["code"] == code
        assert "example.org:" not in problem["detail"]
        assert problem["detail"].count("example.org") <= ("such as https://example.org/" in problem["detail"])


async def test_without_hosts_no_address_is_taken(reader: httpx.AsyncClient) -> None:
    for request in ({"params": {"url": "https://a.org/x"}}, {"json": {"image": "https://a.org/x"}}, {"json": {"url": "x"}}):
        problem = json(await reader.post("/detect", **request), 400)  # type: ignore[arg-type]
        assert problem["code"] == "url_input_disabled"
        assert "NEREID_URL_HOSTS" in problem["detail"]
    assert json(await reader.post("/detect", json={"image": "https"}), 400)["code"] == "malformed_request"


async def test_bytes_that_arrive_count_as_those_of_an_upload(remote: Remote, admissions: list[Admission]) -> None:
    host, client, _ = remote
    memory = admissions[0].upload_memory
    seen: list[int] = []

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(response(SCENE[:1000], "200 OK", f"Content-Length: {len(SCENE)}"))
        await writer.drain()
        await eventually(lambda: memory.own_bytes == 1000)
        seen.append(memory.own_bytes)
        writer.write(SCENE[1000:])

    host.answers["/pause"] = answer
    json(await client.post("/detect", params={"url": host.url("/pause")}))
    assert seen == [1000]

    memory.limit_bytes = 1000
    with memory.reserve(ANYBODY) as others:
        others.add(1)
        assert json(await client.post("/detect", params={"url": host.url("/scene.bmp")}), 429)["code"] == "gateway_full"


async def test_log_has_the_host_but_neither_path_nor_query(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path and query may contain secrets."""
    host, client, _ = remote
    lines, errors = captured_log(monkeypatch, middleware), captured_log(monkeypatch, problems)
    host.answers[f"/{CANARY}?{CANARY}"] = response(SCENE)
    host.answers[f"/broken/{CANARY}"] = f"{CANARY}\r\n\r\n".encode()
    urls = {
        host.url(f"/{CANARY}?{CANARY}#{CANARY}"): 200,
        host.url(f"/broken/{CANARY}"): 424,
        f"https://{CANARY}:{CANARY}@images.example.org:{host.port}/": 400,
        f"https://{CANARY}.example.org/": 400,
    }
    answers = [await client.post("/detect", json={"image": url}) for url in urls]
    answers += [await client.post("/detect", params={"url": url}) for url in urls]

    assert [answer.status_code for answer in answers] == [*urls.values()] * 2
    assert CANARY not in str(lines)
    assert CANARY not in "".join(answer.text for answer in answers)
    assert not errors
    assert [line.kwargs.get("url_host") for line in lines] == ["images.example.org", "images.example.org", None, None] * 2
