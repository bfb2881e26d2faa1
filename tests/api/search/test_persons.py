"""Persons, over HTTP: found in faces, named, merged and deleted."""

from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from app.embedded.server import EmbeddedTriton
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.search.made import like, searching, with_faces
from tests.support import json

Gateway = tuple[PostgresEngine, httpx.AsyncClient]


@pytest.fixture
async def gateway(settings: Settings, triton: EmbeddedTriton, database: str) -> AsyncIterator[Gateway]:
    """Two images with three faces of one, two of another and one of a third."""
    assert triton.poll() is None
    async with searching(settings, database) as (engine, client):
        await engine.add("", with_faces("one", like(0), like(3), like(6)))
        await engine.add("", with_faces("two", like(0, 0.1), like(3, 0.1), like(0, 0.2)))
        yield engine, client


async def persons(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    found: list[dict[str, Any]] = json(await client.get("/persons", params=query))["persons"]
    return found


async def test_faces_become_persons(gateway: Gateway) -> None:
    """A second time, nothing is left to do; a stricter threshold or more faces find fewer."""
    _, client = gateway
    few = json(await client.post("/persons/cluster?min_faces_per_person=3&similarity_threshold=0.95"))
    found = json(await client.post("/v1/persons/cluster"))
    again = json(await client.post("/persons/cluster"))
    listed = await persons(client)

    assert few == {
        "status": "success",
        "total_faces": 6,
        "persons_created": 0,
        "faces_assigned": 0,
        "singletons": 6,
        "similarity_threshold": 0.95,
    }
    assert (found["persons_created"], found["faces_assigned"], found["singletons"]) == (2, 5, 1)
    assert (again["persons_created"], again["faces_assigned"], again["singletons"]) == (0, 0, 1)
    assert [person["face_count"] for person in listed] == [3, 2]
    assert listed[0].keys() == {"person_id", "person_name", "face_count", "reference_face_id", "reference_thumbnail"}
    assert (await persons(client, page=1, limit=1), await persons(client, page=2)) == (listed[1:], [])


async def test_a_person_has_a_name_and_faces(gateway: Gateway) -> None:
    engine, client = gateway
    await client.post("/persons/cluster")
    person_id = (await persons(client))[0]["person_id"]
    named = json(await client.put(f"/persons/{person_id}/name", json={"name": "Zoë \N{ZERO WIDTH NON-JOINER}Ω"}))
    person = json(await client.get(f"/persons/{person_id}"))
    await engine.add("", with_faces("three", like(0, 0.3)))
    await client.post("/persons/cluster")

    assert named == {
        "status": "success",
        "person_id": person_id,
        "faces_updated": 3,
        "person_name": "Zoë \N{ZERO WIDTH NON-JOINER}Ω",
    }
    assert (person["person_name"], person["face_count"]) == (named["person_name"], 3)
    assert sorted(face["image_id"] for face in person["faces"]) == ["one", "two", "two"]
    assert [face["is_reference"] for face in person["faces"]] == [True, False, False]
    assert person["faces"][0].keys() == {"face_id", "image_id", "image_path", "box", "confidence", "is_reference"}
    assert json(await client.get(f"/persons/{person_id}"))["face_count"] == 4


async def test_persons_are_merged_and_deleted(gateway: Gateway) -> None:
    """Their faces go with them, or then belong to nobody."""
    _, client = gateway
    await client.post("/persons/cluster")
    target, source = [person["person_id"] for person in await persons(client)]
    both = {"source_person_id": source, "target_person_id": target}
    merged = json(await client.post("/persons/merge", json=both))
    freed = json(await client.delete(f"/persons/{target}"))
    await client.post("/persons/cluster")
    others = [person["person_id"] for person in await persons(client)]
    deleted = json(await client.delete(f"/persons/{others[0]}?delete_faces=true"))

    assert merged == {"status": "success", **both, "faces_merged": 2}
    assert freed == {"status": "success", "person_id": target, "faces_deleted": None, "faces_unassigned": 5}
    assert json(await client.get(f"/persons/{source}"), 404)["code"] == "unknown_record"
    assert (len(others), deleted["faces_deleted"], deleted["faces_unassigned"]) == (2, 3, None)
    assert json(await client.post("/persons/cluster"))["total_faces"] == 3


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/persons/cluster?similarity_threshold=nan", None, 400),
        ("POST", "/persons/cluster?similarity_threshold=0.2", None, 400),
        ("POST", "/persons/cluster?min_faces_per_person=0", None, 400),
        ("GET", "/persons?limit=1001", None, 400),
        ("GET", "/persons?page=99999999999999999999", None, 400),
        ("GET", "/persons/%00", None, 404),
        ("GET", "/persons/'%20OR%201=1", None, 404),
        ("GET", f"/persons/{'a' * 65}", None, 400),
        ("DELETE", "/persons/nobody", None, 404),
        ("PUT", "/persons/nobody/name", {"name": "Anna"}, 404),
        ("PUT", "/persons/nobody/name", {"name": ""}, 400),
        ("PUT", "/persons/nobody/name", {"name": " "}, 400),
        ("PUT", "/persons/nobody/name", {"name": "a\0"}, 400),
        ("PUT", "/persons/nobody/name", {"name": "a" * 129}, 400),
        ("PUT", "/persons/nobody/name", {"name": 7}, 400),
        ("PUT", "/persons/nobody/name", [], 400),
        ("POST", "/persons/merge", {"source_person_id": "a", "target_person_id": "a"}, 400),
        ("POST", "/persons/merge", {"source_person_id": "a", "target_person_id": "b"}, 404),
        ("POST", "/persons/merge", {"source_person_id": "a"}, 400),
    ],
)
async def test_what_cannot_be_done_is_said(shared: httpx.AsyncClient, method: str, path: str, body: object, status: int) -> None:
    problem = json(await shared.request(method, path, json=body), status)

    assert problem["detail"]


