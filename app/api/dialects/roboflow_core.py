"""What Roboflow's server calls core models: the text in images, and vectors that describe images.

Source: roboflow/inference, inference/core/entities/responses/{ocr,clip}.py and inference/models/; inference_sdk/http/client.py.
"""

from typing import Any

from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import ASGIResponse

from app.api.answering.native import respond_in_thread, to_vector
from app.api.batch.answer import ImagesAnswer
from app.api.batch.asking import Asking, by_cascade
from app.api.context import AnyRequest, RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.dialects.dialect import READING, DialectParameters, answer_each
from app.api.dialects.roboflow_answers import random_uuid
from app.api.dialects.roboflow_images import InferenceBody
from app.api.routes import ModelRoute
from app.api.sight.ocr import box_of, read_regions
from app.cascade.definition import Cascade
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.errors import NotOffered, UnknownModel
from app.model.heads import Task
from app.pipeline.call import CallContext, TaskOptions
from app.pipeline.results import Embedding


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    generate_bounding_boxes: bool | None = None
    url: str | None = None

    @property
    def options(self) -> TaskOptions[Embedding]:  # only of the route for vectors
        return TaskOptions("embedding", "clip")


def _reading(name: str) -> Asking[Any, CascadeAnswer]:
    """Read with the cascade of a name that Roboflow gives to its readers; other models would read something else."""

    def choose(worker: WorkerResources, _: object) -> Cascade:
        if worker.catalog.get(name) is None:
            raise NotOffered(
                f"this gateway has no {name}: text is read at /ocr/pp-ocr, or by a cascade {name} with the steps lines and text"
            )
        return named_cascade(worker, name, "lines", "text")

    return by_cascade(choose)


def _text_route(path: str, asking: Asking[Any, CascadeAnswer], *, has_boxes: bool) -> HTTPRouteHandler:
    """Make a route for text. Whether the circuit is open is known before the body only of the models of the settings."""
    task: Task | None = "text_detection" if asking is READING else None

    async def read(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        """Read the text in an image, or in each of a list of images. If one image fails, the request fails."""
        body, context = InferenceBody(), context_of(request.scope)

        async def respond(answer: ImagesAnswer[Any, CascadeAnswer], wanted: _Parameters, call: CallContext) -> ASGIResponse:
            found = answer.all()
            shows = has_boxes if wanted.generate_bounding_boxes is None else wanted.generate_bounding_boxes

            def describe() -> object:
                described = [_to_text(one, context, has_boxes=shows) for one in found]
                return described if body.is_list else described[0]

            return await respond_in_thread(describe, pipeline, call)

        return await answer_each(request, worker, pipeline, _Parameters, body.parse, respond, asking)

    return ModelRoute(path, task=task, takes="images", key_in="body")(read)


@ModelRoute("/clip/embed_image", task=None, takes="images", key_in="body")
async def embed_image(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Describe an image, or each of a list of images, by a vector. If one image fails, the request fails."""

    async def respond(answer: ImagesAnswer[Any, Embedding], _: _Parameters, call: CallContext) -> ASGIResponse:
        found, context = answer.all(), context_of(request.scope)

        def describe() -> object:
            about = {"inference_id": context.request_id, "frame_id": None, "time": _seconds(context)}
            return {**about, "embeddings": [to_vector(one.vector) for one in found]}

        return await respond_in_thread(describe, pipeline, call)

    try:
        return await answer_each(request, worker, pipeline, _Parameters, InferenceBody().parse, respond)
    except UnknownModel as error:
        raise NotOffered(
            "this gateway has no model clip, which has to be added; /embed/image describes images, by vectors of another model"
        ) from error


@post(["/clip/embed_text", "/clip/compare"])
async def no_texts() -> None:
    """Say what describes texts."""
    raise NotOffered("texts are not described by CLIP here; /embed/text describes them, by a model that has to be added")


def _to_text(found: CascadeAnswer, context: RequestContext, *, has_boxes: bool) -> dict[str, Any]:
    """Describe the lines of an image, in reading order; centre and size in pixels of the upright image."""
    regions = read_regions(found, 0)
    predictions = [
        {
            "x": (x1 + x2) / 2,
            "y": (y1 + y2) / 2,
            "width": x2 - x1,
            "height": y2 - y1,
            "confidence": region.rec_score,
            "class": region.text,
            "class_confidence": None,
            "class_id": 0,
            "tracker_id": None,
            "detection_id": random_uuid(),
            "parent_id": None,
        }
        for region, (x1, y1, x2, y2) in zip(regions, map(box_of, regions), strict=True)
    ]
    return {
        "result": "\n".join(region.text for region in regions),
        "image": {"width": found.width, "height": found.height} if has_boxes else None,
        "predictions": predictions if has_boxes else None,
        "time": _seconds(context),
        "parent_id": None,
    }


def _seconds(context: RequestContext) -> float:
    return round(context.timing.total / 1e3, 6)


ROUTES = [
    _text_route("/doctr/ocr", _reading("doctr"), has_boxes=False),
    _text_route("/ocr/pp-ocr", READING, has_boxes=True),
    _text_route("/easy_ocr/ocr", _reading("easy_ocr"), has_boxes=True),
    embed_image,
    no_texts,
]
