"""What is kept of an image, who may see and delete it; and no route shows or changes anything of another tenant."""

import random
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from app.api.search import routes
from tests.api.search.conftest import OpenGateway, index, key, picture
from tests.fakes.models import scene
from tests.support import json

IMAGE = picture((10, 10, 89, 89), (110, 10, 189, 89))


async def test_image_is_shown_and_deleted(open_gateway: OpenGateway) -> None:
    path = f"/query/image/{quote('Zürich 1')}"
    async with open_gateway(search_thumbnails=True) as client:
        await index(client, "Zürich 1", IMAGE, ["EXIT"], camera=3)
        shown = json(await client.get(f"/v1{path}?include_embedding=true"))
        statistics = json(await client.get("/query/stats"))
        kept = await client.get(f"{path}/thumbnail")
        none = json(await client.get(f"{path}/thumbnail?face_id=x"), 404)["code"]
        deleted = json(await client.delete(path))
        unknown = [json(await client.request(method, path), 404)["code"] for method in ("GET", "DELETE")]

    assert (shown["status"], shown["image_id"], len(shown["global_embedding"])) == ("success", "Zürich 1", 12)
    assert (shown["metadata"]["image_path"], shown["metadata"]["metadata"]) == ("/images/Zürich 1.png", {"camera": 3})
    assert sorted(shown["indexed_in"]) == ["faces", "global", "ocr", "people", "vehicles"]
    numbers = [shown[f"num_{name}"] for name in ("detections", "vehicle_detections", "person_detections", "faces")]
    assert (numbers, shown["has_ocr"], shown["full_text"]) == ([2, 1, 1, 2], True, "EXIT")
    counts = {each["name"]: each["doc_count"] for each in statistics["indexes"]}
    assert counts == {f"visual_search_{name}": 1 for name in ("global", "vehicles", "people", "ocr")} | {"visual_search_faces": 2}
    headers = (kept.headers["content-type"], kept.headers["cache-control"][:7])
    assert (kept.content[:2], headers) == (b"\xff\xd8", ("image/jpeg", "private"))
    assert [none, *unknown] == ["unknown_record"] * 3
    assert (sorted(deleted["deleted_from"]), deleted["total_deleted"]) == (sorted(shown["indexed_in"]), 6)


KEYS = ("reader", "writer", "camera", "feeder")
SCOPES = {
    ("POST", "/ocr/search?text=x"): [200, 403, 403, 403],
    ("GET", "/query/stats"): [200, 403, 403, 403],
    ("DELETE", "/query/image/x"): [403, 404, 403, 404],
    ("POST", "/ingest"): [403, 201, 403, 200],
    ("POST", "/ingest/directory"): [403, 400, 403, 400],
    ("POST", "/embed/image?index=true"): [403, 403, 403, 200],
}
"""Statuses of a key with the scope `search`, `ingest`, `detect`, and both of the last."""


async def test_route_of_search_needs_a_key_with_its_scope(open_gateway: OpenGateway) -> None:
    async with open_gateway(dict(zip(KEYS, ("search", "ingest", "detect", "ingest detect"), strict=True))) as client:
        for (method, path), statuses in SCOPES.items():
            content = IMAGE if path.startswith(("/ingest", "/embed")) else None
            asked = [await client.request(method, path, content=content, headers=key(name)) for name in KEYS]
            assert [answer.headers["x-request-id"] for answer in asked] == [*KEYS]
            assert (path, [answer.status_code for answer in asked]) == (path, statuses)
        foreign = {**key("writer"), "Origin": "https://elsewhere.example"}
        json(await client.delete("/query/image/x", headers=foreign), 403)


TENANTS = ("north", "south")
_BLOCK = 25
"""Requests of one tenant after which is looked at what the other one has."""
Ids = dict[str, list[str]]
"""What a tenant has; nobody else has the same, but for ids of images, of which both use two."""


