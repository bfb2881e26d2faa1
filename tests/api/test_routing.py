"""Names of routes are accepted wherever names of models are, and callers with the scope `admin` change them over HTTP."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from app.main import create_app
from tests.api.conftest import ADMIN, CAMERA, settings_for, write_keys
from tests.fakes.triton import CONFIG, serving
from tests.routing.test_router import Versions
from tests.support import SCENE, calling, eventually, json, lifespan_of, read_samples, started, until

ROUTE = {"to": "tiny:2", "canary": {"to": "tiny:3", "share": 0.5}, "fallback": "tiny:1"}


class WithClassifier(Versions):
    def __init__(self) -> None:
        super().__init__()
        self.index = [("tiny", "1", "READY", ""), ("kinds", "1", "READY", "")]
        self.missing = {"detector", "first", "other", "gate"}

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        kinds = {"output": [{"name": "scores", "data_type": "TYPE_FP32", "dims": [5]}]}
        self.config = CONFIG | kinds if request.name == "kinds" else CONFIG
        return await super().ModelConfig(request, context)


class Service(NamedTuple):
    fake: WithClassifier
    client: httpx.AsyncClient
    file: Path
    settings: Any

    async def put(self, route: Any, name: str = "detector") -> httpx.Response:  # noqa: ANN401
        return await self.client.put(f"/routes/{name}", json=route, headers=ADMIN)


@pytest.fixture(scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    fake, folder = WithClassifier(), tmp_path_factory.mktemp("routes")
    async with serving(fake):
        keys = write_keys(folder, ("boss", "secret", "admin health"), ("camera", "secret", "detect"))
        settings = settings_for(fake.url, routes_file=str(folder / "routes.toml"), api_keys_file=keys)
        async with lifespan_of(app := create_app(settings)), calling(app) as client:
            yield Service(fake, client, folder / "routes.toml", settings)


@pytest.fixture
async def service(running: Service) -> Service:
    """One without routes."""
    running.file.write_text("# none\n")
    await running.client.delete("/routes/detector", headers=ADMIN)  # so that the file is read again at once
    running.fake.requests.clear()
    return running


async def test_route_is_written_listed_and_removed(service: Service) -> None:
    assert json(await service.put(ROUTE)) == ROUTE
    assert json(await service.put({"to": "tiny"}, "other")) == {"to": "tiny"}
    assert json(await service.client.get("/v1/routes", headers=CAMERA)) == {"detector": ROUTE, "other": {"to": "tiny"}}
    assert '\n[detector.canary]\nto = "tiny:3"\nshare = 0.5\n' in service.file.read_text()
    assert (await service.client.delete("/routes/other", headers=ADMIN)).status_code == 204

    assert json(await service.client.get("/routes", headers=CAMERA)) == {"detector": ROUTE}
    assert "there is no route 'other'" in json(await service.client.delete("/routes/other", headers=ADMIN), 404)["detail"]
    answer = await service.client.post("/models/detector", content=b"network", headers=ADMIN)
    assert json(answer, 422)["detail"] == "detector is a route; give the model another name"


async def test_route_that_is_not_valid_is_refused(service: Service) -> None:
    await service.put({"to": "tiny"}, "first")
    routes: list[tuple[str, dict[str, Any], str]] = [
        ("detector", {"to": "tiny", "weight": 1}, "unknown field `weight`"),
        ("detector", {"to": "tiny", "fallback": "tiny:7"}, "fallback: tiny has no version 7"),
        ("detector", {"to": "tiny", "shadow": {"to": "kinds", "share": 1}}, "the models of a route have one task"),
        ("other", {"to": "first"}, "first is a route, not a model"),
        ("tiny", {"to": "tiny:2"}, "tiny is a model"),
        ("a%20route", {"to": "tiny:2"}, "matching regex"),
    ]
    for name, route, said in routes:
        assert said in json(await service.put(route, name), 400)["detail"]
    assert json(await service.client.get("/routes", headers=CAMERA)) == {"first": {"to": "tiny"}}


async def test_callers_without_the_scope_admin_change_no_route(service: Service) -> None:
    """Nor do pages of another origin."""
    await service.put(ROUTE)
    for method in ("PUT", "DELETE"):
        for headers in (CAMERA, {**ADMIN, "Origin": "https://example.org"}):
            answer = await service.client.request(method, "/routes/detector", json={"to": "tiny"}, headers=headers)
            assert answer.status_code == 403
    assert (await service.client.request("PUT", "/routes/detector", json={"to": "tiny"})).status_code == 401
    assert json(await service.client.get("/routes", headers=CAMERA)) == {"detector": ROUTE}


async def test_route_is_named_like_a_model(service: Service) -> None:
    await service.put({"to": "tiny:2"})
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/predict/detector", {"content": SCENE}),
        ("/detect", {"files": {"file": SCENE, "model": (None, "detector")}}),
        ("/detect/batch?model=detector", {"files": [("images", SCENE), ("images", SCENE)]}),
        ("/deepstack/v1/vision/custom/detector", {"files": {"image": SCENE}}),
        ("/roboflow/detector/1", {"files": {"file": SCENE}}),
    ]
    for path, options in requests:
        service.fake.requests.clear()
        json(await service.client.post(path, headers=CAMERA, **options))
        assert {request.model_version for request in service.fake.requests} == {"1" if path.endswith("/1") else "2"}


async def test_default_model_may_be_a_route_and_without_a_file_there_are_none(service: Service) -> None:
    await service.put({"to": "tiny:2"})
    settings = settings_for(service.fake.url, routes_file=str(service.file), model="detector")
    async with started(create_app(settings)) as client:
        for path in ("/readyz", "/health"):
            assert (await client.get(path)).status_code == 200
        assert json(await client.post("/detect", content=SCENE))["model"]["version"] == "2"
    async with started(create_app(msgspec.structs.replace(service.settings, routes_file=""))) as client:
        answer = await client.put("/routes/detector", json=ROUTE, headers=ADMIN)
        assert "NEREID_ROUTES_FILE" in json(answer, 501)["detail"]


async def test_answer_does_not_wait_for_the_shadow_whose_folder_only_the_operator_chooses(service: Service) -> None:
    fake, client, file, _ = service
    folder = str(file.parent)
    await service.put({"to": "tiny:2"})
    file.write_text(f'[detector]\nto = "tiny:2"\nshadow = {{to = "tiny:3", share = 1.0, keep = "{folder}"}}\n')
    await client.delete("/routes/nothing", headers=ADMIN)  # so that the file is read again at once
    fake.held = {"first-shadow"}
    fake.may_answer.clear()
    answer = await client.post("/detect?model=detector", content=SCENE, headers={"X-Request-Id": "first", **CAMERA})

    assert json(answer)["model"]["version"] == "2"
    await eventually(lambda: [request.id for request in fake.requests][-2:] == ["first", "first-shadow"])
    fake.may_answer.set()
    fake.held = None

    async def is_compared() -> bool:
        samples = read_samples((await client.get("/metrics", headers=ADMIN)).text)
        return any(name.startswith("api_shadow_images_total") and 'result="compared"' in name for name in samples)

    await until(is_compared)
    (route,) = json(await client.get("/routes", headers=CAMERA)).values()
    assert "keep" not in route["shadow"]
    route["shadow"]["share"] = 0.5
    assert json(await service.put(route)) == route
    assert f'keep = "{folder}"' in file.read_text()
    route["shadow"]["keep"] = folder
    for name in ("detector", "gate"):
        assert "only be named in the routes file" in json(await service.put(route, name), 400)["detail"]
