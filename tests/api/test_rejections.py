"""Every route at which a model is asked, and every cause for which a request is rejected before its body is received.

The first tests compare all routes with the one order of checks; the last ones are about an open circuit.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import grpc
import httpx
import pytest

from app.api import application
from app.api.application import Application
from app.api.caller.keys import ApiKeys
from app.api.dialects.dialect import load
from app.api.routes import ModelRoute
from app.api.search import routes
from app.main import create_app
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller, Turn
from app.resilience.lease import Lease
from app.settings.schema import DIALECTS
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from tests.api.conftest import post_unread, routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import DEPLOYMENT, METRICS, SCENE, Reply, call, calling, chunk, json, lifespan_of, receiving, staying, until
from tests.world import World, open_world

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
CAMERA, MONITOR = ("X-API-Key", f"camera.{SECRET}"), ("X-API-Key", f"monitor.{SECRET}")
JPEG, FORM = (("Content-Type", kind) for kind in ("image/jpeg", "multipart/form-data; boundary=b"))
BROTLI = "Content-Encoding", "br"
LENGTH, NO_LENGTH, TOO_LONG = (("Content-Length", length) for length in ("100", "many", str(2**23)))
HOST = ("Host", "other")
STATUSES = {dialect.name: dialect.statuses for dialect in load(DIALECTS)}
_OF_SEARCH = tuple(path for route in routes.MODEL_ROUTES for path in route.paths)
BOTH = pytest.mark.parametrize("gateway", [False, True], ids=["worker", "search"], indirect=True)
"""Marks a test of the routes of a worker, and of the process that searches beside it."""


def type_of(route: ModelRoute) -> tuple[str, str]:
    return FORM if route.media_types else JPEG


class Gateway(NamedTuple):
    world: World
    app: Application

    @property
    def routes(self) -> list[tuple[str, ModelRoute]]:
        return [
            (route.path.replace("{model:str}", "tiny").replace("{version:int}", "1"), handler)
            for route in routes_of(self.app)
            for handler in getattr(route, "route_handlers", ())
            if isinstance(handler, ModelRoute)
        ]

    async def ask(self, path: str, *headers: tuple[str, str]) -> Reply:
        """POST a request for `tiny` whose body must not be received."""
        return await post_unread(self.app, f"{path}?model=tiny" if "tiny" not in path else path, list(headers))


@pytest.fixture
async def gateway(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Gateway]:
    file = write_keys(tmp_path, ("camera", SECRET, "detect search ingest admin"), ("monitor", SECRET, "health"))
    async with open_world(max_uploads=8, upload_bytes=2**23) as world:
        await world.until_known()

        @asynccontextmanager
        async def open_resources() -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
            yield world.pool, world.pipeline, METRICS

        deployment = DEPLOYMENT._replace(dialects=DIALECTS, has_faces=True, is_search_alone=getattr(request, "param", False))
        app = application.build(open_resources, deployment, ApiKeys(Path(file)))
        async with lifespan_of(app):
            assert len(Gateway(world, app).routes) > 15
            yield Gateway(world, app)


@contextmanager
def full(world: World, *, batches_only: bool = False) -> Iterator[None]:
    budget = world.admission.batch_memory if batches_only else world.admission.memory
    budget.add(ANYBODY, 2 * budget.limit_bytes)  # others may use a little more than the limit
    yield
    budget.add(ANYBODY, -2 * budget.limit_bytes)


def status_of(path: str, status: int) -> int:
    return STATUSES.get(path.split("/")[1], {}).get(status, status)


@BOTH
async def test_no_key_or_the_wrong_one(gateway: Gateway) -> None:
    """401 and 403 come before anything else is judged; a body that may contain the key is received first."""
    for path, route in gateway.routes:
        wrong = [("X-API-Key", "camera.wrong"), BROTLI, TOO_LONG]
        assert (await gateway.ask(path, *wrong)).status == 401, path
        assert (await gateway.ask(path, MONITOR, BROTLI, TOO_LONG)).status == 403, path
        if route.key_in != "body":
            assert (await gateway.ask(path, BROTLI, TOO_LONG)).status == 401, path


@BOTH
async def test_the_framing(gateway: Gateway) -> None:
    for path, _ in gateway.routes:
        for wrong in (HOST, NO_LENGTH, ("Content-Length", "9" * 5000)):
            assert (await gateway.ask(path, wrong, BROTLI)).status == 400, path


@BOTH
async def test_the_declared_type_and_length(gateway: Gateway) -> None:
    """415 comes before 413, also for a body that may contain the key."""
    for path, route in gateway.routes:
        for key in [[CAMERA], *([[]] if route.key_in == "body" else [])]:
            assert (await gateway.ask(path, *key, BROTLI, TOO_LONG)).status == status_of(path, 415), path
            assert (await gateway.ask(path, *key, type_of(route), TOO_LONG)).status == 413, path


@BOTH
async def test_length_that_is_not_declared(gateway: Gateway) -> None:
    """413 is sent once more bytes have arrived than the route takes."""
    for path, route in gateway.routes:
        if path.endswith(("/list", "/face/register", "/face/recognize", "/face/delete", *_OF_SEARCH)):
            continue  # nobody looks at its body if the key is known before
        part = chunk(bytes(2**16), more=True)
        limit = {"text": 2**16, "image": 2**20, "images": 2**22}[route.takes]
        reply = await call(gateway.app, receiving(*[part] * (limit // 2**16 + 1)), path, [CAMERA, type_of(route)])
        assert reply.status == 413, path
        if route.key_in == "body":
            limit = min(limit, 2**20)  # nobody knows yet whose body it is
            assert (await call(gateway.app, receiving(*[part] * (limit // 2**16 + 1)), path, [JPEG])).status == 413, path


@BOTH
async def test_full_gateway(gateway: Gateway) -> None:
    """The answer is 429 to a caller whose key is known; routes that use no model go on."""
    with full(gateway.world):
        for path, route in gateway.routes:
            if route.takes != "text":
                assert (reply := await gateway.ask(path, CAMERA, type_of(route), LENGTH)).status == 429, path
                assert reply.headers["retry-after"] == "1"
                assert ("problem" in reply.headers["content-type"]) != any(f"/{name}/" in path for name in DIALECTS)
            else:
                assert (await gateway.ask(path, CAMERA, type_of(route), TOO_LONG)).status == 413, path
            assert (await gateway.ask(path, MONITOR)).status == 403, path
            assert (await gateway.ask(path, ("X-API-Key", "camera.wrong"))).status == 401, path


@BOTH
async def test_no_memory_for_batches(gateway: Gateway) -> None:
    with full(gateway.world, batches_only=True):
        for path, route in gateway.routes:
            length, status = (LENGTH, 429) if route.takes == "images" else (TOO_LONG, 413)
            assert (await gateway.ask(path, CAMERA, type_of(route), length)).status == status, path


@BOTH
async def test_open_circuit(gateway: Gateway) -> None:
    """503 where the request names the model before its body; it comes before 429, and nobody without a key learns of it."""
    world = gateway.world
    world.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"
    assert len(await world.errors(5)) == 5
    assert world.usable == [False]
    with full(world):
        for path, route in gateway.routes:
            if route.takes != "text":
                reply = await gateway.ask(path, CAMERA, type_of(route), LENGTH)
                assert (reply.status, reply.headers["retry-after"]) == (503, "1"), path
            else:
                assert (await call(gateway.app, receiving(chunk(b"")), path, [CAMERA])).status != 503, path
            assert (await gateway.ask(path, CAMERA, BROTLI)).status == status_of(path, 415), path
            assert (await gateway.ask(path, MONITOR)).status == 403, path
            assert (await gateway.ask(path, ("X-API-Key", "camera.wrong"))).status == 401, path


@BOTH
async def test_path_that_only_litestar_takes_for_a_route_does_not_exist(gateway: Gateway) -> None:
    """Python's `int` accepts more kinds of digits than the gateway's routes."""
    for version in ("1_0", "\N{ARABIC-INDIC DIGIT ONE}"):
        assert (await gateway.ask(f"/roboflow/tiny/{version}", CAMERA, JPEG)).status == 404
    for path in ("/livez", "/models", "/nothing"):
        assert (await gateway.ask(path, HOST)).status == 400


async def test_bodies_that_may_have_a_key(gateway: Gateway) -> None:
    """A few may be received at a time, for two seconds; callers with a key in a header do not notice."""
    path, part = "/deepstack/v1/vision/detection", chunk(bytes(2**17), more=True)
    sending = [asyncio.create_task(call(gateway.app, staying(part), path, [FORM])) for _ in range(8)]
    await asyncio.sleep(0)
    reply = await gateway.ask(path, FORM)
    assert (reply.status, reply.headers["retry-after"]) == (429, "1")
    assert gateway.world.admission.upload_memory.used_bytes == 0
    assert gateway.world.admission.anonymous_uploads.memory.used_bytes == 8 * 2**17
    broken = chunk(b"no image")
    for key in (("Authorization", f"Bearer camera.{SECRET}"), CAMERA):
        assert (await call(gateway.app, receiving(broken), path, [JPEG, key])).status == status_of(path, 415)

    await gateway.world.time.skip(2)
    assert [answer.status for answer in await asyncio.gather(*sending)] == [408] * 8
    assert (await call(gateway.app, receiving(broken), path, [JPEG])).status == 401
    assert gateway.world.admission.own_bytes == 0


async def test_key_in_a_body_has_two_seconds_to_be_found(gateway: Gateway) -> None:
    """However long the request may take; and the work of finding it takes no thread from other requests."""
    path, busy, body = "/deepstack/v1/vision/detection?timeout_ms=30000", Event(), chunk(b"--b--")
    with Lease() as lease:
        threads = gateway.world.pipeline.apart_threads
        callers = (ANYBODY, Caller("other"))  # the second one takes the thread for callers that have no other work
        holding = [asyncio.create_task(threads.run(busy.wait, Deadline.after(100), lease, turn=Turn(caller))) for caller in callers]
        asking = [asyncio.create_task(call(gateway.app, staying(body), path, [FORM, *key])) for key in ([], [CAMERA])]
        assert (await asking[1]).status == 400
        await gateway.world.time.skip(2)
        assert (await asking[0]).status == 408
        busy.set()
        await asyncio.gather(*holding)


async def test_body_that_takes_long_to_read_is_not_read(gateway: Gateway) -> None:
    """Litestar's router caches paths, and queries are searched for keys and models."""
    for path in ("/predict/" + "\N{GRINNING FACE}" * 1024, "/detect?" + "&".join(["a=%41"] * 65), "/nothing" * 1024):
        assert (await gateway.ask(path)).status == 400


