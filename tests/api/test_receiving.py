"""Bodies are received within their limits, work for a client that has gone is stopped, and images are fetched from addresses."""

import asyncio
import base64
import gzip
import random
from typing import Any

import httpx
import msgspec
import pytest

from app.api.admission import middleware
from app.api.answering import problems
from app.api.application import Application
from app.api.context import BodyLimits
from app.api.receiving import body
from app.api.receiving.client_watch import ClientWatch
from app.errors import BodyTimeout, GatewayFull
from app.main import create_app
from app.pipeline import preprocess
from app.resilience.fairness import ANYBODY
from app.resilience.uploads import Upload
from tests.api.conftest import in_virtual_time, now, settings_for
from tests.fakes.http import Host, redirect, response
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, Receive, call, captured_log, chunk, eventually, json, lifespan_of, open_admission, receiving
from tests.world import Gate

LIMITS = BodyLimits(100, total_seconds=30)


async def read(receive: Receive, limits: BodyLimits = LIMITS, upload_bytes: int = 1000, others: int = 0) -> bytes:
    with (
        open_admission(upload_bytes=upload_bytes) as admission,
        admission.start_upload(ANYBODY) as other,
        admission.start_upload(ANYBODY) as upload,
        ClientWatch(receive, limits) as client,
    ):
        other.add(others)
        return await client.read_body(upload)


async def test_bytes_of_all_bodies_have_a_limit() -> None:
    limits, part = LIMITS._replace(max_bytes=2**20), bytes(2**16)
    body = chunk(part, more=True), chunk(part, more=True), chunk(b"x")
    assert len(await read(receiving(*body), limits, 2**17)) == 2**17 + 1
    assert len(await read(receiving(chunk(part[1:], more=True), chunk(part)), limits, 2**17, others=1)) == 2**17 - 1
    with pytest.raises(GatewayFull):
        await read(receiving(*body), limits, 2**17, others=1)


def sending(pause_seconds: float, pieces: int = 1 << 30, *, is_whole: bool = False) -> Receive:
    """Make the `receive` of a client that makes a pause before each piece of one byte; the last ends the body, or nothing does."""
    sent = 0

    async def receive() -> Any:  # noqa: ANN401
        nonlocal sent
        await asyncio.sleep(pause_seconds if sent < pieces else 3600)
        sent += 1
        return chunk(b"x", more=not is_whole or sent < pieces)

    return receive


@in_virtual_time
async def test_body_that_takes_too_long_is_a_timeout() -> None:
    for pause, pieces, seconds in ((1, 0, 10), (1, 3, 13), (9, 1 << 30, 30)):
        before = now()
        with pytest.raises(BodyTimeout, match=r"within 30 s, without pauses of more than 10 s$"):
            await read(sending(pause, pieces))
        assert now() == pytest.approx(before + seconds)
    assert await read(sending(9, 3, is_whole=True)) == b"x" * 3


async def post(app: Application, leaves: asyncio.Event) -> int:
    """Send a picture, and stay until the event unless it is answered before; return the status."""
    sent = receiving(chunk(SCENE))

    async def receive() -> Any:  # noqa: ANN401
        message = await sent()
        if message["type"] == "http.disconnect":
            await leaves.wait()
        return message

    headers = {"Content-Type": "image/bmp", "Content-Length": str(len(SCENE))}
    return (await call(app, receive, "/detect", headers)).status


async def test_client_that_leaves_while_its_image_is_queued_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, fake = Gate(), FakeTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, decode_threads=1))):
        decoded = gate.block(monkeypatch, preprocess, "fill_input")
        stays, leaves = asyncio.Event(), asyncio.Event()
        blocking = asyncio.create_task(post(app, stays))
        await eventually(gate.reached.is_set)
        waiting = asyncio.create_task(post(app, leaves))
        leaves.set()
        await waiting
        gate.opened.set()
        await blocking
        assert await post(app, stays) == 502  # in the thread that was the second's turn before

    assert len(decoded) == 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that bodies and fetched images take of the memory for uploads."""
    noted, add = list[int](), Upload.add

    def note(upload: Upload, nbytes: int) -> None:
        add(upload, nbytes)
        noted.append(nbytes)

    monkeypatch.setattr(Upload, "add", note)
    return noted


async def test_all_memory_of_a_body_that_is_parsed_is_counted(reader: httpx.AsyncClient, counted: list[int]) -> None:
    noise = random.Random(0).randbytes(1 << 19)  # noqa: S311 - an image that hardly shrinks
    plain = msgspec.json.encode({"image": base64.urlsafe_b64encode(noise).decode()})
    data = gzip.compress(plain)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert json(await reader.post("/detect", content=data, headers=headers), 415)["code"] == "unsupported_format"
    assert sum(counted) == len(data) + len(plain) + body.parsing_bytes(len(plain), "application/json")


CANARY = "canary7f3a"
Remote = tuple[Host, httpx.AsyncClient]


async def test_image_is_fetched_and_detected_and_its_bytes_are_counted(remote: Remote, counted: list[int]) -> None:
    host, client = remote
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
    assert sum(counted) >= 3 * len(SCENE)


async def test_address_in_the_query_leaves_no_room_for_a_body(remote: Remote) -> None:
    """A form sends an empty address for a field that was not filled in, which is none."""
    host, client = remote
    url = host.url("/scene.bmp")
    assert json(await client.post("/detect", files={"image": SCENE}, data={"url": " "}))["num_detections"] == 2
    assert json(await client.post("/detect", params={"url": ""}, content=SCENE))["num_detections"] == 2
    assert json(await client.post("/detect", json={"url": ""}), 400)["detail"] == "the url is empty"
    problem = json(await client.post("/detect", params={"url": url}, content=SCENE), 400)
    assert problem["detail"] == "with `url` in the query, send no body"
    assert json(await client.post("/detect", json={"url": url, "image": url}), 400)["detail"] == "url is given more than once"
    assert not host.requests


async def test_address_without_an_image_is_an_error_of_the_caller(remote: Remote) -> None:
    host, client = remote
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


async def test_log_has_the_host_but_neither_path_nor_query(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Path and query may contain secrets."""
    host, client = remote
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
