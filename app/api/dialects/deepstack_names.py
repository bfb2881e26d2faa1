"""The faces of DeepStack that have names: registered, recognized, listed and deleted, in the process of search."""

from contextlib import nullcontext, suppress
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering.responses import JsonResponse
from app.api.batch.answer import ImagesAnswer
from app.api.batch.asking import Asking
from app.api.batch.body import MAX_IMAGES, ParsedBatch, parse_batch
from app.api.context import AnyRequest, RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.dialects import deepstack
from app.api.dialects.deepstack import complete, parse_form, parse_one, to_prediction
from app.api.dialects.dialect import DialectParameters, answer_each
from app.api.parameters.parse import Fraction
from app.api.receiving import multipart
from app.api.receiving.content_type import MULTIPART, media_type
from app.api.receiving.intake import Receiving
from app.api.routes import ModelRoute
from app.api.search.asking import ROUNDING, WorkerSearch, search_of
from app.api.sight.faces import require_faces
from app.cascade.named import named_cascade
from app.embedding.outputs import cosine_at, similarity_at
from app.errors import GatewayError, InvalidParameter, MalformedRequest, NoFace, UnsupportedModel
from app.pipeline.batch_request import Image
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.search.describe import Parts
from app.search.engine import NewImage
from app.search.service import LEAST_QUALITY, REGISTERED, hash_content

_UNKNOWN = "unknown"
_Name = Annotated[str, Meta(max_length=128, pattern=r"\A(?=.*\S)[^\x00-\x1f\x7f]+\Z", title="1 to 128 characters of one line")]
_SAME = 0.6
"""The similarity at the distance for which the model was made."""


class _UserParameters(DialectParameters, frozen=True, kw_only=True):
    userid: _Name | None = None

    @property
    def name(self) -> str:
        if self.userid is None:
            raise InvalidParameter("userid is missing: the name of the person")
        return self.userid


class _DeleteParameters(_UserParameters, frozen=True, kw_only=True):
    delete_images: bool = False
    """Whether images that were indexed and have a face like those of the person are deleted, too. Not part of DeepStack."""


class _RecognizeParameters(DialectParameters, frozen=True, kw_only=True):
    min_confidence: Fraction | Literal[""] = ""
    """Minimum similarity; empty as if it were missing: that of the distance for which the model was made."""

    @property
    def least(self) -> float:
        return _SAME if self.min_confidence == "" else self.min_confidence


# The keys of cameras have the scope `detect`, and tell persons apart. Who else has been registered is only for those that search.
@ModelRoute("/v1/vision/face/recognize", task=None, key_in="body")
async def recognize(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, search: WorkerSearch) -> ASGIResponse:
    """Tell whose the faces in an image are, each by the most similar registered face, if it is similar enough."""
    require_faces(worker)

    async def reply(answer: ImagesAnswer[Any, NewImage], wanted: _RecognizeParameters, call: CallContext) -> ASGIResponse:
        (image,) = answer.all()
        far, context = await search.match_distance(call), context_of(request.scope)
        least, predictions = cosine_at(wanted.least, far) - ROUNDING, []
        named = await search.find_names(context.tenant, image.faces, least, call)
        for face, best in zip(image.faces, named, strict=True):
            score = round(similarity_at(best.score, far), 4) if best else 0
            box = [side * size for side, size in zip(face.box, (image.width, image.height) * 2, strict=True)]
            predictions.append({"userid": best.name if best else _UNKNOWN, **to_prediction(score, box, None)})
        is_known = any(each["userid"] != _UNKNOWN for each in predictions)
        message = "A face was recognised" if is_known else "No known faces"
        return _respond("recognize", context, message=message, predictions=predictions, count=len(predictions))

    return await answer_each(request, worker, pipeline, _RecognizeParameters, parse_one, reply, _FACES)


