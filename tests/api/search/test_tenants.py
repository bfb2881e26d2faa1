"""Two keys with a tenant each: with the ids of the other one, no route shows or changes anything of it."""

import hashlib
import random
from collections.abc import AsyncIterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

from app.api.search import routes
from app.settings.schema import Settings
from tests.fakes.models import scene
from tests.search.made import gateway_of
from tests.support import json

TENANTS = ("north", "south")
_BLOCK = 25
"""Requests of one tenant after which is looked at what the other one has."""
OF_BOTH = ["same-0", "same-1"]
"""Ids that both tenants use."""


class Ids(NamedTuple):
    """Ids of what a tenant has; nobody else has the same, but for those of images."""

    images: list[str]
    faces: list[str]
    groups: list[str]
    jobs: list[str]

    def all(self) -> list[str]:
        return [*chain(*self)]


@pytest.fixture
async def gateway(search_settings: Settings, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    keys = tmp_path / "keys.toml"
    secret = hashlib.sha256(b"secret").hexdigest()
    scopes = '["detect", "search", "ingest", "admin"]'
    keys.write_text("".join(f'[{name}]\nsha256 = ["{secret}"]\nscopes = {scopes}\ntenant = "{name}"\n' for name in TENANTS))
    async with gateway_of(msgspec.structs.replace(search_settings, api_keys_file=str(keys))) as client:
        yield client


class Tenant:
    """What one of them asks."""

    def __init__(self, gateway: httpx.AsyncClient, name: str) -> None:
        self._gateway, self.name = gateway, name

    async def ask(self, method: str, path: str, **given: Any) -> httpx.Response:  # noqa: ANN401 - as httpx
        return await self._gateway.request(method, path, headers={"X-API-Key": f"{self.name}.secret"}, **given)

    async def get(self, path: str) -> Any:  # noqa: ANN401 - JSON
        return json(await self.ask("GET", path))

    async def add(self, image_id: str, picture: bytes) -> None:
        data = {"image_id": image_id, "image_path": f"/{self.name}/{image_id}", "metadata": f'{{"of": "house {self.name}"}}'}
        json(await self.ask("POST", "/ingest", files={"image": picture}, data=data), 201)

    async def fill(self, folder: Path) -> Ids:
        """Add pictures, some with ids and all with contents that the other tenant has, too; and all that is made of them."""
        images = [*OF_BOTH, *(f"{'one' if self.name == 'north' else 'two'}-{number}" for number in range(3))]
        for number, image_id in enumerate(images):
            await self.add(image_id, scene("PNG", f"#fff{number:x}ff"))
        userid = {"userid": f"Ada of {self.name}"}
        json(await self.ask("POST", "/v1/vision/face/register", files={"image": scene("PNG", "#ffffee")}, data=userid))
        job = json(await self.ask("POST", "/ingest/directory", params={"directory": str(folder)}), 201)
        found = json(await self.ask("POST", "/faces/search?min_score=0&top_k=200", files={"image": scene("PNG")}))
        faces = [face["face_id"] for face in found["results"]]
        groups = [one["group_id"] for one in (await self.get("/query/duplicates"))["groups"]]
        assert min(map(len, (faces, groups))) > 0
        return Ids(images, faces, groups, [job["job_id"]])

    async def everything(self, ids: Ids) -> Any:  # noqa: ANN401 - JSON
        """Return all that this tenant has, without times."""
        paths = ["/query/stats", "/query/duplicates", "/ingest/jobs"]
        paths += [f"/query/image/{image_id}?include_embedding=true" for image_id in ids.images]
        found = [await self.ask("GET", path) for path in paths]
        return [(path, one.status_code, _without_sizes(one.json())) for path, one in zip(paths, found, strict=True)]


def _without_sizes(answer: Any) -> Any:  # noqa: ANN401 - JSON
    """Leave out the sizes of indexes, which are those of all tenants, and what is said of a request."""
    if isinstance(answer, dict):
        left_out = ("size", "request_id", "total_time", "total_size")
        return {name: _without_sizes(value) for name, value in answer.items() if not name.startswith(left_out)}
    return [_without_sizes(one) for one in answer] if isinstance(answer, list) else answer


def requests(source: random.Random, own: Ids, other: Ids) -> list[tuple[str, str, dict[str, Any]]]:
    """Return a request to each route, with ids of which most are the other tenant's."""
    ids = Ids(*(others + others + mine for others, mine in zip(other, own, strict=True)))
    anything = [*own.all(), *other.all(), *other.all()]
    picture = scene("PNG", f"#fff{source.randrange(16):x}ff")
    text = {"text": source.choice(["r", "north", "south", "of"]), "fuzzy": source.choice(["true", "false"])}
    filters = {"metadata": source.choice(["{}", '{"of": "house north"}', '{"of": "house south"}'])}
    values = {
        "image_id": source.choice(ids.images),
        "group_id": source.choice(ids.groups),
        "job_id": source.choice(ids.jobs),
    }
    values |= {name: source.choice(anything) for name in values if name.endswith("_id") and source.random() < 0.3}
    bodies: dict[str, dict[str, Any]] = {
        "/query/image/{image_id}/thumbnail": {"params": {"face_id": source.choice(ids.faces)}},
        "/ingest": {"files": {"image": picture}, "data": {"image_id": source.choice(ids.images)}},
        "/ingest/batch": {"files": [("images", picture)]},
    }
    made = []
    for route in (*routes.MODEL_ROUTES, *routes.ROUTES):
        for template in sorted(route.paths):
            path = template.replace(":str}", "}")
            if path in {"/ingest/directory", "/search/reindex"}:  # they take long, and belong to the tenant anyway
                continue
            given = bodies.get(path, {})
            if not given and route.http_methods == {"POST"} and path.startswith(("/search", "/faces", "/ocr")):
                given = {"json": text} if "text" in path or "ocr" in path else {"files": {"image": picture}, "data": filters}
            methods = sorted(route.http_methods - {"OPTIONS", "HEAD"})
            made += [(str(method), path.format(**values), given) for method in methods]
    return made


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=[pytest.mark.system, pytest.mark.timeout(900)])])
async def test_no_route_tells_or_changes_anything_of_another_tenant(gateway: httpx.AsyncClient, tmp_path: Path, count: int) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    tenants = {name: Tenant(gateway, name) for name in TENANTS}
    ids = {name: await tenant.fill(folder) for name, tenant in tenants.items()}
    source = random.Random(count)  # noqa: S311 - not a secret
    statuses: list[int] = []
    for _ in range(count // _BLOCK):
        name, other = source.sample(TENANTS, 2)
        secrets = [f"/{other}/", f"house {other}", f"Ada of {other}", *chain(*ids[other][1:])]
        before = await tenants[other].everything(ids[other])
        for _ in range(_BLOCK):
            method, path, given = source.choice(requests(source, ids[name], ids[other]))
            answer = await tenants[name].ask(method, path, **given)
            statuses.append(answer.status_code)
            sent = f"{path} {given}"
            told = [secret for secret in secrets if secret in answer.text and (answer.status_code < 400 or secret not in sent)]
            assert not told, (method, path, answer.text)
        assert await tenants[other].everything(ids[other]) == before
    assert max(statuses) < 500
    assert min(statuses.count(404), sum(status < 300 for status in statuses)) > count / 10