@pytest.fixture(scope="module")
async def shared(settings: Settings, triton: EmbeddedTriton, postgres: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401
    assert triton.poll() is None
    async with postgres.fresh() as url, searching(settings, url) as (_, client):
        yield client


async def test_who_may_change_persons(settings: Settings, triton: EmbeddedTriton, database: str, tmp_path: Path) -> None:
    """A key with the scope `admin`, those of its tenant, and no page of another origin."""
    assert triton.poll() is None
    file = write_keys(tmp_path, ("boss", "secret", "admin search"), ("eye", "secret", "search"), tenants={"boss": "north"})
    boss, eye = {"X-API-Key": "boss.secret"}, {"X-API-Key": "eye.secret"}
    async with searching(settings, database, api_keys_file=file) as (engine, client):
        for tenant in ("north", ""):
            await engine.add(tenant, with_faces("one", like(0), like(0, 0.1)))
        assert json(await client.post("/persons/cluster", headers=eye), 403)["code"] == "forbidden"
        assert json(await client.post("/persons/cluster", headers=boss | {"Origin": "https://example.org"}), 403)
        assert json(await client.post("/persons/cluster", headers=boss))["persons_created"] == 1
        assert len(json(await client.get("/persons", headers=boss))["persons"]) == 1
        assert json(await client.get("/persons", headers=eye))["persons"] == []


async def test_a_reference_has_its_thumbnail(gateway: Gateway) -> None:
    engine, client = gateway
    new = with_faces("four", like(9), like(9, 0.1))
    new.faces = [msgspec.structs.replace(face, thumbnail=b"a JPEG", person_name="Nora") for face in new.faces]
    await engine.add("", new)
    (nora,) = await persons(client)

    assert (nora["person_name"], b64decode(nora["reference_thumbnail"])) == ("Nora", b"a JPEG")
