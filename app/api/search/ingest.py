"""POST /ingest and /ingest/batch: images are described and added to the index. What is acknowledged is committed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Meta, UnsetType, field

from app.api.answering.native import to_norm
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import Timed
from app.api.batch.answer import BatchFailure, ImagesAnswer
from app.api.batch.asking import Asking, open_batch
from app.api.batch.body import MAX_IMAGES, parse_batch
from app.api.batch.route import MEDIA_TYPES, describe_images
from app.api.context import AnyRequest
from app.api.dependencies import Worker, WorkerResources
from app.api.documentation.openapi import own_route
from app.api.parameters.parse import Parameters
from app.api.parameters.tasks import MAX_ID_LENGTH, ImageId, Url, check_plain
from app.api.receiving.body import decode, parse_body
from app.api.receiving.intake import Receiving
from app.api.search.asking import WorkerSearch
from app.errors import InvalidParameter
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.search.describe import Parts
from app.search.service import Ingested, IngestOptions

_MAX_PATH = 4096
_Action = Literal["joined_group", "created_group"]
_TASK: Literal["embedding"] = "embedding"
_CREATED = 201
_Cosine = Annotated[float, Meta(ge=0.9, le=1, description="Cosine of the vectors from which images are nearly the same.")]
_Texts = Annotated[list[str | None], Meta(max_length=MAX_IMAGES)]


class IngestFlags(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of every request that adds images."""

    enable_detection: Annotated[bool, Meta(description="Whether objects are found.")] = True
    enable_faces: Annotated[bool, Meta(description="Whether faces are found and described, if faces are on.")] = True
    enable_ocr: Annotated[bool, Meta(description="Whether text is read.")] = True
    enable_clip: Annotated[bool, Meta(description="Whether the image, vehicles and people get vectors.")] = True
    skip_duplicates: Annotated[bool, Meta(description="Whether content that is known already is not added once more.")] = True
    detect_near_duplicates: Annotated[bool, Meta(description="Whether an image joins the group of nearly the same ones.")] = True
    near_duplicate_threshold: _Cosine = 0.99

    @property
    def options(self) -> IngestOptions:
        """How the images are added."""
        parts = Parts(self.enable_detection, self.enable_faces, self.enable_ocr, self.enable_clip)
        return IngestOptions(parts, self.skip_duplicates, self.near_duplicate_threshold if self.detect_near_duplicates else None)


class _IngestParameters(IngestFlags, frozen=True, forbid_unknown_fields=True, kw_only=True):
    documents = frozenset({"metadata"})
    url: Url = None
    image_id: ImageId = None
    image_path: Annotated[str | None, Meta(description="Where the image is; it is only remembered.")] = None
    metadata: Annotated[str | None, Meta(description="A JSON object that is kept with the image, for filters.")] = None

    def __post_init__(self) -> None:
        check_plain("image_id", self.image_id)
        check_plain("image_path", self.image_path, _MAX_PATH)
        self.read_metadata()

    def read_metadata(self) -> dict[str, Any]:
        """Return the metadata; raise InvalidParameter if they are no JSON object."""
        return decode(self.metadata or "{}", dict[str, Any], "metadata: expected a JSON object", InvalidParameter)


class _IngestBatchParameters(IngestFlags, frozen=True, forbid_unknown_fields=True, kw_only=True):
    documents = frozenset({"image_ids", "image_paths"})
    image_ids: Annotated[str | None, Meta(description="A JSON list with the id of each image, or null for a new one.")] = None
    image_paths: Annotated[str | None, Meta(description="A JSON list with the path of each image, or null.")] = None

    def __post_init__(self) -> None:
        for name, length in (("image_ids", MAX_ID_LENGTH), ("image_paths", _MAX_PATH)):
            for text in self.read_list(name):
                check_plain(name, text, length)
        named = [image_id for image_id in self.read_list("image_ids") if image_id is not None]
        if len(named) > len({*named}):
            raise InvalidParameter("image_ids: two images have the same id")

    def read_list(self, name: str, images: int | None = None) -> list[str | None]:
        """Return one entry for each image; raise InvalidParameter if they are not as many, or no texts."""
        if (given := getattr(self, name)) is None:
            return [None] * (images or 0)
        expected = f"{name}: expected a JSON list of at most {MAX_IMAGES} strings"
        found: list[str | None] = decode(given, _Texts, expected, InvalidParameter)
        if len(found) != (images or len(found)):
            raise InvalidParameter(f"{name}: expected {images}, one for each image, found {len(found)}")
        return found


