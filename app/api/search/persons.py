"""/persons: who has which faces."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
from litestar import delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.params import JSONBody, QueryParameter
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.admin import alone
from app.api.context import context_of
from app.api.dependencies import Worker, WorkerResources
from app.api.search.asking import CHANGES, AnyRequest, Document, Flag, PageNumber, RecordId, ask, call_of, pick, reply, show
from app.api.sight.faces import require_faces
from app.embedding.outputs import cosine_at
from app.errors import GatewayFull, InvalidParameter
from app.search.engine import Page, SearchEngine
from app.search.persons import PersonName, group_faces

_Id = Annotated[str, Meta(max_length=64)]
_PERSON = {"person_id": "person_id", "person_name": "name", "face_count": "face_count"}
_REFERENCE = {"reference_face_id": "reference_face_id", "reference_thumbnail": "thumbnail"}
_FACE = {"face_id": "part_id", "image_id": "image_id", "image_path": "path", "box": "box", "confidence": "part_score"}


class Name(msgspec.Struct, frozen=True):
    """The new name of somebody."""

    name: PersonName


class Merge(msgspec.Struct, frozen=True):
    """Two persons who are the same."""

    source_person_id: _Id
    target_person_id: _Id


@contextmanager
def alone_in_search(request: AnyRequest, worker: WorkerResources) -> Iterator[tuple[SearchEngine, str]]:
    """Return the engine and the tenant, for what takes a core for seconds; raise GatewayFull while another request does."""
    with alone(worker, "clusters of search", GatewayFull("another request finds clusters or persons now", "requests", 10)):
        yield worker.require_search().database.engine, context_of(request.scope).tenant


@post("/persons/cluster", summary="Find out which faces are those of one person", **CHANGES)
async def cluster_persons(
    request: AnyRequest,
    worker: Worker,
    similarity_threshold: Annotated[float, QueryParameter(ge=0.5, le=1, description="As of `/faces/verify`.")] = 0.7,
    min_faces_per_person: Annotated[int, QueryParameter(ge=1, le=100, description="Fewer make no new person.")] = 2,
) -> Document:
    """Assign the faces that belong to nobody (`faces_assigned`) to persons whose faces are like them, or to new ones.

    Persons keep their ids and faces. Those without a name are merged if their faces are alike; two who have names never are.
    `singletons` are the faces that still belong to nobody.
    """
    require_faces(worker)
    with alone_in_search(request, worker) as (engine, tenant):
        distance = await worker.require_search().match_distance(call_of(request, worker))
        found = await group_faces(engine, tenant, cosine_at(similarity_threshold, distance), min_faces_per_person)
    return {"status": "success", **found, "similarity_threshold": similarity_threshold}


@get("/persons", summary="List persons", responses=show("`persons`"))
async def list_persons(
    request: AnyRequest, worker: Worker, page: PageNumber = 0, limit: Annotated[int, QueryParameter(ge=1, le=1000)] = 100
) -> ASGIResponse:
    """List those with the most faces first. The reference is the face of best quality, its thumbnail a JPEG in base64."""
    found = await ask(request, worker, lambda engine, tenant: engine.persons(tenant, Page(limit, page * limit)))
    persons = [pick(person, _PERSON | _REFERENCE) for person in found.items]
    return await reply({"total_persons": found.total, "page": page, "limit": limit, "persons": persons})


@get("/persons/{person_id:str}", summary="Describe a person", responses=show("`faces`"))
async def describe_person(request: AnyRequest, worker: Worker, person_id: RecordId) -> ASGIResponse:
    """Describe a person by name and faces, of which the first 1,000 are listed; boxes are fractions of the upright image."""
    person, hits = await ask(request, worker, lambda engine, tenant: engine.person(tenant, person_id))
    faces = [pick(hit, _FACE) | {"is_reference": hit.part_id == person.reference_face_id} for hit in hits]
    return await reply(pick(person, _PERSON) | {"faces": faces})


@put("/persons/{person_id:str}/name", summary="Name a person", **CHANGES)
async def name_person(request: AnyRequest, worker: Worker, person_id: RecordId, data: JSONBody[Name]) -> Document:
    """Name a person. DeepStack's clients know the name as `userid`."""
    count = await ask(request, worker, lambda engine, tenant: engine.name_person(tenant, person_id, data.name))
    return {"status": "success", "person_id": person_id, "person_name": data.name, "faces_updated": count}


@post("/persons/merge", summary="Merge two persons who are the same", **CHANGES)
async def merge_persons(request: AnyRequest, worker: Worker, data: JSONBody[Merge]) -> Document:
    """Give the faces of the source to the target, and delete the source."""
    source, target = ids = msgspec.structs.astuple(data)
    if source == target:
        raise InvalidParameter("source_person_id and target_person_id are the same")
    count = await ask(request, worker, lambda engine, tenant: engine.merge_persons(tenant, *ids))
    return {"status": "success", **msgspec.structs.asdict(data), "faces_merged": count}


@delete("/persons/{person_id:str}", summary="Delete a person", **CHANGES)
async def delete_person(request: AnyRequest, worker: Worker, person_id: RecordId, delete_faces: Flag = False) -> Document:  # noqa: FBT002 - by name
    """Delete a person. The faces then belong to nobody or, with `delete_faces`, are deleted, too."""
    count = await ask(request, worker, lambda engine, tenant: engine.delete_person(tenant, person_id, deletes_faces=delete_faces))
    deleted, unassigned = (count, None) if delete_faces else (None, count)
    return {"status": "success", "person_id": person_id, "faces_deleted": deleted, "faces_unassigned": unassigned}


ROUTES: list[HTTPRouteHandler] = [cluster_persons, list_persons, describe_person, name_person, merge_persons, delete_person]
