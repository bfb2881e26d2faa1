"""HTTP in, JSON out: detection and the list of models."""

from urllib.parse import parse_qsl

import msgspec
from litestar import get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from app import body, parameters
from app.dependencies import AnyRequest, the_detector
from app.detector import Detector
from app.envelope import exchange
from app.errors import GatewayError
from app.guards import require_picture
from app.openapi import PROBLEMS, UNAVAILABLE, DetectOperation
from app.schema import DetectResponse, ImageSize, ModelInfo, ModelList, ModelUsed

_RESPONSES = {200: ResponseSpec(DetectResponse, description="What was found", generate_examples=False), **PROBLEMS}


@post(
    "/detect",
    summary="Find objects in a picture",
    before_request=require_picture,
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def detect(request: AnyRequest) -> ASGIApp:
    """Detect with the default model, or with the one the parameters name."""
    return await _detect(request, [])


@post(
    "/predict/{model:str}",
    summary="Find objects in a picture with a given model",
    before_request=require_picture,
    operation_class=DetectOperation,
    responses=_RESPONSES,
    status_code=200,
)
async def predict(request: AnyRequest, model: FromPath[str]) -> ASGIApp:
    """Detect with the model in the path."""
    return await _detect(request, [("model", model)])


@get("/models", summary="List the models that can be asked, and those that could be pulled", responses=UNAVAILABLE)
async def models(request: AnyRequest) -> ModelList:
    """Describe every model Triton knows, by its contract."""
    detector = the_detector(request)
    states = dict.fromkeys(detector.pullable, "") | await detector.triton.models()
    return ModelList(detector.default_model, [await _described(detector, name, states[name]) for name in sorted(states)])


async def _detect(request: AnyRequest, pairs: list[tuple[str, str]]) -> ASGIApp:
    this = exchange(request.scope)
    pairs = [*pairs, *parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True)]
    wanted = parameters.parse(pairs)  # a bad query is refused before the body is read
    sent = await body.read(request)
    if sent.pairs:
        wanted = parameters.parse([*pairs, *sent.pairs])
    this.stages.lap("read")
    found = await the_detector(request).detect(sent.file, wanted, this.stages, this.id)
    this.notes |= {"model": found.model.name, "bytes": len(sent.file), "detections": len(found.detections)}
    answer = DetectResponse(
        detections=found.detections,
        num_detections=len(found.detections),
        status="success",
        image=ImageSize(found.width, found.height),
        model=ModelUsed(found.model.name, found.version, "triton", found.model.device),
        total_time_ms=round(this.stages.total, 2),
        request_id=this.id,
    )
    return ASGIResponse(body=msgspec.json.encode(answer))


async def _described(detector: Detector, name: str, state: str) -> ModelInfo:
    if not state and name in detector.pullable:
        return ModelInfo(name, "not_pulled", detail=f"./just pull {name}, then start Triton again")
    if state != "READY":
        return ModelInfo(name, "not_ready")
    try:
        contract = await detector.triton.contract(name)
    except GatewayError as error:
        return ModelInfo(name, "ready", detail=error.detail)
    return ModelInfo(
        name,
        "ready",
        version=contract.version,
        width=contract.frame[0],
        height=contract.frame[1],
        layout=contract.layout.value,
        device=contract.device,
        classes=list(contract.labels),
        source=contract.source,
        licence=contract.licence,
    )