class Indexed(msgspec.Struct, frozen=True):
    """How many entries each index got."""

    global_: int | bool = field(name="global", default=0)
    vehicles: int = 0
    people: int = 0
    faces: int = 0
    ocr: int = 0
    """Lines of text; of several images, those that have text."""


class NearDuplicate(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest of the images that are nearly the same, and the group that an image is in with them."""

    image_id: str | UnsetType = UNSET
    action: _Action
    group_id: str | None
    similarity: float
    matched_image: str


class IngestedText(msgspec.Struct, frozen=True):
    """The text in an image."""

    num_texts: int
    full_text: str
    indexed: bool


class IngestResponse(Timed, frozen=True, kw_only=True):
    """What became of an image."""

    status: Literal["success", "duplicate"]
    image_id: str
    num_detections: int = 0
    num_faces: int = 0
    embedding_norm: float | None = None
    imohash: str
    """BLAKE3 of the encoded image, in hex."""
    indexed: Indexed | None = None
    near_duplicate: NearDuplicate | None = None
    ocr: IngestedText | None = None
    existing_image_id: str | None = None
    existing_image_path: str | None = None
    message: str | None = None
    is_completed: bool = False
    """Whether the image was there without some of its parts, which it has got now."""
    updated: Sequence[str] = ()
    """What is another one now of a known image: `path`, `metadata`."""
    error: None = None
    """Always null: present for clients of other gateways."""
    errors: list[str] | None = None


class DuplicateDetail(msgspec.Struct, frozen=True):
    """An image whose content was known."""

    image_id: str
    existing_image_id: str
    imohash: str


class ErrorDetail(BatchFailure, frozen=True):
    """An image that failed."""

    image_id: str | None


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """What became of several images."""

    status: Literal["success", "partial", "error"]
    total: int
    processed: int
    duplicates: int
    errors_count: int
    completed: int
    """Of those processed, images that were there without some of their parts."""
    updated: int
    """Of the duplicates, images that have another path or other metadata now."""
    left_out: dict[str, int]
    """In how many images each part was left out, because its model was not there; `truncated`: some objects, faces or lines."""
    indexed: Indexed
    near_duplicates: int


class IngestBatchResponse(Sums, frozen=True, kw_only=True):
    """What became of each image."""

    deferred_ops: Literal[0] = 0
    duplicate_details: list[DuplicateDetail] | None
    error_details: list[ErrorDetail] | None
    near_duplicate_details: list[NearDuplicate] | None
    image_ids: list[str | None]
    """Under which each image is there, of a duplicate that of the image with its content; null for one that failed."""
    total_time_ms: float
    request_id: str


def to_indexed(counts: Mapping[Any, int]) -> Indexed:
    """Return what was added to each index."""
    return Indexed(*(counts.get(name, 0) for name in ("global", "vehicles", "people", "faces", "ocr")))


def sum_up(counts: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of `Sums` from the counts of `Ingested`, and `errors`."""
    done = {name: counts.get(name, 0) for name in ("processed", "duplicates")}
    errors, others = counts.get("errors", 0), {name: counts.get(name, 0) for name in ("near_duplicates", "completed", "updated")}
    status = "success" if not errors else "partial" if any(done.values()) else "error"
    own = {"total": sum(done.values()) + errors, "errors_count": errors, "indexed": to_indexed(counts)}
    return {"status": status, **done, **own, **others, "left_out": numbers_of(counts, "left_out:")}


def numbers_of(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """Return the counts whose names begin with a prefix, without that."""
    return {name.removeprefix(prefix): number for name, number in counts.items() if name.startswith(prefix)}


def _near(found: Ingested, image_id: str | UnsetType = UNSET) -> NearDuplicate | None:
    other = found.added.duplicate
    if other is None or found.added.status == "duplicate":
        return None
    alike = round(min(other.score, 1.0), 4)
    action: _Action = "created_group" if other.is_new_group else "joined_group"
    return NearDuplicate(image_id=image_id, action=action, group_id=other.group_id, similarity=alike, matched_image=other.image_id)


def _to_response(found: Ingested, **timed: Any) -> IngestResponse:  # noqa: ANN401 - the fields of `Timed`
    image, added = found
    given: dict[str, Any] = {"image_id": image.image_id, "imohash": image.content_hash.hex(), **timed}
    given["errors"] = [f"{part}: {detail}" for part, detail in image.errors.items()] or None
    if added.status == "duplicate" and added.duplicate is not None:
        given |= {"existing_image_id": added.duplicate.image_id, "existing_image_path": added.duplicate.path}
        return IngestResponse(status="duplicate", message="this content is indexed already", updated=added.updated, **given)
    texts = None if image.lines is None else [line.text for line in image.lines]
    return IngestResponse(
        status="success",
        num_detections=len(image.objects),
        num_faces=len(image.faces),
        embedding_norm=None if image.norm is None else to_norm(image.norm),
        indexed=to_indexed({**added.indexed, "global": bool(added.indexed.get("global"))}),
        near_duplicate=_near(found),
        ocr=None if texts is None else IngestedText(len(texts), "\n".join(texts), bool(texts)),
        is_completed=added.status == "completed",
        **given,
    )


async def ingest(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
    """Add an image to the index: with objects, faces, text, and vectors of it. The status is 201, or 200 if it was known.

    A known image gets what it lacks, and another path or other metadata.
    """
    async with Receiving(request, worker, _IngestParameters, parse_body) as (context, content, wanted, call):
        context.log_fields["image_bytes"] = len(content.image)
        given = {"path": wanted.image_path, "metadata": wanted.read_metadata()}
        found = await search.ingest(context.tenant, content.image, wanted.image_id, call, wanted.options, **given)  # type: ignore[arg-type]
    context.log_fields |= {"ingested": found.added.status, "objects": len(found.image.objects), "faces": len(found.image.faces)}
    answer = _to_response(found, **context.ending)
    return JsonResponse(msgspec.json.encode(answer), _CREATED if found.added.status in {"added", "replaced"} else 200)


async def ingest_batch(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
    """Add up to 64 images to the index, each of which succeeds or fails on its own. The deadline is that of the whole batch."""
    async with Receiving(request, worker, _IngestBatchParameters, parse_batch) as (context, content, wanted, call):
        images = len(content.images)
        ids = wanted.read_list("image_ids", images)
        paths = wanted.read_list("image_paths", images)
        context.log_fields["image_bytes"] = sum(len(image) for image in content.images if isinstance(image, bytes))

        async def add(_: WorkerResources, __: Pipeline, image: bytes, ___: _IngestBatchParameters, own: CallContext) -> Ingested:
            index = own.image_index
            return await search.ingest(context.tenant, image, ids[index], own, wanted.options, path=paths[index])

        totals, kept_as = Counter[str](), dict[int, str]()

        async def keep(index: int, found: Ingested) -> tuple[NearDuplicate | None, DuplicateDetail | None]:
            totals.update(found.counts())
            known = found.added.duplicate if found.added.status == "duplicate" else None
            duplicate = known and DuplicateDetail(ids[index] or known.image_id, known.image_id, found.image.content_hash.hex())
            kept_as[index] = known.image_id if known else found.image.image_id
            return _near(found, found.image.image_id), duplicate

        first = await search.first_model(wanted.options.parts, call)
        asking = Asking(lambda _, __: first, add)
        answer = ImagesAnswer(content.names, keep, context, worker.metrics)
        await answer.run(await open_batch(worker, search.pipeline, content.images, wanted, call, asking))
    answer.log()
    errors = [ErrorDetail(image_id=ids[each.index], **msgspec.structs.asdict(each)) for each in answer.failures() or ()]
    kept = [details for _, details in sorted(answer.converted.items())]
    document = IngestBatchResponse(
        **sum_up(totals + Counter(errors=len(errors))),
        duplicate_details=[duplicate for _, duplicate in kept if duplicate] or None,
        error_details=errors or None,
        near_duplicate_details=[near for near, _ in kept if near] or None,
        image_ids=[*map(kept_as.get, range(images))],
        **context.ending,
    )
    return JsonResponse(msgspec.json.encode(document), _CREATED if document.processed > document.completed else 200)


_ONE: dict[str, Any] = {"task": _TASK, "scope": "ingest", "also": {_CREATED: "What became of it"}}
_MANY = _ONE | {"body": describe_images, "takes": "images", "media_types": MEDIA_TYPES}
ROUTES: list[HTTPRouteHandler] = [
    own_route(
        *("/ingest", ingest, IngestResponse, "Its content is indexed already"),
        kinds=(_IngestParameters,),
        summary="Add an image to the index",
        **_ONE,
    ),
    own_route(
        *("/ingest/batch", ingest_batch, IngestBatchResponse, "None was added"),
        kinds=(_IngestBatchParameters,),
        summary="Add several images to the index",
        **_MANY,
    ),
]
