"""The Python client: typed results, batches, many images, and errors, each with both classes."""

import asyncio
import inspect
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
    UnexpectedResponse,
    Unreachable,
    pictures_in,
)
from tests.clients.responses import detected
from tests.fakes import models
from tests.fakes.classifiers import LABELS
from tests.support import SCENE, json

MODEL = "six_columns"
SCENES = [models.scene("BMP", shift=shift) for shift in (-16, 0, 16)]
BROKEN = b"this is not an image"
ADDRESS = "https://images.example.org/cat.jpg"


async def test_result_is_that_of_the_gateway(synchronous: Client, asynchronous: AsyncClient, client: httpx.AsyncClient) -> None:
    raw = json(await client.post("/detect", params={"model": MODEL, "boxes": "pixel"}, content=SCENE))
    one = await asynchronous.detect(SCENE, model=MODEL, boxes="pixel")
    other = await asyncio.to_thread(synchronous.detect, SCENE, model=MODEL, classes=["blue"])
    class_of = await asynchronous.classify(SCENE, model="planes_to_logits", top_k=2)
    classes = await asyncio.to_thread(synchronous.classify, SCENE, model="planes_to_logits")

    for found in (one, other):
        assert (found.image, found.model.name, len(found.request_id)) == (ImageSize(200, 100), MODEL, 16)
        assert {"read", "decode", "infer", "post", "total"} <= set(found.timings)
        assert all(found.timings.values())
    fields = ("class_name", "x1", "y1", "x2", "y2", "confidence")
    assert [[getattr(found, name) for name in fields] for found in one.detections] == [
        [found[name] for name in fields] for found in raw["detections"]
    ]
    assert [found.class_name for found in one.detections] == ["red", "blue"]
    (blue,) = other.detections
    assert blue.class_name == "blue"
    assert blue.x1 == pytest.approx(one.detections[1].x1 / 200, abs=1e-4)
    assert class_of.classifications == classes.classifications[:2]
    assert {found.class_name for found in classes.classifications} == set(LABELS)


async def test_picture_in_a_file_is_drawn_by_the_gateway(asynchronous: AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "scene.bmp").write_bytes(SCENE)
    found = await asynchronous.detect(tmp_path / "scene.bmp", draw=True, model=MODEL)

    assert len(found.detections) == 2
    assert found.visualization
    assert found.visualization.startswith(b"\xff\xd8\xff")  # JPEG
    assert (await asynchronous.detect(str(tmp_path / "scene.bmp"), model=MODEL)).visualization is None


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
    assert isinstance(last := one[-1], DetectResult)
    assert (last.model.name, last.image) == (MODEL, ImageSize(200, 100))


async def test_pictures_of_a_folder_are_sent_several_at_a_time(
    synchronous: Client, asynchronous: AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "deeper").mkdir()
    for number, scene in enumerate(SCENES):
        (tmp_path / "deeper" / f"{number}.BMP").write_bytes(scene)
    (tmp_path / "broken.png").write_bytes(BROKEN)
    (tmp_path / "readme.txt").write_text("no picture")
    paths = [*pictures_in(tmp_path), gone := tmp_path / "gone.png"]
    one = {path: found async for path, found in asynchronous.detect_each(paths, in_flight=3, model=MODEL)}
    other = await asyncio.to_thread(lambda: [*synchronous.detect_each(paths, in_flight=3, model=MODEL)])

    assert [path for path, _ in other] == paths
    for results in (one, dict(other)):
        assert isinstance(results.pop(gone), FileNotFoundError)
        assert isinstance(failed := results.pop(tmp_path / "broken.png"), Problem)
        assert failed.code == "unsupported_format"
        assert {path.name for path in results} == {"0.BMP", "1.BMP", "2.BMP"}
        assert all(isinstance(found, DetectResult) for found in results.values())


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
        (detected(("red", 1 << 40, 0.9, (0, 0, 1, 1))), UnexpectedResponse, "Expected `int`"),
        (detected(size=(0, 100)), UnexpectedResponse, "Expected `int`"),
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


def test_key_is_sent_with_each_request() -> None:
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return detected()

    with Client(key="camera.secret", headers={"X-Request-ID": "mine"}, transport=httpx.MockTransport(answer)) as client:
        client.detect(SCENE)

    assert (seen[0]["authorization"], seen[0]["x-request-id"]) == ("Bearer camera.secret", "mine")


@pytest.mark.parametrize("ending", ["\n", " ", "é"])
def test_key_that_cannot_be_sent_is_not_in_the_error(ending: str) -> None:
    with pytest.raises(InvalidKey, match="the API key has characters that no key has") as raised:
        Client(key=f"camera.secret{ending}")
    assert "secret" not in str(raised.value)


def test_client_and_async_client_have_the_same_parameters() -> None:
    for name in ("__init__", "detect", "classify", "detect_batch", "detect_each"):
        one, other = inspect.signature(getattr(Client, name)), inspect.signature(getattr(AsyncClient, name))
        assert one.parameters == other.parameters
