"""Is it alive, can it be asked, and how is it doing."""

import resource
from pathlib import Path

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec

from app import __version__, image
from app.dependencies import AnyRequest, the_detector
from app.envelope import exchange
from app.errors import GatewayError
from app.schema import Health, Liveness, Memory, Performance, Readiness, TritonHealth

_RETRY = {"Retry-After": "1"}
_NOT_READY = {503: ResponseSpec(Readiness, description="It cannot", generate_examples=False)}
_UNHEALTHY = {503: ResponseSpec(Health, description="No picture could be served", generate_examples=False)}


@get("/livez", summary="The process answers")
async def livez() -> Liveness:
    """Say so, whatever else is down."""
    return Liveness("alive")


@get("/readyz", summary="The default model can be asked", responses=_NOT_READY)
async def readyz(request: AnyRequest) -> Response[Readiness]:
    """Ask Triton for the default model."""
    detector = the_detector(request)
    is_ready = await detector.triton.is_ready(detector.default_model)
    return Response(
        Readiness("ready" if is_ready else "not_ready"), status_code=200 if is_ready else 503, headers={} if is_ready else _RETRY
    )


@get("/health", summary="How the gateway and Triton are doing", responses=_UNHEALTHY)
async def health(request: AnyRequest) -> Response[Health]:
    """Collect what a person or a dashboard wants to see."""
    detector = the_detector(request)
    gpu = is_ready = False
    triton = TritonHealth("unreachable")
    try:
        triton = TritonHealth("not_ready", await detector.triton.version())
        gpu = (await detector.triton.contract(detector.default_model)).device == "gpu"
        is_ready = await detector.triton.is_ready(detector.default_model)
    except GatewayError as error:
        exchange(request.scope).notes["detail"] = error.detail
    if is_ready:
        triton = TritonHealth("ready", triton.version)
    rss_mb = _rss_mb()
    report = Health(
        status="healthy" if is_ready else "unhealthy",
        version=__version__,
        api="healthy",
        triton=triton,
        model=detector.default_model,
        model_ready=is_ready,
        gpu=gpu,
        memory=Memory(rss_mb),
        performance=Performance(
            memory_mb=rss_mb,
            optimizations={
                "pillow_simd": image.is_simd(),
                "transport": detector.transport.in_force,
            },
        ),
    )
    return Response(report, status_code=200 if is_ready else 503, headers={} if is_ready else _RETRY)


def _rss_mb() -> float:
    """Resident memory of this process, MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * resource.getpagesize() / 1e6, 1)