@ModelRoute("/v1/vision/face/register", task=None, takes="images", key_in="body", scope="ingest")
async def register(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, search: WorkerSearch) -> ASGIResponse:
    """Keep the largest face of each image as one of the person `userid`."""
    require_faces(worker)

    async def reply(answer: ImagesAnswer[Any, NewImage], wanted: _UserParameters, call: CallContext) -> ASGIResponse:
        images, tenant = answer.all(), context_of(request.scope).tenant
        for number, image in enumerate(images, 1):
            face = max(image.faces, key=lambda face: (face.box[2] - face.box[0]) * (face.box[3] - face.box[1]), default=None)
            if face is None or not face.vectors:
                raise NoFace(f"nothing was registered: no face was found in picture {number}")
            if face.quality < LEAST_QUALITY:
                why = f"is too small, turned or unclear: its quality, {face.quality}, is below {LEAST_QUALITY}"
                raise NoFace(f"nothing was registered: the face in picture {number} {why}")
            image.faces = [face]
        is_known, replaced = await search.asking(call).register(tenant, wanted.name, images)
        states = [
            {"state": "replaced" if is_there else "added", "quality": image.faces[0].quality}
            for image, is_there in zip(images, replaced, strict=True)
        ]
        message = "face updated" if is_known else "face added"
        return _respond("register", context_of(request.scope), message=message, registered=states)

    return await answer_each(request, worker, pipeline, _UserParameters, _parse_images, reply, _FACES)


@ModelRoute("/v1/vision/face/list", task=None, takes="text", key_in="body", scope="search")
async def list_faces(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
    """List the names under which faces are registered."""
    require_faces(worker)
    async with Receiving(request, worker, DialectParameters, parse_form, may_be_empty=True) as (context, _, _, call):
        names = await search.asking(call).names(context.tenant)
    return _respond("list", context, faces=names)


@ModelRoute("/v1/vision/face/delete", task=None, takes="text", key_in="body", scope="ingest")
async def delete_faces(request: AnyRequest, worker: Worker, search: WorkerSearch) -> ASGIResponse:
    """Delete all faces that are registered under a name, and name the images with others like them."""
    require_faces(worker)
    async with Receiving(request, worker, _DeleteParameters, parse_form, may_be_empty=True) as (context, _, wanted, call):
        least = None
        with nullcontext() if wanted.delete_images else suppress(GatewayError):  # names go without the model, too
            least = cosine_at(_SAME, await search.match_distance(call)) - ROUNDING
        images = await search.asking(call).forget(context.tenant, wanted.name, least, delete_images=wanted.delete_images)
    return _respond("delete", context, images=images)


async def _describe_faces(
    worker: WorkerResources, _: Pipeline, image: bytes, wanted: DialectParameters, call: CallContext
) -> NewImage:
    """A picture of a person is kept once, and apart from the same one that is indexed."""
    name = wanted.name if isinstance(wanted, _UserParameters) else ""
    digest = blake2b(await hash_content(image), digest_size=32, key=blake2b(name.encode()).digest()).digest()
    new = NewImage(image_id=f"{REGISTERED}{digest.hex()[:32]}", content_hash=digest)
    await search_of(worker).describe(new, image, call, Parts(objects=False, text=False, vectors=False))
    for reason in new.errors.values():
        raise UnsupportedModel(reason)
    return new


_FACES: Asking[Any, NewImage] = Asking(lambda worker, _: named_cascade(worker, "faces", "faces").model, _describe_faces)


def _parse_images(data: bytes, content_type: str, kind: type[DialectParameters]) -> ParsedBatch:
    if media_type(content_type) != MULTIPART:
        return parse_batch(data, content_type, kind)
    parts = list(multipart.read_parts(data, content_type, MAX_IMAGES))
    images: list[Image] = [part.content or MalformedRequest("the image is empty") for part in parts if part.file_name is not None]
    if not images:
        raise MalformedRequest("there is no image; send one as a file, in the field image or image1")
    return ParsedBatch(
        images, [None] * len(images), [multipart.to_parameter(part, "image") for part in parts if part.file_name is None]
    )


def _respond(command: str, context: RequestContext, **own: Any) -> ASGIResponse:  # noqa: ANN401 - any JSON
    return JsonResponse(msgspec.json.encode(complete(command, context, own)))


DIALECT = deepstack.DIALECT._replace(handlers=[recognize, register, list_faces, delete_faces])
