"""A hit is what an inference would have answered, also in HTTP, and only for the same network, image, caller and settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from app.errors import DeadlinePassed, GatewayFull, InferenceFailed, InvalidParameter
from app.features.cache import entry, fingerprints, flight
from app.features.cache.fingerprints import Fingerprints
from app.features.cache.flight import Flights
from app.features.cache.networks import CLEARED
from app.imaging.transform import ImageTransform
from app.pipeline.call import Decoded
from app.resilience.deadline import Deadline
from app.triton import loading
from app.triton.repository import DESCRIPTION, LOCK
from app.zoo import description
from tests.api.conftest import client_for, write_keys
from tests.api.test_tasks import triton_for
from tests.cache.conftest import OBJECTS, SECRET, Caching
from tests.fakes import models
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.imaging.samples import encode
from tests.support import SCENE, eventually, until
from tests.world import time_of_app
from tests.zoo.test_build import DOORS

OTHER = models.scene("BMP", "gray")


async def test_images_are_told_apart(caching: Caching) -> None:
    """Also those that differ by zeros at their end, with which a hash may fill its last block."""
    large = encode(Image.new("RGB", (800, 600)), "BMP")  # whose file is hashed in a thread
    images = [SCENE, SCENE + b"\0", SCENE + b"\0\0", OTHER, large]

    assert [await caching.result(data) for data in images * 2] == ["miss"] * 5 + ["hit"] * 5


async def test_result_answers_the_same_question(caching: Caching) -> None:
    calls: list[dict[str, Any]] = [{"allows_truncated": True}, {}, {"allows_truncated": True}, {"uses_cache": False}]
    assert [await caching.result(**call) for call in calls] == ["miss", "miss", "hit", ""]


async def test_other_network_or_preprocessing_never_gets_the_result_of_the_old_one(caching: Caching) -> None:
    """A network that was reloaded in place has another fingerprint under the same version."""
    await caching.ask()
    for network, results in ((b"another network", ["miss", "hit"]), (b"a network", ["hit"]), (b"", ["", ""])):
        caching.networks["1"] = network
        await caching.fingerprints.refresh()
        assert [await caching.result() for _ in results] == results
    caching.networks["1"] = b"a network"
    await caching.fingerprints.refresh()
    caching.world.fake.config = caching.world.fake.config | {"parameters": {"pad": {"string_value": "0"}}}
    caching.world.server.specs.forget("tiny")

    assert [await caching.result() for _ in range(2)] == ["miss", "hit"]


async def test_result_is_not_stored_if_the_network_has_changed_meanwhile(caching: Caching) -> None:
    """It may be that of either network."""
    caching.world.hold()
    asking = asyncio.create_task(caching.ask())
    await eventually(lambda: caching.world.fake.running == 1)
    caching.networks["1"] = b"another network"
    caching.world.let_answer()
    assert (await asking)[0] == "miss"
    caching.networks["1"] = b"a network"

    assert await caching.result() == "miss"


async def test_answer_is_right_whatever_the_store_returns(caching: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[bytes] = []
    answer = b""

    async def get(_: bytes) -> bytes:
        return answer

    async def put(_: bytes, value: bytes) -> None:
        values.append(value)

    monkeypatch.setattr(caching.store, "get", get)
    monkeypatch.setattr(caching.store, "put", put)
    await caching.ask(OTHER)
    for answer in (b"", b"garbage", bytes(100), values[0], values[0][:-1]):  # noqa: B007 - `get` returns it
        assert await caching.result() == "miss"


async def test_identical_images_under_way_share_an_inference(caching: Caching) -> None:
    caching.world.hold()
    asking = [asyncio.create_task(caching.ask(confidence=confidence)) for confidence in (0.1, 0.5, 0.1)]
    await eventually(lambda: caching.world.fake.running == 1)
    caching.world.let_answer()
    answers = await asyncio.gather(*asking)

    assert [result for result, _ in answers] == ["miss", "shared", "shared"]
    assert [len(found.scores) for _, found in answers] == [2, 1, 2]
    assert len(caching.world.fake.requests) == 1


async def test_the_deadline_and_the_departure_of_the_first_are_not_the_others(caching: Caching) -> None:
    caching.world.hold()
    leaving = asyncio.create_task(caching.ask())
    late = asyncio.create_task(caching.ask(seconds=5))
    waiting = asyncio.create_task(caching.ask())
    await eventually(lambda: caching.world.fake.running == 1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: len(caching.world.fake.requests) == 2)  # of the next one
    await caching.world.time.skip(6)
    with pytest.raises(DeadlinePassed):
        await late
    await eventually(lambda: len(caching.world.fake.requests) == 3)
    caching.world.let_answer()

    assert (await waiting)[0] == "miss"


async def test_request_for_a_version_never_shares_the_answer_of_a_newer_one(caching: Caching) -> None:
    """A request without a version may get it: the worker has not known yet that Triton has loaded one."""
    caching.world.hold()
    asking = [asyncio.create_task(caching.ask(version=version)) for version in (None, None, 1)]
    await eventually(lambda: caching.world.fake.running == 2)
    caching.world.fake.model_versions = ["1", "2"]
    caching.world.let_answer()
    answers = await asyncio.gather(*asking)

    assert [(result, found.version) for result, found in answers] == [("miss", "2"), ("shared", "2"), ("miss", "1")]


async def until_cache(client: httpx.AsyncClient, expected: str | None, model: str = "tiny") -> None:
    async def answers() -> bool:
        response = await client.post("/detect", params={"model": model}, content=SCENE)
        return bool(response.headers.get("x-cache") == expected)

    await until(answers)


async def test_changes_are_cached_once_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(fingerprints, "_INTERVAL_SECONDS", 0.01)
    network = tmp_path / "tiny" / "1" / "model.onnx"
    network.parent.mkdir(parents=True)
    network.write_bytes(b"one")
    (tmp_path / "tiny" / DESCRIPTION).write_text(description.dump(DOORS), encoding="utf-8")
    given = {"cache": "memory", "triton_loads_models": True, "model_repository": str(tmp_path)}
    async with client_for(FakeTriton().find_nothing(), **given) as client:
        await until_cache(client, None)
        (tmp_path / LOCK).touch()
        await until_cache(client, "hit")
        network.write_bytes(b"two")
        await until_cache(client, None)
        (tmp_path / LOCK).touch()
        for result in ("miss", "hit"):
            await until_cache(client, result)
        (tmp_path / CLEARED).touch()
        for result in ("miss", "hit"):
            await until_cache(client, result)


KEY = b"k" * 32
FOREVER = Deadline(float("inf"))


class Finder:
    """Notes how often it is run, and finds what the test sets."""

    def __init__(self) -> None:
        self.runs: list[asyncio.Future[Any]] = []

    async def __call__(self) -> Any:  # noqa: ANN401
        self.runs.append(asyncio.get_running_loop().create_future())
        return await self.runs[-1]


async def ask(flights: Flights, find: Finder, *deadlines: Deadline) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(flights.run(KEY, find, deadline)) for deadline in deadlines]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize(
    "error", [None, DeadlinePassed("late"), GatewayFull("full"), InvalidParameter("a class"), RuntimeError("a bug")]
)
async def test_waiter_takes_over_when_the_first_ends_early(error: Exception | None) -> None:
    """A class that only the replaced model had is no answer for the others."""
    find = Finder()
    first, *others = await ask(Flights(), find, FOREVER, FOREVER, FOREVER)
    if error is None:
        first.cancel()
    else:
        find.runs[0].set_exception(error)
    await eventually(lambda: len(find.runs) == 2)
    find.runs[1].set_result("found")

    assert await asyncio.gather(*others) == [("found", False), ("found", True)]
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)


async def test_question_that_was_answered_leaves_its_place_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_MAX_WAITING", 1)
    flights, find = Flights(), Finder()
    for number in range(2):
        questions = await ask(flights, find, FOREVER, FOREVER)
        find.runs[number].set_result("found")
        assert await asyncio.gather(*questions) == [("found", False), ("found", True)]


async def test_error_of_the_image_or_the_model_is_that_of_all() -> None:
    """Each gets its own, so that no traceback refers to the frames of another request."""
    find = Finder()
    tasks = await ask(Flights(), find, FOREVER, FOREVER)
    find.runs[0].set_exception(InferenceFailed("why"))
    first, second = await asyncio.gather(*tasks, return_exceptions=True)

    assert isinstance(second, InferenceFailed)
    assert (type(first), second.detail) == (InferenceFailed, "why")
    assert first is not second
    assert second.__cause__ is second.__context__ is None


async def test_old_fingerprints_are_not_used() -> None:
    with time_of_app() as time:
        fingerprints = Fingerprints(lambda *_: b"network")
        fingerprints.get(SPEC)
        await fingerprints.refresh()
        assert fingerprints.get(SPEC) == b"network"
        await time.skip(6)

        assert fingerprints.get(SPEC) == b""
        assert not await fingerprints.confirm(SPEC, b"")


def test_altered_and_foreign_bytes_are_rejected() -> None:
    decoded = Decoded(SPEC, "1", np.linspace(0, 1, 1000, dtype=np.float32), ImageTransform(0, 4, 32, 24, 640, 480))
    value = entry.dump(decoded, 0.25, KEY, SECRET)
    changed = [value[:n] + bytes([value[n] ^ 1]) + value[n + 1 :] for n in range(0, len(value), 37)]

    for other in (b"", value[:-1], value + b"\0", *changed):
        assert entry.load(other, KEY, decoded.spec, SECRET) is None
    assert entry.load(value, b"o" * 32, decoded.spec, SECRET) is None
    assert entry.load(value, KEY, decoded.spec, b"o" * 64) is None
    assert entry.load(value, KEY, decoded.spec, SECRET) is not None


UNCACHED = {"cache-control": "max-age=0, no-store"}


@asynccontextmanager
async def open_gateway(fake: FakeTriton | None = None, **settings: object) -> AsyncIterator[tuple[FakeTriton, httpx.AsyncClient]]:
    """A Triton, whose model finds two objects by default, and a client of an application whose cache knows the network."""
    if fake is None:
        fake = FakeTriton()
        fake.answer = infer_response(output0=OBJECTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.features.cache.networks.read", lambda *_: b"network")
        async with client_for(fake, cache="memory", **settings) as client:
            yield fake, client


async def until_hit(client: httpx.AsyncClient, url: str, **request: Any) -> httpx.Response:  # noqa: ANN401
    """Send a request until the cache answers it: results are stored, and networks read, in the background."""
    while (response := await client.post(url, **request)).headers.get("x-cache") != "hit":  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    return response


def found(response: httpx.Response) -> Any:  # noqa: ANN401
    """Return what an answer has found, without what differs between two requests."""
    assert response.status_code == 200, response.text
    if not isinstance(document := response.json() if "json" in response.headers["content-type"] else response.content, dict):
        return document
    return {name: part for name, part in document.items() if name not in {"total_time_ms", "request_id"}}


async def test_headers_tell_a_hit_and_a_request_can_rule_it_out() -> None:
    async with open_gateway() as (fake, client):
        hit = await until_hit(client, "/detect", content=SCENE)
        missed = await client.post("/detect", content=SCENE + b" ")
        count = len(fake.requests)
        uncached = await client.post("/detect", content=SCENE, headers=UNCACHED)
        assert len(fake.requests) == count + 1

        assert [response.headers.get("x-cache") for response in (hit, missed, uncached)] == ["hit", "miss", None]
        assert 'cache;desc="hit";dur=' in hit.headers["server-timing"]
        assert [stage for stage in ("decode;", "batch;", "infer;") if stage in hit.headers["server-timing"]] == []
        assert 'cache;desc="miss";dur=' in missed.headers["server-timing"]
        assert "cache;" not in uncached.headers["server-timing"]
        assert found(hit) == found(uncached)
        for query in ("confidence=0.5", "classes=1", "max_detections=1", "boxes=coco", "format=coco-results", "format=image"):
            hit = await client.post(f"/predict/tiny?{query}", content=SCENE)
            uncached = await client.post(f"/detect?{query}", content=SCENE, headers=UNCACHED)
            assert (hit.headers["x-cache"], found(hit)) == ("hit", found(uncached)), query


@pytest.mark.parametrize("task", ["pose", "obb", "classify", "embed/image"])
async def test_hit_of_another_task_is_what_an_inference_answers(task: str) -> None:
    async with open_gateway(triton_for(task if "/" not in task else "embedding")) as (_, client):
        hit = await until_hit(client, f"/{task}?model=tiny", content=SCENE)
        uncached = await client.post(f"/{task}?model=tiny", content=SCENE, headers=UNCACHED)

    assert found(hit) == found(uncached)


async def test_images_of_batches_and_dialects_use_the_same_results() -> None:
    async with open_gateway() as (fake, client):
        await until_hit(client, "/detect", content=SCENE)
        count = len(fake.requests)
        batch = await client.post("/detect/batch", files=[("images", SCENE)] * 3)
        dialect = await client.post("/v1/vision/detection", files={"image": SCENE})
        assert len(fake.requests) == count
        new = await client.post("/detect/batch", files=[("images", SCENE + b" ")] * 8)

    assert len(fake.requests) == count + 1
    assert [len(answer.json()["results"]) for answer in (batch, new)] == [3, 8]
    assert dialect.headers["x-cache"] == "hit"


@pytest.mark.parametrize("is_shared", [False, True])
async def test_keys_share_results_only_if_the_settings_say_so(tmp_path: Path, *, is_shared: bool) -> None:
    keys = write_keys(tmp_path, ("camera", "camera", "detect"), ("door", "door", "detect"))
    camera, door = ({"x-api-key": f"{name}.{name}"} for name in ("camera", "door"))
    async with open_gateway(api_keys_file=keys, cache_shared=is_shared) as (_, client):
        await until_hit(client, "/detect", content=SCENE, headers=camera)
        first = await client.post("/detect", content=SCENE, headers=door)

        assert first.headers["x-cache"] == ("hit" if is_shared else "miss")
        assert (await until_hit(client, "/detect", content=SCENE, headers=door)).status_code == 200
