"""The Python client: typed results, batches, many images, errors and retries, each with both classes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nereid_client import (
    AsyncClient,
    Client,
    DetectResult,
    ImageSize,
    InvalidKey,
    Problem,
    Retries,
    UnexpectedResponse,
    Unreachable,
    pictures_in,
)
from tests.clients.conftest import detected, refused
from tests.fakes import models
from tests.fakes.classifiers import LABELS
from tests.support import SCENE, json

MODEL = "six_columns"
SCENES = [models.scene("BMP", shift=shift) for shift in (-16, 0, 16)]
BROKEN = b"this is not an image"
ADDRESS = "https://images.example.org/cat.jpg"
AWAY, FULL = httpx.ConnectError("refused"), refused(429, "gateway_full", "2")
Answers = list[httpx.Response | Exception]


async def test_result_is_that_of_the_gateway(
    synchronous: Client, asynchronous: AsyncClient, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    (path := tmp_path / "scene.bmp").write_bytes(SCENE)
    raw = json(await client.post("/detect", params={"model": MODEL, "boxes": "pixel"}, content=SCENE))
    one = await asynchronous.detect(path, draw=True, model=MODEL, boxes="pixel")
    other = await asyncio.to_thread(synchronous.detect, SCENE, model=MODEL, classes=["blue"])
    class_of = await asynchronous.classify(SCENE, model="planes_to_logits", top_k=2)
    classes = await asyncio.to_thread(synchronous.classify, SCENE, model="planes_to_logits")

    for found in (one, other):
        assert (found.image, found.model.name, len(found.request_id)) == (ImageSize(200, 100), MODEL, 16)
        assert {"read", "decode", "infer", "post", "total"} <= set(found.timings)
    fields = ("class_name", "x1", "y1", "x2", "y2", "confidence")
    assert [[getattr(found, name) for name in fields] for found in one.detections] == [
        [found[name] for name in fields] for found in raw["detections"]
    ]
    assert one.visualization
    assert one.visualization.startswith(b"\xff\xd8\xff")  # JPEG
    assert [found.class_name for found in other.detections] == ["blue"]
    assert class_of.classifications == classes.classifications[:2]
    assert {found.class_name for found in classes.classifications} == set(LABELS)


async def test_batch_keeps_its_order(synchronous: Client, asynchronous: AsyncClient) -> None:
    images = [*SCENES, BROKEN, *[SCENES[0]] * 62]
    one = await asynchronous.detect_batch(images, model=MODEL, boxes="pixel", timeout_ms=20000)
    other = await asyncio.to_thread(synchronous.detect_batch, images[:4], model=MODEL, boxes="pixel")
    alone = [(await asynchronous.detect(image, model=MODEL, boxes="pixel")).detections for image in SCENES]

    for results in (one, other):
        assert [found.detections for found in results[:3] if isinstance(found, DetectResult)] == alone
        assert isinstance(failed := results[3], Problem)
        assert (failed.status, failed.code) == (415, "unsupported_format")
    assert len(one) == 66
    assert all(isinstance(found, DetectResult) and found.detections == alone[0] for found in one[4:])


async def test_pictures_of_a_folder_are_sent_several_at_a_time(
    synchronous: Client, asynchronous: AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "deeper").mkdir()
    for name, content in (("deeper/0.BMP", SCENES[0]), ("1.bmp", SCENES[1]), ("broken.png", BROKEN), ("readme.txt", b"no picture")):
        (tmp_path / name).write_bytes(content)
    paths = [*pictures_in(tmp_path), gone := tmp_path / "gone.png"]
    one = {path: found async for path, found in asynchronous.detect_each(paths, in_flight=3, model=MODEL)}
    other = await asyncio.to_thread(lambda: dict(synchronous.detect_each(paths, in_flight=3, model=MODEL)))

    assert [*other] == paths
    for results in (one, other):
        assert isinstance(results.pop(gone), FileNotFoundError)
        assert isinstance(failed := results.pop(tmp_path / "broken.png"), Problem)
        assert failed.code == "unsupported_format"
        assert {path.name for path, found in results.items() if isinstance(found, DetectResult)} == {"0.BMP", "1.bmp"}


async def test_leaving_early_stops_what_is_in_flight() -> None:
    asked: list[httpx.Request] = []
    ended: list[httpx.Request] = []
    both = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            await both.wait()
            return detected()
        both.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request)
        return detected()

    async with AsyncClient(transport=httpx.MockTransport(answer)) as client:
        outcomes = client.detect_each([SCENE] * 10, in_flight=2)
        await anext(outcomes)
        await outcomes.aclose()

        assert len(asked) == 2
        assert ended == asked[1:]


async def test_errors_carry_what_the_gateway_says(synchronous: Client, asynchronous: AsyncClient) -> None:
    with pytest.raises(Problem) as caught:
        await asynchronous.detect(SCENE, model="nothing")
    assert (caught.value.status, caught.value.code) == (404, "unknown_model")
    assert caught.value.request_id
    assert str(caught.value) == f"404 unknown_model: {caught.value.detail} (request {caught.value.request_id})"
    with pytest.raises(Problem, match="400 invalid_parameter: confidence"):
        await asyncio.to_thread(synchronous.detect, SCENE, confidence=2)
    with pytest.raises(Problem, match="url_input_disabled"):
        await asynchronous.detect(ADDRESS)
    (failed,) = await asynchronous.detect_batch([ADDRESS])
    assert isinstance(failed, Problem)
    assert failed.code == "url_input_disabled"


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(502, html="<h1>Bad Gateway</h1>", headers={"X-Request-ID": "7"}), Problem, r"^502: .* \(request 7\)$"),
        (httpx.Response(200, html="<h1>Welcome</h1>"), UnexpectedResponse, "^http://gateway/ does not respond as"),
        (httpx.Response(200, json={"detections": []}), UnexpectedResponse, "missing required field"),
        (detected(("red", -1, 0.9, (0, 0, 1, 1))), UnexpectedResponse, "Expected `int`"),
        (httpx.ReadTimeout("timed out"), Unreachable, "^http://gateway/ does not respond: timed out$"),
    ],
)
def test_answer_of_another_server_is_an_error_without_the_password(
    response: httpx.Response | Exception, error: type[Exception], message: str
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    url = "http://user:secret@gateway"
    with Client(url, transport=httpx.MockTransport(answer)) as client, pytest.raises(error, match=message):
        client.detect(SCENE)


def test_key_is_sent_with_each_request_or_refused_without_being_told() -> None:
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return detected()

    with Client(key="camera.secret", headers={"X-Request-ID": "mine"}, transport=httpx.MockTransport(answer)) as client:
        client.detect(SCENE)
    for ending in ("\n", " ", "é"):
        with pytest.raises(InvalidKey, match="the API key has characters that no key has") as raised:
            Client(key=f"camera.secret{ending}")
        assert "secret" not in str(raised.value)

    assert (seen[0]["authorization"], seen[0]["x-request-id"]) == ("Bearer camera.secret", "mine")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses between attempts, during which only the client's clock goes on; chance always takes the longest."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr("nereid_client.client.time.sleep", made.append)
        patch.setattr("nereid_client.client.asyncio.sleep", sleep)
        patch.setattr("nereid_client.retries.monotonic", lambda: sum(made))
        patch.setattr("nereid_client.retries.random.uniform", lambda _, most: most)
        yield made


def ask(answers: Answers, retries: Retries = Retries(), *, is_async: bool = False) -> None:  # noqa: B008 - immutable
    left = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(found := next(left), Exception):
            raise found
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)

    async def ask_async() -> None:
        async with AsyncClient(transport=httpx.MockTransport(answer), retries=retries) as client:
            await client.detect(b"image")

    if is_async:
        asyncio.run(ask_async())
    else:
        with Client(transport=httpx.MockTransport(answer), retries=retries) as client:
            client.detect(b"image")


@pytest.mark.parametrize("is_async", [False, True])
def test_request_is_repeated_as_retry_after_asks(pauses: list[float], *, is_async: bool) -> None:
    unavailable = [refused(503, "", after) for after in ("1", None, "Thu, 26 Nov 2026 06:00:00 GMT")]
    ask([FULL, *unavailable, AWAY, httpx.ReadError("reset"), detected()], is_async=is_async)

    assert pauses == [2 + 0.2, 1 + 0.4, 0.8, 1.6, 3.2, 6.4]


def test_attempts_and_time_are_limited_and_other_requests_not_repeated(pauses: list[float]) -> None:
    failures: Answers = [*(refused(status, "") for status in (400, 408, 500, 502, 504)), httpx.ReadTimeout("60 s")]
    for answer in failures:
        with pytest.raises((Problem, Unreachable)):
            ask([answer])
    assert pauses == []
    with pytest.raises(Unreachable) as caught:
        ask([AWAY] * 3, Retries(attempts=3))
    assert caught.value.__cause__ is AWAY
    assert len(pauses) == 2
    pauses.clear()
    with pytest.raises(Problem, match="429 gateway_full"):
        ask([FULL] * 3, Retries(total_seconds=5))
    with pytest.raises(Problem, match="503"):
        ask([refused(503, "circuit_open", "120")])
    assert len(pauses) == 2
