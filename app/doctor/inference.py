"""Measures inferences of a model, with Triton's statistics before and after.

They must not harm a Triton in use: they are made one by one, and none is cancelled, because that could crash an old Triton.
"""

import asyncio
from collections.abc import AsyncIterator
from statistics import median, quantiles
from time import perf_counter

from app.doctor.batching import check_delay
from app.doctor.finding import Finding, count, failure, ok, warning
from app.errors import GatewayError, InferenceFailed, InvalidModelOutput
from app.imaging.transform import ImageTransform
from app.model.spec import ModelSpec
from app.model.triton_config import ModelConfig
from app.pipeline.call import decode
from app.pipeline.probe import blank_input
from app.triton.client import TritonClient
from app.triton.statistics import ModelStatistics, read_statistics
from app.triton.status import ModelDied, Unanswered, own_message

_RUNS = 3
_QUEUE_SECONDS = 30.0
_STATISTICS_SECONDS = 2.0
# Longer than the time in the queue, so that only the inferences of a hanging Triton are abandoned.
_PATIENCE_SECONDS = 60.0
# Frigate's ZMQ detector waits this long by default. Source: frigate/detectors/plugins/zmq_ipc.py
_FRIGATE_SECONDS = 0.2
_FRIGATE_RUNS, _FRIGATE_TOTAL_SECONDS = 100, 5.0
# Images per second of a camera, Frigate's default `detect: fps`.
_CAMERA_RATE = 5


async def measure(
    client: TritonClient, spec: ModelSpec, model: ModelConfig, file: str, timeout_seconds: float
) -> AsyncIterator[Finding]:
    """Run inferences one by one, and check how long they take. The fixes name the config file."""
    try:
        await _run(client, spec)  # it also warms up the model
        before = await _read_counters(client, spec)
        seconds = median([await _run(client, spec) for _ in range(_RUNS)])
        after = await _read_counters(client, spec)
    except (GatewayError, InvalidModelOutput) as error:
        if spec.dtype is None and isinstance(error, InferenceFailed):
            yield ok("inference", f"{spec.name} takes encoded files, but not a blank PNG: nothing was measured")
        else:
            yield failed_inference(spec.name, error)
        return
    counted = None if before is None or after is None else after.since(before)
    text = f"{spec.name} answers on {spec.device} in {seconds * 1e3:.1f} ms, one request at a time"
    if seconds < timeout_seconds:
        yield ok("inference", text)
    else:
        fix = "a smaller model or a faster device, or a longer NEREID_TIMEOUT_SECONDS"
        yield failure("inference", f"{text}: later than the deadline of {timeout_seconds:g} s", fix)
    if counted is None:
        text = "Triton does not tell its statistics: its batches and queues cannot be watched"
        yield warning("statistics", text, "do not restrict the protocol `statistics`, or restrict it with the key of the others")
    yield check_delay(model, file, counted.inference_ms if counted else None)


async def measure_for_frigate(client: TritonClient, spec: ModelSpec) -> Finding:
    """Check whether answers come while Frigate's ZMQ detector waits, and for how many cameras, one image at a time."""
    took: list[float] = []
    try:
        while len(took) < _RUNS or (len(took) < _FRIGATE_RUNS and sum(took) < _FRIGATE_TOTAL_SECONDS):
            took.append(await _run(client, spec))
    except (GatewayError, InvalidModelOutput) as error:
        return failed_inference(spec.name, error)
    late, cameras = quantiles(took, n=100, method="inclusive")[-1], int(len(took) / sum(took) / _CAMERA_RATE)
    text = (
        f"p99 of {len(took)} inferences is {late * 1e3:.0f} ms, and Frigate's ZMQ detector waits {_FRIGATE_SECONDS * 1e3:.0f} ms; "
        f"this is enough for {count(cameras, 'camera')} of {_CAMERA_RATE} images/s"
    )
    if late <= _FRIGATE_SECONDS and cameras:
        return ok("frigate", text)
    return warning(
        "frigate", text, "request_timeout_ms: 1000 in Frigate's detector, a smaller `detect: fps`, or a faster model or device"
    )


def failed_inference(name: str, error: GatewayError) -> Finding:
    """Return the finding for a model whose inference has failed."""
    if not isinstance(error, ModelDied):
        fix = "Triton's log has the reason; run the model's file outside Triton with the same input"
        return failure("inference", f"an inference of {name} fails: {own_message(error)}", fix)
    text = f"Triton says that {name} is ready, but rejects it, because a process of it has died: {own_message(error)}"
    fix = "start Triton again; `nereid serve` does so once a request has met the dead process, at most once a minute"
    return failure("model_process", text, fix)


async def _run(client: TritonClient, spec: ModelSpec) -> float:
    start = perf_counter()
    call = asyncio.ensure_future(client.infer(spec, [blank_input(spec)], timeout_seconds=_QUEUE_SECONDS, request_id="doctor"))
    done, _ = await asyncio.wait({call}, timeout=_PATIENCE_SECONDS)
    seconds = perf_counter() - start
    if not done:
        raise Unanswered(f"no answer for {_PATIENCE_SECONDS:g} s")
    decode(spec, call.result(), ImageTransform(0, 0, *spec.input_size, *spec.input_size))
    return seconds


async def _read_counters(client: TritonClient, spec: ModelSpec) -> ModelStatistics | None:
    try:
        return (await read_statistics(client, _STATISTICS_SECONDS)).get((spec.name, spec.version))
    except GatewayError:
        return None
