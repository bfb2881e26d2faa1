"""POST /faces/detect, /faces/recognize and /faces/verify: faces, vectors that tell whose they are, and comparison of two faces.

They are off unless the setting `faces` is on.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar.openapi.spec import OpenAPIType, RequestBody, Schema
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Meta, UnsetType

from app.api.answering.native import to_scores, to_vector
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import ImageSize, Timed
from app.api.batch.answer import ImagesAnswer
from app.api.batch.asking import Asking, by_cascade, open_batch
from app.api.batch.body import ParsedBatch, decode_text, parse_batch
from app.api.batch.route import MEDIA_TYPES
from app.api.context import AnyRequest, RequestContext
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.documentation.openapi import ENCODED, describe_form, own_route
from app.api.parameters.parse import Fraction, Parameters
from app.api.parameters.tasks import Url
from app.api.receiving import multipart
from app.api.receiving.content_type import JSON, MULTIPART, media_type
from app.api.receiving.intake import Receiving
from app.api.sight.image import Answer, image_route
from app.cascade.answers import expect_faces, expect_vector, to_fractions
from app.cascade.definition import Cascade
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.embedding.outputs import similarity
from app.errors import MalformedRequest, NoFace, NotOffered, UnsupportedModel
from app.pipeline.results import Detections, Embedding, StepResult

_IMAGES = ("image1", "image2")


class _FaceParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    confidence: Annotated[Fraction, Meta(description="Minimum score of a face.")] = 0.5


class FaceParameters(_FaceParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for the faces in an image."""

    url: Url = None


