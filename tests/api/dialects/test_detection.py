"""What a dialect shares with the gateway's own routes: what rejects a request before its body is read, keys, and the log."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.api.admission import middleware
from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, calling, captured_log, json, lifespan_of, started

SECRET = "not-a-secret"  # noqa: S105 - it protects nothing
PATH = "/v1/vision/detection"


async def test_the_log_has_what_it_has_of_other_requests(
    gateway: tuple[FakeTriton, httpx.AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, middleware)
    await gateway[1].post("/v1/vision/custom/tiny", files={"image": b"this is no image"})
    line = log[-1].kwargs

    assert (line["route"], line["model"], line["status"]) == ("/deepstack/v1/vision/custom/{model}", "tiny", 400)
    assert line["code"] == "unsupported_format"


async def test_without_a_dialect_its_paths_do_not_exist() -> None:
    fake = FakeTriton()
    async with serving(fake), started(create_app(settings_for(fake.url, dialects="none"))) as client:
        for path in (PATH, f"/deepstack{PATH}"):
            assert json(await client.post(path, content=SCENE), 404)["code"] == "not_found"


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = write_keys(tmp_path, *((id_, SECRET, scope) for id_, scope in KEYS))
    fake = FakeTriton()
    async with serving(fake), lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=file))), calling(app) as client:
        yield client


KEYS = (("camera", "detect"), ("monitor", "health"))
BASIC = "Basic " + base64.b64encode(f"camera:{SECRET}".encode()).decode()


@pytest.mark.parametrize(
    ("headers", "query", "in_body", "status"),
    [
        ({}, "", None, 401),
        ({}, "", "", 401),
        ({"Authorization": f"Bearer camera.{SECRET}"}, "", "", 400),
        ({"Authorization": BASIC}, "", "", 400),
        ({"Authorization": "Basic camera"}, "", "", 401),
        ({"Authorization": "Basic %%%"}, "", "", 401),
        ({"X-API-Key": f"camera.{SECRET}"}, "", "", 400),
        ({}, f"?api_key=camera.{SECRET}", None, 400),
        ({}, f"?api_key=camera.{SECRET}", "", 400),
        ({}, "?api_key=camera.wrong", f"camera.{SECRET}", 401),
        ({}, "", f"camera.{SECRET}", 400),
        ({}, "?api_key=", f"camera.{SECRET}", 400),
        ({}, "?api_key=", "", 401),
        ({}, "", "camera.wrong", 401),
        ({}, "", "\N{SNOWMAN}", 401),
        ({}, "", f"monitor.{SECRET}", 403),
        ({"X-API-Key": "camera.wrong"}, "", f"camera.{SECRET}", 401),
        ({"Authorization": f"Bearer camera.{SECRET}"}, "", "camera.wrong", 400),
        ({"Authorization": f"Bearer camera.{SECRET}", "X-API-Key": f"camera.{SECRET}"}, "", "", 401),
    ],
)
async def test_a_key_may_be_in_a_header_the_query_or_the_body(
    guarded: httpx.AsyncClient, headers: dict[str, str], query: str, in_body: str | None, status: int
) -> None:
    """400 is for the image, only read once the key is known to be valid."""
    fields = {} if in_body is None else {"api_key": in_body}
    response = await guarded.post(PATH + query, files={"image": b"this is no image"}, data=fields, headers=headers)

    assert response.status_code == status, response.text
    assert response.json()["success"] is False
    assert status == 401 or "api_key" not in response.text


async def test_a_list_takes_the_key_of_a_form(guarded: httpx.AsyncClient) -> None:
    """Clients of this service send the key in a form that has no other field."""
    path, others = "/v1/vision/custom/list", {"unused": (None, "")}
    for credential, status in ((f"camera.{SECRET}", 200), ("camera.wrong", 401)):
        for form in ({"data": {"api_key": credential}}, {"data": {"api_key": credential}, "files": others}):
            assert (await guarded.post(path, **form)).status_code == status

    async def chunks() -> AsyncIterator[bytes]:
        yield f"api_key=camera.{SECRET}".encode()

    chunked = await guarded.post(path, content=chunks(), headers={"Content-Type": "application/x-www-form-urlencoded"})
    assert chunked.status_code == 200
    assert (await guarded.post(path)).status_code == 401
    assert (await guarded.get(f"{path}?api_key=camera.{SECRET}")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", PATH, 405), ("GET", "/deepstack/nothing", 404), ("PUT", f"/deepstack{PATH}", 405), ("GET", "/v1/vision/scene", 404)],
)
async def test_an_unknown_path_or_method_is_an_error_of_the_dialect(
    gateway: tuple[FakeTriton, httpx.AsyncClient], method: str, path: str, status: int
) -> None:
    response = await gateway[1].request(method, path)

    assert response.status_code == status
    assert ("success" in response.json()) == (path != "/v1/vision/scene")