class Tenant:
    """What one of them asks."""

    def __init__(self, gateway: httpx.AsyncClient, name: str) -> None:
        self._gateway, self.name = gateway, name
        self.ids: Ids = {}

    async def ask(self, method: str, path: str, **given: Any) -> httpx.Response:  # noqa: ANN401 - as httpx
        return await self._gateway.request(method, path, headers=key(self.name), **given)

    async def fill(self, folder: Path) -> None:
        """Add pictures, some with ids and all with contents that the other tenant has, too; and all that is made of them."""
        images = ["same-0", "same-1", *(f"{'one' if self.name == 'north' else 'two'}-{number}" for number in range(3))]
        for number, image_id in enumerate(images):
            data = {"image_id": image_id, "image_path": f"/{self.name}/{image_id}", "metadata": f'{{"of": "house {self.name}"}}'}
            json(await self.ask("POST", "/ingest", files={"image": scene("PNG", f"#fff{number:x}ff")}, data=data), 201)
        userid = {"userid": f"Ada of {self.name}"}
        json(await self.ask("POST", "/v1/vision/face/register", files={"image": scene("PNG", "#ffffee")}, data=userid))
        job = json(await self.ask("POST", "/ingest/directory", params={"directory": str(folder)}), 201)
        found = json(await self.ask("POST", "/faces/search?min_score=0&top_k=200", files={"image": scene("PNG")}))
        self.ids = {"image_id": images, "job_id": [job["job_id"]], "face_id": [face["face_id"] for face in found["results"]]}
        self.ids["group_id"] = [one["group_id"] for one in json(await self.ask("GET", "/query/duplicates"))["groups"]]
        assert all(self.ids.values())

    async def everything(self) -> Any:  # noqa: ANN401 - JSON
        """Return all that this tenant has, without times."""
        paths = ["/query/stats", "/query/duplicates", "/ingest/jobs"]
        paths += [f"/query/image/{image_id}?include_embedding=true" for image_id in self.ids["image_id"]]
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
    anything = [*chain(*own.values(), *other.values(), *other.values())]
    picture = scene("PNG", f"#fff{source.randrange(16):x}ff")
    text = {"text": source.choice(["r", "north", "south", "of"]), "fuzzy": source.choice(["true", "false"])}
    filters = {"metadata": source.choice(["{}", '{"of": "house north"}', '{"of": "house south"}'])}
    values = {name: source.choice(other[name] * 2 + own[name]) for name in own}
    ids = {name: source.choice(anything) if source.random() < 0.3 else value for name, value in values.items()}
    bodies: dict[str, dict[str, Any]] = {
        "/query/image/{image_id}/thumbnail": {"params": {"face_id": values["face_id"]}},
        "/ingest": {"files": {"image": picture}, "data": {"image_id": values["image_id"]}},
        "/ingest/batch": {"files": [("images", picture)]},
    }
    made = []
    for route in (*routes.MODEL_ROUTES, *routes.ROUTES):
        for path in sorted(template.replace(":str}", "}") for template in route.paths):
            if path.startswith(("/ingest/directory", "/search/reindex")):  # they take long, and belong to the tenant anyway
                continue
            given = bodies.get(path, {})
            if not given and route.http_methods == {"POST"} and path.startswith(("/search", "/faces", "/ocr")):
                given = {"json": text} if "text" in path or "ocr" in path else {"files": {"image": picture}, "data": filters}
            made += [(str(method), path.format(**ids), given) for method in sorted(route.http_methods - {"OPTIONS", "HEAD"})]
    return made


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=[pytest.mark.system, pytest.mark.timeout(900)])])
async def test_no_route_tells_or_changes_anything_of_another_tenant(open_gateway: OpenGateway, tmp_path: Path, count: int) -> None:
    (folder := tmp_path / "pictures").mkdir()
    source = random.Random(count)  # noqa: S311 - not a secret
    statuses: list[int] = []
    async with open_gateway(dict.fromkeys(TENANTS, "detect search ingest admin"), tenants=TENANTS) as gateway:
        tenants = [Tenant(gateway, name) for name in TENANTS]
        for tenant in tenants:
            await tenant.fill(folder)
        for _ in range(count // _BLOCK):
            asking, other = source.sample(tenants, 2)
            own_ids = chain(*(ids for name, ids in other.ids.items() if name != "image_id"))
            secrets = [f"/{other.name}/", f"house {other.name}", f"Ada of {other.name}", *own_ids]
            before = await other.everything()
            for _ in range(_BLOCK):
                method, path, given = source.choice(requests(source, asking.ids, other.ids))
                answer = await asking.ask(method, path, **given)
                statuses.append(answer.status_code)
                sent = f"{path} {given}"
                told = [secret for secret in secrets if secret in answer.text and (answer.status_code < 400 or secret not in sent)]
                assert not told, (method, path, answer.text)
            assert await other.everything() == before
    assert max(statuses) < 500
    assert min(statuses.count(404), sum(status < 300 for status in statuses)) > count / 10
