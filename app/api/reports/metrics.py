"""GET /metrics, and the metrics of requests."""

from litestar import get
from litestar.response.base import ASGIResponse

from app.api.context import AnyRequest, RequestContext
from app.api.dependencies import Worker, WorkerPipeline
from app.errors import DeadlinePassed
from app.resilience.fairness import Caller
from app.telemetry.metrics import Metrics, render
from app.telemetry.timing import WAITS, Timing
from app.triton.metrics import triton_metrics


@get("/metrics", include_in_schema=False)
async def metrics(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Return the metrics of all workers of this host in a Prometheus format."""
    pipeline.sample()
    families = [*worker.metrics.collect(), *triton_metrics(worker.metrics.table)]
    text, content_type = render(families, request.headers.get("accept", ""))
    return ASGIResponse(body=text, headers={"Content-Type": content_type})


def count_batch_image(metrics: Metrics, timing: Timing, caller: Caller, status: int) -> None:
    """Count an image of a batch that has ended."""
    metrics.batch_images.add(1, str(status))
    _observe_stages(metrics, timing, caller)


def count_request(metrics: Metrics, context: RequestContext, endpoint: str, status: int, milliseconds: float) -> None:
    """Count a request that has ended."""
    metrics.requests.add(1, endpoint, str(status))
    metrics.request_seconds.observe(milliseconds / 1e3, endpoint)
    _observe_stages(metrics, context.timing, context.caller)
    if context.error:
        metrics.errors.add(1, context.error)
        if context.rejection_reason:
            metrics.rejections.add(1, context.rejection_reason)
        elif context.error == DeadlinePassed.code:
            metrics.deadlines_missed.add(1, context.failed_stage)


def _observe_stages(metrics: Metrics, timing: Timing, caller: Caller) -> None:
    stages = timing.stages.copy()  # a thread may still record a stage
    metrics.stage_seconds.observe_all([(milliseconds / 1e3, (stage,)) for stage, milliseconds in stages.items()])
    if waits := stages.keys() & WAITS:
        label = metrics.caller_label(caller.name)
        metrics.queue_seconds.observe_all([(stages[stage] / 1e3, (stage, label)) for stage in waits])
