"""The dialect of NVIDIA NIM for Object Detection 1.x, the endpoint type `image_retrieval` of `aiperf`.

Source: NVIDIA's API reference of NIM for Object Detection; nim_image_retrieval.py of ai-dynamo/aiperf; model_interface/yolox.py and
helpers.py of NVIDIA/nv-ingest.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import msgspec
from litestar import get
from litestar.response.base import ASGIResponse

from app import __version__
from app.api.answering.native import objects
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import ModelList
from app.api.batch.answer import ImagesAnswer
from app.api.batch.body import ParsedBatch, decode_text, split_images
from app.api.caller.check import require_key
from app.api.context import AnyRequest
from app.api.dependencies import Worker, WorkerPipeline
from app.api.dialects.dialect import Dialect, DialectParameters, answer_each, detectors
from app.api.parameters.parse import Fraction
from app.api.receiving.body import parse_document
from app.api.receiving.content_type import JSON, body_type
from app.api.reports.models import list_models
from app.api.routes import ModelRoute, route_of
from app.errors import MalformedRequest, ModelNotReady, UnsupportedMediaType
from app.model.reference import split_reference
from app.pipeline.call import MAX_DETECTIONS, CallContext, DetectOptions
from app.pipeline.results import Detections

_EXAMPLE = '{"input": [{"type": "image_url", "url": "data:image/jpeg;base64,..."}], "threshold": 0.4}'
_EXPECTED = f"expected a JSON object such as {_EXAMPLE}"


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    confidence: Fraction = msgspec.field(default=0.25, name="threshold")

    @property
    def options(self) -> DetectOptions:
        return DetectOptions(self.model, self.confidence, None, MAX_DETECTIONS, version=self.version)


class _Image(msgspec.Struct):
    type: Literal["image_url"]
    url: str


@ModelRoute("/v1/infer", takes="images", key_in="query")
async def infer(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Detect objects in up to 64 images. If one image fails, the request fails."""
    nbytes = 0

    def parse(data: bytes, content_type: str, kind: type[_Parameters]) -> ParsedBatch:
        nonlocal nbytes
        if body_type(content_type, data) != JSON:
            raise UnsupportedMediaType(f"send {JSON}, such as {_EXAMPLE}")
        content, pairs = parse_document(data, "input", kind, _EXPECTED)
        images = [decode_text(each.url) for each in split_images(content, _Image, _EXPECTED)]  # data URLs, or addresses
        if not images:
            raise MalformedRequest(f"the list of inputs is empty; {_EXPECTED}")
        nbytes = sum(len(image) for image in images if isinstance(image, bytes))
        return ParsedBatch(images, [None] * len(images), [pair for pair in pairs if pair[0] in {"threshold", "model"}])

    async def respond(answer: ImagesAnswer[Detections, Detections], _: _Parameters, call: CallContext) -> JsonResponse:
        describe = partial(_describe, found := answer.all(), nbytes)
        if len(found) == 1:
            return JsonResponse(describe())
        # Encoding thousands of objects takes 0.1 s.
        return JsonResponse(await pipeline.threads.run(describe, call.deadline, turn=call.turn()))

    return await answer_each(request, worker, pipeline, _Parameters, parse, respond)


@get(["/v1/health/live", "/v1/health/ready"])
async def health(request: AnyRequest, worker: Worker) -> dict[str, str]:
    """Liveness probe and readiness probe, as `/livez` and `/readyz`."""
    state = route_of(request.scope).rpartition("/")[2]
    if state == "ready" and not await worker.is_ready():
        raise ModelNotReady("the service is not ready")
    return {"message": f"Service is {state}.", "object": "health.response"}


@get("/v1/models")
async def models(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ModelList:
    """List the models in the gateway's own format, which contains the members that NIM's clients read."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    return await list_models(pipeline)


@get("/v1/metadata")
async def metadata(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """Describe the service. The default model is first, because clients use only the first one."""
    specs = await detectors(request, worker, pipeline)
    specs.sort(key=lambda spec: spec.name != split_reference(pipeline.default_reference)[0])
    info = [{"shortName": f"{spec.name}:{spec.version}", "modelUrl": spec.source} for spec in specs]
    return {"version": __version__, "modelInfo": info, "assetInfo": []}


def _describe(found: Iterable[Detections], nbytes: int) -> bytes:
    data = []
    for index, each in enumerate(found):
        boxes = defaultdict(list)
        for (x_min, y_min, x_max, y_max), score, _, name in objects(each, "normalized"):
            boxes[name].append({"x_min": x_min, "y_min": y_min, "x_max": x_max, "y_max": y_max, "confidence": score})
        data.append({"index": index, "bounding_boxes": boxes})
    return msgspec.json.encode({"data": data, "usage": {"images_size_mb": round(nbytes / 1e6, 6)}})


DIALECT = Dialect(
    "nim",
    [infer, health, models, metadata],
    applies={"/v1/models": lambda _: False},  # the gateway's own route gives the same response
)
