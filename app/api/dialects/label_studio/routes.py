"""The routes of Label Studio, and their responses."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from litestar import get, post
from litestar.di import NamedDependency
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope

from app.api.answering.native import to_scores
from app.api.answering.responses import JsonResponse, LargeResponse
from app.api.batch.body import ParsedBatch
from app.api.caller.check import require_key
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import (
    AnyRequest,
    ConfidenceParameters,
    Dialect,
    Fraction,
    detect_each,
    find_detector,
    receive_text,
)
from app.api.dialects.label_studio import tasks
from app.api.dialects.label_studio.labeling_config import DEFAULT_THRESHOLD, Control
from app.api.receiving.body import ParsedBody
from app.api.receiving.content_type import JSON, media_type
from app.api.routes import ModelRoute
from app.errors import GatewayError, ModelNotReady
from app.model.reference import refer_to
from app.pipeline.call import CallContext, Detections
from app.resilience.lease import Lease

_USER_AGENT = b"heartex/"
"""Prefix of Label Studio's `User-Agent`."""
_PERCENT_DIGITS = 4
_FEW_REGIONS = 100
"""Up to this many regions are encoded on the event loop; thousands take half a second."""
_REGION_BYTES = 1500
"""Memory of one region, as an object and in the response."""


class _Parameters(ConfidenceParameters, frozen=True, kw_only=True):
    confidence: Fraction = DEFAULT_THRESHOLD


@get("/health")
async def health(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> dict[str, str]:
    """Report whether the default model is ready."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    if not await worker.is_ready():
        raise ModelNotReady("the default model is not ready")
    return {"status": "UP", "model_class": "Nereid"}


@ModelRoute("/setup", takes="text", key_in="query")
async def setup(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> dict[str, str]:
    """Return the model of a project. Label Studio requests new predictions when it changes."""

    def parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBody:
        return ParsedBody(b"", _model_of(tasks.read_setup(data, content_type)))

    received = await receive_text(request, worker, _Parameters, parse)
    spec = await find_detector(worker, received.wanted.model, received.wanted.version, received.call)
    return {"model_version": refer_to(spec.name, spec.version)}


@ModelRoute("/predict", takes="images", key_in="query")
async def predict(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects in the images of tasks.

    If there are too many tasks, only the first one gets a prediction; Label Studio then requests each task separately.
    """
    controls: list[Control] = []

    def parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBatch:
        images, found = tasks.read_tasks(data, content_type, worker.pipeline.fetcher.origin)
        controls.extend(found)
        threshold = min(control.threshold for control in controls)
        timeout_ms = int(worker.pipeline.limits.max_timeout_seconds * 1e3)  # Label Studio waits for 100 s
        pairs = [*_model_of(controls), ("confidence", str(threshold)), ("timeout_ms", str(timeout_ms))]
        return ParsedBatch(images, [None] * len(images), pairs)

    async def respond(found: list[Detections | Exception], _: _Parameters, call: CallContext) -> ASGIResponse:
        pipeline = worker.pipeline
        regions = sum(len(each.scores) for each in found if not isinstance(each, Exception)) * len(controls)
        if regions <= _FEW_REGIONS and len(found) == 1:
            return JsonResponse(_describe(found, controls))
        with Lease() as lease:
            memory = pipeline.admission.memory.reserve()
            lease.on_release(memory.release)
            memory.add(regions * _REGION_BYTES)
            body = await pipeline.threads.run(partial(_describe, found, controls), call.deadline, lease)
        return LargeResponse(body, JSON, pipeline.admission.memory)

    return await detect_each(request, worker, _Parameters, parse, respond)


@post("/webhook", status_code=201)
async def webhook() -> dict[str, str]:
    """Ignore the events of a project: the gateway does not train models."""
    return {"status": "ok"}


def _model_of(controls: Sequence[Control]) -> list[tuple[str, str]]:
    """Return the first model that a control names, as a parameter; all controls use this model."""
    return [("model", control.model) for control in controls if control.model is not None][:1]


def _describe(found: Sequence[Detections | Exception], controls: Sequence[Control]) -> bytes:
    answered = [each for each in found if not isinstance(each, Exception)]
    # Includes classes without a label in the model's config, which are named by their ids.
    names = {each.spec.class_name(id_) for each in answered for id_ in np.unique(each.class_ids).tolist()}
    known = [*answered[0].spec.labels, *sorted(names)] if answered else []
    labels = [control.map_labels(known) for control in controls]
    return msgspec.json.encode({"results": [to_prediction(each, controls, labels) for each in found]})


def to_prediction(
    found: Detections | Exception, controls: Sequence[Control], labels: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Convert the detections in an image to regions, in percent of it, for the classes that the project has labels for.

    Label Studio logs an entry without `result` and continues with the next one.

    Args:
        found: The detections, or the error of the image.
        controls: The controls of the project.
        labels: For each control, its labels by class name.
    """
    if isinstance(found, Exception):
        return {"error": found.detail if isinstance(found, GatewayError) else "the failure has been logged"}
    sizes = np.array([found.width, found.height] * 2)
    percent = found.boxes.astype(np.float64) / sizes * 100
    percent[:, 2:] -= percent[:, :2]
    names = [found.spec.class_name(id_) for id_ in found.class_ids.tolist()]
    objects = list(zip(percent.round(_PERCENT_DIGITS).tolist(), to_scores(found.scores), names, strict=True))
    regions: list[dict[str, Any]] = [
        {
            "from_name": control.name,
            "to_name": control.to_name,
            "type": "rectanglelabels",
            "original_width": found.width,
            "original_height": found.height,
            "image_rotation": 0,
            "score": score,
            "value": {"x": x, "y": y, "width": width, "height": height, "rectanglelabels": (known[name],), "rotation": 0},
        }
        for control, known in zip(controls, labels, strict=True)
        for (x, y, width, height), score, name in objects
        if name in known and score >= control.threshold
    ]
    mean = sum(region["score"] for region in regions) / max(len(regions), 1)
    return {"model_version": refer_to(found.spec.name, found.version), "score": round(mean, 4), "result": regions}


def _is_label_studio(scope: HTTPScope) -> bool:
    """Return whether Label Studio sent a request to `/health`, a path that the gateway also has."""
    return any(name == b"user-agent" and value.startswith(_USER_AGENT) for name, value in scope["headers"])


def _is_json(scope: HTTPScope) -> bool:
    """Return whether a body is JSON: another dialect's `/predict` takes forms."""
    return media_type(context_of(scope).content_type) == JSON


DIALECT = Dialect(
    "label-studio",
    [health, setup, predict, webhook],
    applies={"/health": _is_label_studio, "/predict": _is_json},
)