class SickTriton(FakeTriton):
    """Has two versions of models, and cannot run one model unless it is asked for a version."""

    def __init__(self) -> None:
        super().__init__()
        self.sick = ""
        self.find_nothing()
        self.model_versions = ["1", "2"]

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.model_name == self.sick and not request.model_version:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server is stopping")
        return await super().ModelInfer(request, context)


class Breaking(NamedTuple):
    fake: SickTriton
    app: Application
    client: httpx.AsyncClient

    async def detect(self, path: str = "/detect") -> int:
        return (await self.client.post(path, content=SCENE)).status_code

    async def break_model(self, model: str) -> None:
        self.fake.sick = model
        for _ in range(5):
            problem = json(await self.client.post(f"/predict/{model}", content=SCENE), 503)
            assert problem["code"] == "triton_unavailable"

    async def mend(self, path: str) -> None:
        self.fake.sick = ""

        async def is_mended() -> bool:
            return await self.detect(path) == httpx.codes.OK

        await until(is_mended)

    async def assert_rejected(self, path: str, content_type: str) -> None:
        reply = await post_unread(self.app, path, {"Content-Type": content_type, "Content-Length": "100"})
        assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (503, "circuit_open", "1")


@pytest.fixture
async def breaking() -> AsyncIterator[Breaking]:
    fake = SickTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url))), calling(app) as client:
        yield Breaking(fake, app, client)
        fake.sick = ""


