"""POST /embed/batch, /embed/boxes and /embed/text: vectors of several images, of parts of one, and of a text."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar.openapi.spec import OpenAPIType, RequestBody, Schema
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.native import to_norm, to_vector
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import ImageSize, ModelUsed, Problem, Timed
from app.api.batch.answer import BatchFailure, Placed
from app.api.batch.asking import MODEL, Asking
from app.api.batch.route import by_answers, images_route
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import describe_form, own_route
from app.api.parameters.parse import Fraction, ModelParameters
from app.api.parameters.tasks import EmbeddingParameters, Url
from app.api.receiving.body import ParsedBody, decode, parse_document
from app.api.receiving.content_type import JSON
from app.api.receiving.intake import Receiving
from app.api.sight.image import Answer, image_route
from app.cascade.run import ask_about_boxes
from app.errors import InvalidParameter, MalformedRequest, UnknownModel
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Embedding
from app.pipeline.tensors import run_text

_TEXT_MODEL = "embedding_text"
_MAX_BOXES = 100
_MAX_TEXT_BYTES = 4096
_EXAMPLE = 'expected a JSON object such as {"text": "a red car"}'
_Box = tuple[Fraction, Fraction, Fraction, Fraction]
_BoxesText = Annotated[
    str | None,
    Meta(
        description=f"The parts: a JSON list of at most {_MAX_BOXES} boxes `[x1, y1, x2, y2]`, corners as fractions of the upright "
        "image, such as `[[0, 0, 0.5, 1]]`."
    ),
]
_Boxes = Annotated[list[_Box], Meta(max_length=_MAX_BOXES)]
_Embedded = tuple[ImageSize, Sequence[Any]]


class EmbeddedImage(Placed, kw_only=True):
    """The vector of one image of a batch, of length 1, or why there is none."""

    image_index: int = msgspec.field(name="index")
    filename: str | None
    embedding: list[float] | None = None
    embedding_norm: float | None = None
    model: ModelUsed | None = None
    status: Literal["success", "error"] = "success"
    error: str | None = None
    problem: Problem | None = None
    """The response, including the status, that the image would get in a request of its own."""


class EmbedBatchResponse(Timed, frozen=True, kw_only=True):
    """The vectors of several images, in the order of the request."""

    total: int
    successful: int
    failed: int
    results: list[EmbeddedImage]
    status: Literal["success", "partial", "all_failed"]


class EmbeddedBox(msgspec.Struct, frozen=True):
    """The vector of a part of an image."""

    box: _Box
    embedding: list[float]


class EmbedBoxesResponse(Answer, kw_only=True):
    """The vectors of parts of an image, in the order of the request."""

    boxes: list[EmbeddedBox]
    num_boxes: int
    status: Literal["success"] = "success"
    model: ModelUsed | None


class EmbedTextResponse(Timed, frozen=True, kw_only=True):
    """The vector of a text, of length 1."""

    embedding: list[float]
    embedding_norm: float
    text: str
    status: Literal["success"] = "success"
    model: ModelUsed


class BoxesParameters(EmbeddingParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for the vectors of parts of an image."""

    documents = frozenset({"boxes"})
    url: Url = None
    boxes: _BoxesText = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.boxes is not None:
            self.read_boxes()

    def read_boxes(self) -> list[_Box]:
        """Return the boxes; raise InvalidParameter if there are none, or not valid ones."""
        expected = f"a JSON list of at most {_MAX_BOXES} boxes of four numbers from 0 to 1, such as [[0, 0, 0.5, 1]]"
        boxes: list[_Box] = decode(self.boxes or "", _Boxes, f"boxes: expected {expected}", InvalidParameter)
        for index, (left, top, right, bottom) in enumerate(boxes):
            if not (left < right and top < bottom):
                raise InvalidParameter(f"boxes: that at index {index} is empty; expected x1 < x2 and y1 < y2")
        return boxes


async def _embed_boxes(
    _: WorkerResources, pipeline: Pipeline, image: bytes, wanted: BoxesParameters, call: CallContext
) -> _Embedded:
    width, height, found = await ask_about_boxes(pipeline, image, wanted.read_boxes(), wanted.options, call)
    return ImageSize(width, height), found


