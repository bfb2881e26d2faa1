"""/query: what is kept of images, groups of those that are nearly the same, sizes of the indexes; and thumbnails."""

from typing import Annotated

from litestar import Response, delete, get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath, FromQuery, QueryParameter
from litestar.response.base import ASGIResponse

from app.api.answering.native import to_vector
from app.api.caller.check import guard_origin
from app.api.context import AnyRequest
from app.api.dependencies import Worker
from app.api.parameters.tasks import MAX_ID_LENGTH
from app.api.search.asking import READING, Document, PageNumber, PageSize, RecordId, ask, reply, show
from app.errors import NotOffered, UnknownRecord
from app.expected import is_plain
from app.search.engine import Page

_MinSize = Annotated[int, QueryParameter(ge=2, le=1_000_000, description="Minimum number of images in a group.")]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _check_id(image_id: str) -> None:
    if not (len(image_id) <= MAX_ID_LENGTH and is_plain(image_id)):
        raise UnknownRecord(
            f"there is no such image: ids have 1 to {MAX_ID_LENGTH} characters, none of them a slash or a control one"
        )


@get("/query/image/{image_id:str}", summary="What is kept of an image", responses=show("`metadata`, and what is in which index"))
async def query_image(
    request: AnyRequest,
    image_id: FromPath[str],
    worker: Worker,
    include_embedding: FromQuery[bool] = False,  # noqa: FBT002 - by name
) -> Document:
    """Describe an image; those `metadata` that came with it are in `metadata.metadata`."""
    _check_id(image_id)
    kept = await ask(request, worker, lambda engine, tenant: engine.image(tenant, image_id))
    indexes = [each.index for each in kept.objects]
    which = {"image_id": image_id, "image_path": kept.path}
    counts = {"vehicle_detections": indexes.count("vehicles"), "person_detections": indexes.count("people")}
    counts |= {"detections": len(indexes), "faces": len(kept.faces)}
    about = {"width": kept.width, "height": kept.height, "indexed_at": kept.added_at, "imohash": kept.content_hash.hex()}
    about |= {"duplicate_group_id": kept.duplicate_group, "metadata": kept.metadata}
    return {
        "status": "success",
        "error": None,
        **which,
        "metadata": which | about,
        "indexed_in": kept.indexed_in,
        **{f"num_{name}": count for name, count in counts.items()},
        "has_ocr": bool(kept.lines),
        "parts": kept.states,
        "full_text": kept.full_text,
        "global_embedding": None if kept.vector is None or not include_embedding else to_vector(kept.vector),
    }


@delete(
    "/query/image/{image_id:str}",
    summary="Delete an image",
    status_code=200,
    opt={"scope": "ingest"},
    guards=[guard_origin],
    responses=show("`deleted_from`: in which indexes it was"),
)
async def delete_image(request: AnyRequest, image_id: FromPath[str], worker: Worker) -> Document:
    """Delete an image with its objects, faces, text and vectors."""
    _check_id(image_id)
    counts = await ask(request, worker, lambda engine, tenant: engine.delete(tenant, image_id))
    names = [name for name, count in counts.items() if count]
    return {"status": "success", "image_id": image_id, "deleted_from": names, "total_deleted": sum(counts.values())}


@get("/query/stats", summary="Sizes of the indexes", responses=show("`indexes`, whose bytes are those of all callers"))
async def query_stats(request: AnyRequest, worker: Worker) -> Document:
    """Tell how many records the caller has in each index, and how large that is."""
    found = await ask(request, worker, lambda engine, tenant: engine.statistics(tenant))
    records, nbytes = map(sum, zip(*found.values(), strict=True))
    sizes = [
        {"name": f"visual_search_{name}", "doc_count": count, "size_bytes": size, "size_human": _readable(size), "exists": True}
        for name, (count, size) in found.items()
    ]
    totals = {"total_size_bytes": nbytes, "total_size_human": _readable(nbytes)}
    return {"status": "success", "indexes": sizes, "total_documents": records, **totals}


def _readable(nbytes: int) -> str:
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{nbytes / 1024**power:.1f} {_UNITS[power]}"


@get("/query/image/{image_id:str}/thumbnail", summary="A small picture of an image", media_type="image/jpeg", responses=READING)
async def image_thumbnail(
    request: AnyRequest, image_id: FromPath[str], worker: Worker, face_id: FromQuery[str | None] = None
) -> Response[bytes]:
    """Return a picture of an image, or of a face in it, if `NEREID_SEARCH_THUMBNAILS` was on when it was added."""
    _check_id(image_id)
    if not worker.deployment.keeps_thumbnails:
        raise NotOffered("no pictures are kept; NEREID_SEARCH_THUMBNAILS=true keeps those of images that are added from then on")
    picture = await ask(request, worker, lambda engine, tenant: engine.thumbnail(tenant, image_id, face_id))
    return Response(picture, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})


@get("/query/duplicates", summary="List groups of near duplicates", responses=show("`groups`"))
async def duplicate_groups(
    request: AnyRequest, worker: Worker, page: PageNumber = 0, size: PageSize = 50, min_size: _MinSize = 2
) -> ASGIResponse:
    """List the groups, largest first. The primary image is the one that was there first.

    `total_groups` are those of at least `min_size`, `total_duplicates` the images in all groups.
    """
    found = await ask(request, worker, lambda engine, tenant: engine.duplicate_groups(tenant, Page(size, page * size), min_size))
    _, grouped = await ask(request, worker, lambda engine, tenant: engine.duplicate_statistics(tenant))
    groups = [
        {"group_id": group_id, "member_count": size, "primary_image_id": first.image_id, "primary_image_path": first.path}
        for group_id, size, first in found.items
    ]
    return await reply({"total_groups": found.total, "total_duplicates": grouped, "page": page, "size": size, "groups": groups})


@get("/query/duplicates/stats", summary="Count near duplicates", responses=READING)
async def duplicate_statistics(request: AnyRequest, worker: Worker) -> Document:
    """Count the images that are in groups, and the groups."""
    groups, grouped = await ask(request, worker, lambda engine, tenant: engine.duplicate_statistics(tenant))
    images, _ = (await ask(request, worker, lambda engine, tenant: engine.statistics(tenant)))["global"]
    counts = {"total_images": images, "grouped_images": grouped, "ungrouped_images": max(0, images - grouped)}
    return {"status": "success", **counts, "duplicate_groups": groups, "average_group_size": round(grouped / max(1, groups), 2)}


@get("/query/duplicates/{group_id:str}", summary="Describe a group", responses=show("`members`"))
async def duplicate_group(request: AnyRequest, worker: Worker, group_id: RecordId) -> ASGIResponse:
    """List the first 1,000 images of a group, with the cosine to the primary one, the first: `duplicate_score`."""
    images, size = await ask(request, worker, lambda engine, tenant: engine.duplicate_group(tenant, group_id))
    members = [
        {"image_id": hit.image_id, "image_path": hit.path, "is_primary": hit is images[0], "duplicate_score": round(hit.score, 6)}
        for hit in images
    ]
    return await reply({"group_id": group_id, "member_count": size, "members": members})


ROUTES: list[HTTPRouteHandler] = [
    *(query_image, delete_image, query_stats, image_thumbnail),
    *(duplicate_groups, duplicate_statistics, duplicate_group),
]