async def test_open_circuit_of_the_default_model_does_not_matter_to_a_body_that_names_another_one(breaking: Breaking) -> None:
    await breaking.break_model("tiny")
    encoded = base64.b64encode(SCENE).decode()
    image = {"type": "base64", "value": encoded}
    for fields, status in (({"model": "other"}, 200), ({}, 503), ({"model": "tiny"}, 503)):
        json(await breaking.client.post("/detect", files={"image": SCENE}, data=fields), status)
        json(await breaking.client.post("/detect", json={"image": encoded, **fields}), status)
        by_id = {"model_id": fields["model"]} if fields else {}
        json(await breaking.client.post("/infer/object_detection", json={**by_id, "image": image}), status)
    for content_type in ("multipart/form-data; boundary=x", "application/json"):
        await breaking.assert_rejected("/v1/detect?model=tiny", content_type)


async def test_callers_can_go_back_from_a_newer_version_that_fails(breaking: Breaking) -> None:
    """Requests without a version once used the circuit of the newest version."""
    assert await breaking.detect("/detect?version=2") == 200
    breaking.fake.model_versions = ["1", "2", "3"]
    await breaking.break_model("tiny")
    await breaking.assert_rejected("/detect", "image/bmp")
    assert [await breaking.detect(path) for path in ("/detect?version=2", "/detect")] == [200, 503]


async def test_readiness_depends_on_the_circuit_of_the_default_model(breaking: Breaking) -> None:
    """A gateway whose default model fails gets no more requests from a load balancer, although Triton says that it is ready."""
    client = breaking.client
    await breaking.break_model("other")
    assert (await client.get("/readyz")).status_code == 200
    await breaking.mend("/predict/other")
    await breaking.break_model("tiny")
    assert json(await client.get("/v1/readyz"), 503) == {"status": "not_ready"}
    report = json(await client.get("/health"), 503)
    assert (report["status"], report["triton"], report["tritons"][0]["status"]) == ("unhealthy", "healthy", "not_ready")
    for path in ("/livez", "/models"):
        assert (await client.get(path)).status_code == 200
    await breaking.mend("/detect")
    assert json(await client.get("/readyz")) == {"status": "ready"}
    assert json(await client.get("/health"))["status"] == "healthy"