class VerifyParameters(_FaceParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a comparison of two faces."""

    threshold: Annotated[
        Fraction, Meta(description="Minimum similarity of two faces that match. 0.6 is the distance for which the model was made.")
    ] = 0.6


class Face(msgspec.Struct):
    """A face."""

    box: list[float]
    """x1 y1 x2 y2 as fractions of the upright image."""
    landmarks: list[float]
    """x y of both eyes, the nose and the corners of the mouth, as fractions of the image; the left ones are first."""
    score: float
    quality: float
    """How suitable the face is for telling whose it is, from 0 to 1: how certain, large and frontal it is."""
    embedding: list[float] | UnsetType | None = UNSET
    """In `/analyze`: the vector that tells whose it is, of length 1; null if it is not wanted, or there is none."""


class FacesAnswer(Answer, kw_only=True):
    """The faces in an image, by descending score."""

    status: Literal["success"] = "success"
    faces: list[Face]
    num_faces: int


class RecognizeAnswer(FacesAnswer, kw_only=True):
    """The faces in an image, and a vector of each that tells whose it is."""

    embeddings: list[list[float] | None]
    """Of length 1, one for each face; null for a face that cannot be described, such as one beyond the limit of crops."""


class VerifiedImage(msgspec.Struct, frozen=True):
    """One of the two images."""

    num_faces: int
    face_used: int


class VerifyResponse(Timed, frozen=True, kw_only=True):
    """Whether the largest faces of two images are those of the same person."""

    match: bool
    similarity: float
    """1 for equal vectors, 0.6 at the distance for which the model was made, at least 0."""
    threshold: float
    image1: VerifiedImage
    image2: VerifiedImage


def require_faces(worker: WorkerResources) -> None:
    """Raise NotOffered unless faces are on."""
    if not worker.deployment.has_faces:
        raise NotOffered(
            "faces are off: vectors that tell whose a face is are biometric data, whose processing the law restricts; "
            "NEREID_FACES=true turns them on"
        )


def _choose(worker: WorkerResources, wanted: _FaceParameters) -> Cascade:
    return named_cascade(worker, "faces", "faces", "descriptions").vary(faces={"confidence": wanted.confidence})


LARGEST: Asking[Any, CascadeAnswer] = by_cascade(
    lambda worker, wanted: _choose(worker, wanted).vary(descriptions={"max_crops": 1, "order": "size"})
)


def to_faces(found: StepResult) -> list[Face]:
    """Convert faces to their JSON objects, by descending score; raise UnsupportedModel if they do not have five landmarks."""
    faces, points = expect_faces(found)
    boxes, landmarks = (to_fractions(each, faces.width, faces.height) for each in (faces.boxes, points))
    return list(map(Face, boxes, landmarks, to_scores(faces.scores), to_scores(faces.qualities)))


def _faces_of(found: CascadeAnswer) -> Detections:
    (faces,) = found.require("faces").results
    if not isinstance(faces, Detections):
        raise UnsupportedModel(f"{faces.spec.name} finds no faces: it is a {faces.spec.head.noun}")
    return faces


def _vectors_of(found: CascadeAnswer) -> dict[int, Embedding]:
    answer = found.require("descriptions")
    return dict(zip(answer.objects, map(expect_vector, answer.results), strict=True))


def _to_answer(_: FaceParameters, found: CascadeAnswer) -> FacesAnswer:
    faces = to_faces(_faces_of(found))
    return FacesAnswer(image=ImageSize(found.width, found.height), faces=faces, num_faces=len(faces))


def _to_recognized(wanted: FaceParameters, found: CascadeAnswer) -> RecognizeAnswer:
    vectors = _vectors_of(found)
    answer = msgspec.structs.asdict(_to_answer(wanted, found)) | {"truncated": found.truncated}
    embeddings = [to_vector(vectors[index].vector) if index in vectors else None for index in range(answer["num_faces"])]
    return RecognizeAnswer(**answer, embeddings=embeddings)


def parse_pair(data: bytes, content_type: str, kind: type[Parameters]) -> ParsedBatch:
    """Parse a form with the fields `image1` and `image2`, or JSON with two `images`."""
    if media_type(content_type) != MULTIPART:
        parsed = parse_batch(data, content_type, kind)
    else:
        images, parameters = dict[str, Any](), list[Any]()
        for part in multipart.read_parts(data, content_type, 16):
            if part.name in images:  # of two, a proxy that checks images might have seen the other one
                raise MalformedRequest(f"{part.name} is given more than once")
            if part.name not in _IMAGES:
                parameters.append(multipart.to_parameter(part, " and ".join(_IMAGES)))
            else:
                images[part.name] = decode_text(part.text) if part.text else part.content or MalformedRequest("the image is empty")
        parsed = ParsedBatch([images[name] for name in _IMAGES if name in images], [*_IMAGES], parameters)
    if len(parsed.images) != len(_IMAGES):
        raise MalformedRequest(f"expected two images, in the form fields image1 and image2, found {len(parsed.images)}")
    return parsed


def _describe_pair(fields: dict[str, Schema]) -> RequestBody:
    file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream")
    pair = Schema(type=OpenAPIType.ARRAY, min_items=2, max_items=2, items=ENCODED)
    return RequestBody(
        required=True,
        description="Two images: as form fields image1 and image2, or as a list in JSON.",
        content={
            MULTIPART: describe_form({**dict.fromkeys(_IMAGES, file), **fields}, [*_IMAGES]),
            JSON: describe_form({"images": pair, **fields}, ["images"]),
        },
    )


async def verify(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Compare the largest face of `image1` with that of `image2`."""
    require_faces(worker)
    async with Receiving(request, worker, VerifyParameters, parse_pair) as (context, content, wanted, call):
        context.log_fields |= pipeline.log_fields(LARGEST.first(worker, wanted))
        answer: ImagesAnswer[CascadeAnswer, CascadeAnswer] = ImagesAnswer(_IMAGES, None, context, worker.metrics)
        await answer.run(await open_batch(worker, pipeline, content.images, wanted, call, LARGEST))
        answer.log()
        response = compare(answer.all(), wanted.threshold, context)
    return JsonResponse(msgspec.json.encode(response))


def compare(found: Sequence[CascadeAnswer], threshold: float, context: RequestContext) -> VerifyResponse:
    """Compare the largest faces of two images, which `LARGEST` has described; raise NoFace, or UnsupportedModel."""
    (one, vector), (other, other_vector) = map(_largest, _IMAGES, found)
    distance = vector.spec.match_distance
    if distance is None:
        raise UnsupportedModel(f"the config of {vector.spec.name} must say `match_distance`, the distance up to which faces match")
    alike = round(similarity(vector.vector, other_vector.vector, distance), 4)
    about: dict[str, Any] = {"similarity": alike, "threshold": threshold, "image1": one, "image2": other}
    return VerifyResponse(match=alike >= threshold, **about, **context.ending)


def _largest(name: str, found: CascadeAnswer) -> tuple[VerifiedImage, Embedding]:
    for index, vector in _vectors_of(found).items():
        return VerifiedImage(len(_faces_of(found).scores), index), vector
    raise NoFace(f"{name}: no face was found; a lower `confidence` finds less certain ones")


ROUTES = [
    image_route(
        "/faces/detect",
        None,
        FaceParameters,
        by_cascade(lambda worker, wanted: _choose(worker, wanted).without("descriptions")),
        _to_answer,
        response=FacesAnswer,
        summary="Detect faces in an image",
        description="Detect faces and their landmarks. Needs `NEREID_FACES`, as all of `/faces`. `Accept: image/jpeg` or "
        "`image/png` gets the image with the faces drawn on it.",
        check=require_faces,
        to_objects=lambda _, found: _faces_of(found),
    ),
    image_route(
        "/faces/recognize",
        None,
        FaceParameters,
        by_cascade(_choose),
        _to_recognized,
        response=RecognizeAnswer,
        summary="Detect and describe faces in an image",
        description="Detect faces, and describe each by a vector that tells whose it is.",
        check=require_faces,
    ),
    own_route(
        "/faces/verify",
        verify,
        VerifyResponse,
        "Whether they are those of the same person",
        kinds=(VerifyParameters,),
        body=_describe_pair,
        task=None,
        takes="images",
        media_types=MEDIA_TYPES,
        summary="Compare the faces in two images",
    ),
]
