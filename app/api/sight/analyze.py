"""POST /analyze and /analyze/batch: objects, faces, text and vectors from one decoded image; each part can fail alone."""

from collections.abc import Sequence
from itertools import starmap
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from app.api.answering.native import objects, to_norm, to_vector
from app.api.answering.schema import ImageSize
from app.api.batch.answer import Documents
from app.api.batch.asking import Asking
from app.api.batch.route import by_answers, images_route
from app.api.context import RequestContext
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import Fraction, ModelParameters
from app.api.parameters.tasks import Url
from app.api.sight.faces import Face, to_faces
from app.api.sight.image import Answer, image_route
from app.api.sight.ocr import read_regions, texts_of
from app.cascade.answers import expect_vector
from app.cascade.definition import Cascade, Step
from app.cascade.named import PART_OF, all_parts
from app.cascade.run import CascadeAnswer, run_cascade
from app.errors import GatewayError, WrongTask
from app.model.heads import DetectionHead
from app.model.reference import refer_to, split_reference
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections


class _Parameters(ModelParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    include_embedding: Annotated[bool, Meta(description="Whether the image and each object get a vector.")] = False
    include_face_embeddings: Annotated[bool, Meta(description="Whether each face gets a vector.")] = False
    confidence: Annotated[Fraction, Meta(description="Minimum confidence of an object.")] = 0.25
    face_confidence: Annotated[Fraction, Meta(description="Minimum score of a face.")] = 0.5
    enable_ocr: Annotated[bool, Meta(description="Whether text is read.")] = True


class AnalyzeParameters(_Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for all that is known of one image; `model` is that of the objects."""

    url: Url = None


class AnalyzeBatchParameters(_Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for all that is known of several images; `model` is that of the objects."""

    enable_ocr: Annotated[bool, Meta(description="Whether text is read.")] = False
    include_full_results: Annotated[
        bool, Meta(description="Whether each result has its objects, faces, text and vector, and not only their numbers.")
    ] = False


class AnalyzedObject(msgspec.Struct):
    """An object in an image."""

    box: list[float]
    """x1 y1 x2 y2 as fractions of the upright image."""
    confidence: float
    class_id: int
    class_name: str
    embedding: list[float] | None = None


class AnalyzedText(msgspec.Struct, kw_only=True):
    """The text in an image: all lists have one entry for each line, in reading order."""

    texts: list[str]
    boxes: list[list[float]]
    """Four corners x y x y ..., in pixels of the upright image."""
    boxes_normalized: list[list[float]]
    """x1 y1 x2 y2 as fractions of the image."""
    det_scores: list[float]
    rec_scores: list[float]
    full_text: str
    num_texts: int


class PartFailure(msgspec.Struct):
    """Why a part of the answer is empty: as a request for this part alone would tell it."""

    code: str
    detail: str


class AnalyzeAnswer(Answer, kw_only=True):
    """All that is known of an image."""

    status: Literal["success", "partial"] = "success"
    """`partial` if a part failed, or its model is not there."""
    errors: dict[str, PartFailure]
    detections: list[AnalyzedObject] | None = field(default_factory=list)
    num_detections: int = 0
    faces: list[Face] | None = field(default_factory=list)
    """By descending score; none unless the gateway is set up for faces."""
    num_faces: int = 0
    global_embedding: list[float] | None = None
    embedding_norm: float | None = None
    ocr: AnalyzedText | None = None
    has_text: bool = False
    timing: dict[str, float] | None = None
    """Milliseconds of each step, which overlap."""
    error: None = None
    """Always null: present for clients of other gateways."""

    def complete(self, context: RequestContext) -> Answer:
        """Set what is measured; return the answer."""
        self.timing = {f"{step}_ms": round(end - begin, 2) for step, (begin, end) in context.timing.steps.items()}
        return super().complete(context)

    def totals(self) -> dict[str, int]:
        """Return what the image adds to the sums over a batch."""
        totals = {"total_detections": self.num_detections, "total_faces": self.num_faces}
        return totals | {"images_with_text": int(self.has_text)}


class AnalyzeDocument(Documents, frozen=True, kw_only=True):
    """What is known of several images."""

    results: list[AnalyzeAnswer]
    total_detections: int = 0
    total_faces: int = 0
    images_with_text: int = 0


def _detector(worker: WorkerResources, wanted: _Parameters) -> str:
    return refer_to(wanted.model or worker.pipeline.default_for(DetectionHead.task), wanted.version)


async def _ask(worker: WorkerResources, pipeline: Pipeline, image: bytes, wanted: _Parameters, call: CallContext) -> CascadeAnswer:
    """Ask about an image; the detector must be there: what is wrong with it is no failure of a part."""
    detector = _detector(worker, wanted)
    name, version = split_reference(detector)
    spec = await pipeline.prepare(pipeline.refer_to(name, version), call.deadline, call.caller)
    if not isinstance(spec.head, DetectionHead):
        raise WrongTask(f"{spec.name} is a {spec.head.noun}, not a {DetectionHead.noun}")
    steps = all_parts(
        worker,
        Step(model=detector, confidence=wanted.confidence),
        has_vectors=wanted.include_embedding,
        face_confidence=wanted.face_confidence if worker.deployment.has_faces else None,
        has_face_vectors=wanted.include_face_embeddings,
        has_text=wanted.enable_ocr,
    )
    return await run_cascade(pipeline, Cascade(name="analyze", steps=steps), image, call, worker.metrics)


def _to_answer(wanted: _Parameters, found: CascadeAnswer) -> AnalyzeAnswer:
    answer = AnalyzeAnswer(errors={}, image=ImageSize(found.width, found.height), truncated=found.truncated)
    for step, part in PART_OF.items():
        try:
            if step in found.steps:
                _describe(answer, found, step)
        except GatewayError as error:
            answer.errors[part] = PartFailure(error.code, error.detail)
    answer.status = "partial" if answer.errors else "success"
    if isinstance(wanted, AnalyzeBatchParameters) and not wanted.include_full_results:
        answer.detections = answer.faces = answer.global_embedding = answer.ocr = None
    return answer


def _describe(answer: AnalyzeAnswer, found: CascadeAnswer, name: str) -> None:
    step = found.require(name)
    match name:
        case "objects" if isinstance(result := step.results[0], Detections):
            answer.detections = list(starmap(AnalyzedObject, objects(result, "normalized")))
            answer.num_detections = len(answer.detections)
        case "image":
            own = expect_vector(step.results[0])
            answer.global_embedding, answer.embedding_norm = to_vector(own.vector), to_norm(own.norm)
        case "faces":
            answer.faces = to_faces(step.results[0])
            for face in answer.faces:
                face.embedding = None
            answer.num_faces = len(answer.faces)
        case "object_embeddings" | "descriptions":
            described: Sequence[AnalyzedObject | Face] = (answer.faces if name == "descriptions" else answer.detections) or ()
            for index, result in zip(step.objects, step.results, strict=True):
                described[index].embedding = to_vector(expect_vector(result).vector)
        case "text":
            regions = read_regions(found)
            answer.has_text = bool(regions)
            answer.ocr = AnalyzedText(
                boxes=[region.box for region in regions],
                boxes_normalized=[region.box_normalized for region in regions],
                det_scores=[region.det_score for region in regions],
                rec_scores=[region.rec_score for region in regions],
                **texts_of(regions),
            )


ROUTES = [
    image_route(
        "/analyze",
        DetectionHead.task,
        AnalyzeParameters,
        Asking(_detector, _ask),
        _to_answer,
        response=AnalyzeAnswer,
        summary="Find objects, faces and text in an image, and describe them by vectors",
        description="The image is decoded once, and its parts are answered side by side. A part that fails is empty, and `errors` "
        "says why; only if all fail, or the detector is not there, the request fails.",
    ),
    images_route(
        "/analyze/batch",
        DetectionHead.task,
        AnalyzeBatchParameters,
        Asking(_detector, _ask),
        by_answers(_to_answer, AnalyzeDocument),
        response=AnalyzeDocument,
        summary="Find objects, faces and text in several images",
    ),
]