def _to_result(_: EmbeddingParameters, found: Embedding) -> EmbeddedImage:
    vector, norm, model = to_vector(found.vector), to_norm(found.norm), ModelUsed.of(found)
    return EmbeddedImage(image_index=0, filename=None, embedding=vector, embedding_norm=norm, model=model)


def _to_document(
    results: Sequence[Any],
    failures: list[BatchFailure] | None,
    total_images: int,
    **others: Any,  # noqa: ANN401 - fields of the response
) -> EmbedBatchResponse:
    fields = {name: others[name] for name in ("status", "total_time_ms", "request_id")}
    failed = {one.index: one for one in failures or ()}
    succeeded = iter(results)
    every: list[Any] = [
        EmbeddedImage(image_index=index, filename=one.filename, status="error", error=one.error, problem=one.problem)
        if (one := failed.get(index))
        else next(succeeded)
        for index in range(total_images)
    ]
    return EmbedBatchResponse(total=total_images, successful=len(results), failed=len(failed), results=every, **fields)


def _to_boxes(wanted: BoxesParameters, found: _Embedded) -> EmbedBoxesResponse:
    size, vectors = found
    boxes = [EmbeddedBox(box, to_vector(one.vector)) for box, one in zip(wanted.read_boxes(), vectors, strict=True)]
    return EmbedBoxesResponse(image=size, boxes=boxes, num_boxes=len(boxes), model=ModelUsed.of(vectors[0]) if vectors else None)


def _parse_text(data: bytes, _: str, kind: type[ModelParameters]) -> ParsedBody:
    content, pairs = parse_document(data, "text", kind, _EXAMPLE)
    return ParsedBody(decode(content, str, _EXAMPLE).encode(), pairs)


def _describe_text(fields: dict[str, Schema]) -> RequestBody:
    text = Schema(type=OpenAPIType.STRING, min_length=1, max_length=_MAX_TEXT_BYTES)
    return RequestBody(required=True, content={JSON: describe_form({"text": text, **fields}, ["text"])})


async def ask_text(pipeline: Pipeline, text: bytes, call: CallContext, version: int | None = None) -> Embedding:
    """Describe a text by a vector; raise UnknownModel, with what to do, if there is no model for it."""
    try:
        return await run_text(pipeline, _TEXT_MODEL, version, text, call)
    except UnknownModel as error:
        raise UnknownModel(
            f"texts cannot be described: there is no model {_TEXT_MODEL}, which has to be added; its input is a text, of type "
            "BYTES, and its vectors can be compared with those of the images' model"
        ) from error


async def embed_text(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Describe the `text` of a JSON object by a vector, if there is a model for it; it has to be added.

    The model is `embedding_text`, or the one that `model` names: its input is one BYTES, its output the vector.
    """
    context_of(request.scope).content_type = JSON  # whatever was declared, if anything: it is parsed in a thread
    async with Receiving(request, worker, ModelParameters, _parse_text) as (context, content, wanted, call):
        if not 0 < len(content.image) <= _MAX_TEXT_BYTES:
            raise MalformedRequest(f"expected a text of 1 to {_MAX_TEXT_BYTES} bytes")
        if wanted.model is not None:
            found = await run_text(pipeline, wanted.model, wanted.version, content.image, call)
        else:
            found = await ask_text(pipeline, content.image, call, wanted.version)
    answer = EmbedTextResponse(
        embedding=to_vector(found.vector),
        embedding_norm=to_norm(found.norm),
        text=content.image.decode(),
        model=ModelUsed.of(found),
        **context.ending,
    )
    return JsonResponse(msgspec.json.encode(answer))


ROUTES = [
    images_route(
        "/embed/batch",
        "embedding",
        EmbeddingParameters,
        MODEL,
        by_answers(_to_result, _to_document),
        response=EmbedBatchResponse,
        summary="Describe several images by vectors",
    ),
    image_route(
        "/embed/boxes",
        "embedding",
        BoxesParameters,
        Asking(MODEL.first, _embed_boxes),
        _to_boxes,
        response=EmbedBoxesResponse,
        summary="Describe parts of an image by vectors",
        description="Decode an image once, and describe the part of it in each box by a vector.",
    ),
    own_route(
        "/embed/text",
        embed_text,
        EmbedTextResponse,
        "The vector",
        kinds=(ModelParameters,),
        body=_describe_text,
        task=None,
        takes="text",
        summary="Describe a text by a vector",
    ),
]
