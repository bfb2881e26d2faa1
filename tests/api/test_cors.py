"""Pages of listed origins may call the API and read its responses; those of others may not, and nobody's may change models."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.application import Application
from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, call, calling, chunk, lifespan_of, started, staying

ORIGIN = "https://app.example.org"
ADMIN, CAMERA = ({"X-API-Key": f"{id_}.secret"} for id_ in ("boss", "camera"))


def keys_in(folder: Path) -> str:
    return write_keys(folder, ("boss", "secret", "admin"), ("camera", "secret", "detect"))


@pytest.fixture(scope="module")
async def app(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    """An application with keys that allows the pages of two origins, and whose Triton finds nothing."""
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    keys, allowed = keys_in(tmp_path_factory.mktemp("keys")), f"http://localhost:3000, {ORIGIN.upper()}"
    settings = {"api_keys_file": keys, "cors_origins": allowed, "max_file_size_mb": 1}
    async with serving(fake), lifespan_of(made := create_app(settings_for(fake.url, **settings))):
        yield made


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with calling(app) as made:
        made.headers["Origin"] = ORIGIN
        yield made


async def preflight(client: httpx.AsyncClient, method: str, path: str, origin: str = ORIGIN) -> httpx.Response:
    return await client.options(path, headers={"Origin": origin, "Access-Control-Request-Method": method})


def of_cors(response: httpx.Response) -> list[str]:
    return [name for name in response.headers if name.startswith("access-control-")]


async def test_preflight_request_needs_no_key(client: httpx.AsyncClient) -> None:
    """The browser sends none with it; also for unknown paths, so that the page can read the 404."""
    for path in ("/v1/predict/tiny?confidence=0.5", "/" + "x" * 2000):
        response = await preflight(client, "POST", path)
        assert (response.status_code, response.content) == (204, b"")
        assert int(response.headers["access-control-max-age"]) > 0
        names = ("allow-origin", "allow-methods", "allow-headers", "allow-credentials")
        allowed = [ORIGIN, "GET, HEAD, POST", "*, Authorization", None]
        assert [response.headers.get(f"access-control-{name}") for name in names] == allowed
        assert "Origin" in response.headers.get_list("vary")


async def test_no_page_of_another_origin_changes_models(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", "/v1/models/doors"), ("DELETE", "/models/doors"), ("PUT", "/routes/a")):
        asked = await preflight(client, method, path)
        response = await client.request(method, path, headers=ADMIN)
        assert (asked.status_code, response.status_code) == (204, 403)
        assert of_cors(asked) == of_cors(response) == []


async def test_pages_of_other_origins_read_nothing(client: httpx.AsyncClient) -> None:
    for origin in (f"{ORIGIN}:8443", f"{ORIGIN}.example.com", ORIGIN.replace("https", "http"), "null"):
        headers = {**CAMERA, "Origin": origin}
        for response in (await preflight(client, "POST", "/detect", origin), await client.get("/models", headers=headers)):
            assert of_cors(response) == []
            assert "Origin" in response.headers.get_list("vary")


def assert_readable(headers: Any) -> None:  # noqa: ANN401
    assert headers["access-control-allow-origin"] == ORIGIN
    assert headers["access-control-expose-headers"] == "Retry-After, Server-Timing, X-Cache, X-Process-Time, X-Request-ID"


async def test_page_reads_responses_and_errors(client: httpx.AsyncClient) -> None:
    for method, path, headers, content, status in (
        ("POST", "/detect", CAMERA, SCENE, 200),
        ("POST", "/v1/vision/detection", {}, SCENE, 401),
        ("POST", "/detect", CAMERA, bytes(2**20 + 1), 413),
        ("POST", "/" + "x" * 2000, {}, b"", 400),
    ):
        response = await client.request(method, path, headers=headers, content=content)
        assert response.status_code == status
        assert_readable(response.headers)
        assert "Origin" in response.headers.get_list("vary")
    assert (await client.get("/")).headers.get_list("vary") == ["Accept", "Origin"]


async def test_page_reads_that_its_body_is_too_slow() -> None:
    """Although Litestar is not called then."""
    async with lifespan_of(app := create_app(settings_for("127.0.0.1:1", cors_origins=ORIGIN, body_seconds=0.05))):
        slow = await call(app, staying(chunk(SCENE[:10], more=True)), "/detect", {"Origin": ORIGIN})
    assert slow.status == 408
    assert_readable(slow.headers)


async def test_every_page_can_be_allowed_and_none_is_by_default(tmp_path: Path, reader: httpx.AsyncClient) -> None:
    async with started(create_app(settings_for("127.0.0.1:1", api_keys_file=keys_in(tmp_path), cors_origins="*"))) as client:
        for response in (await preflight(client, "POST", "/detect"), await client.get("/livez", headers={"Origin": "null"})):
            assert response.headers["access-control-allow-origin"] == "*"
            assert "vary" not in response.headers
        assert of_cors(await preflight(client, "POST", "/models/doors")) == of_cors(await client.get("/livez")) == []
    asked = await preflight(reader, "POST", "/detect")
    for response in (asked, await reader.get("/livez", headers={"Origin": ORIGIN})):
        assert of_cors(response) == []
        assert "vary" not in response.headers
    assert asked.headers["allow"] == "OPTIONS, POST"
