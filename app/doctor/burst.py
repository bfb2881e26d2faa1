"""Measurements of a model: inferences one by one, then many at once, with Triton's statistics before and after.

They must not harm a Triton in use: number, size and duration of the inferences are limited, and none is cancelled, because that
could crash an old Triton.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from time import perf_counter
from typing import NamedTuple

from app.doctor.batching import Scheduling, check_delay
from app.doctor.finding import Finding, failure, ok, warning
from app.errors import GatewayError, InferenceFailed, InvalidModelOutput
from app.model.spec import ModelSpec
from app.pipeline.probe import blank_input, check_result
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.statistics import ModelStatistics, read_statistics
from app.triton.status import ModelDied, Unanswered, own_message

_ALONE = 3
_MOST, _FEWEST = 32, 4
_MOST_BYTES = 64 << 20
# Estimated from the duration of a single inference.
_MOST_SECONDS = 3.0
_QUEUE_SECONDS = 30.0
_STATISTICS_SECONDS = 2.0
# Longer than the time in the queue, so that only the inferences of a hanging Triton are abandoned.
_PATIENCE_SECONDS = 60.0
# Smaller average batches count as single images.
_SMALLEST_BATCH = 1.5


class Run(NamedTuple):
    """Inferences of blank images."""

    images: int
    seconds: float
    answers: list[InferResult]
    errors: list[GatewayError]
    counted: ModelStatistics | None
    """Triton's statistics of this time, including other clients' images; None if it does not report them."""


async def measure(  # noqa: PLR0913 - what is known of the model
    client: TritonClient, spec: ModelSpec, model: Scheduling, file: str, timeout_seconds: float, *, with_burst: bool
) -> AsyncIterator[Finding]:
    """Run inferences one by one, and many at once if `with_burst`, and check the measurements. The fixes name the config file."""
    if problem := _find_problem(spec, await _run(client, spec, 1)):  # it also warms up the model
        yield problem
        return
    runs = [await _run(client, spec, 1) for _ in range(_ALONE)]
    alone = sorted(runs, key=lambda run: run.seconds)[_ALONE // 2]
    text = f"{spec.name} answers on {spec.device} in {alone.seconds * 1e3:.1f} ms, one request at a time"
    if alone.seconds < timeout_seconds:
        yield ok("inference", text)
    else:
        fix = "a smaller model or a faster device, or a longer NEREID_TIMEOUT_SECONDS"
        yield failure("inference", f"{text}: later than the deadline of {timeout_seconds:g} s", fix)
    if alone.counted is None:
        text = "Triton does not tell its statistics: its batches and queues cannot be watched"
        yield warning("statistics", text, "do not restrict the protocol `statistics`, or restrict it with the key of the others")
    yield check_delay(model, file, alone.counted.inference_ms if alone.counted else None)
    images = _burst_size(spec, model, alone.seconds)
    if not with_burst:
        yield ok("burst", "left out, as asked")
    elif images < _FEWEST:
        yield ok("burst", f"left out: it would take more than {_MOST_SECONDS:g} s, or half of the model's queue")
    else:
        for finding in judge(await _run(client, spec, images), model, file):
            yield finding


def _find_problem(spec: ModelSpec, run: Run) -> Finding | None:
    """Return a finding if an inference failed; None if it succeeded."""
    error = run.errors[0] if run.errors else None
    if error is None:
        try:
            check_result(spec, run.answers[0])
        except InvalidModelOutput as invalid:
            error = invalid
    if error is None:
        return None
    if spec.dtype is None and isinstance(error, InferenceFailed):
        return ok("inference", f"{spec.name} takes encoded files, but not a blank PNG: nothing was measured")
    return failed_inference(spec.name, error)


def failed_inference(name: str, error: GatewayError) -> Finding:
    """Return the finding for a model whose inference has failed."""
    if not isinstance(error, ModelDied):
        fix = "Triton's log has the reason; run the model's file outside Triton with the same input"
        return failure("inference", f"an inference of {name} fails: {own_message(error)}", fix)
    text = f"Triton says that {name} is ready, but rejects it, because a process of it has died: {own_message(error)}"
    fix = "start Triton again; `nereid serve` does so once a request has met the dead process, at most once a minute"
    return failure("model_process", text, fix)


def _burst_size(spec: ModelSpec, model: Scheduling, alone_seconds: float) -> int:
    """Return the number of images to send at once."""
    queue = model.max_queue_size // 2 if model.max_queue_size else _MOST  # leave the rest to other clients
    return min(_MOST, queue, _MOST_BYTES // blank_input(spec).nbytes, int(_MOST_SECONDS / alone_seconds))


def judge(run: Run, model: Scheduling, file: str) -> Iterator[Finding]:
    """Check the measurements of a burst."""
    text = f"{run.images} images at once took {run.seconds:.2f} s"
    if run.errors:
        fix = f"raise max_queue_size in {file} if its queue was full; else Triton's log has the reason"
        yield warning("burst", f"{text}, and {len(run.errors)} of them failed: {own_message(run.errors[0])}", fix)
        return
    counted = run.counted
    if counted is None:
        yield ok("burst", f"{text}, {run.images / run.seconds:.0f} a second")
        return
    if counted.inferences > run.images:
        text = f"{text}, beside {counted.inferences - run.images} of others"
    yield ok(
        "burst",
        f"{text}, {run.images / run.seconds:.0f} a second; on average batches of {counted.batch_size:.1f}, "
        f"{counted.queue_ms:.1f} ms in the queue, {counted.inference_ms:.1f} ms of inference",
    )
    if model.max_batch_size > 1 and counted.batch_size < _SMALLEST_BATCH and counted.queue_ms >= counted.inference_ms:
        text = (
            f"batches of {model.name} stay at {counted.batch_size:.1f} images, though {model.max_batch_size} fit, while requests "
            f"wait {counted.queue_ms:.0f} ms in the queue for inferences of {counted.inference_ms:.0f} ms"
        )
        missing = "add dynamic_batching, as the finding `batching` says"
        fix = missing if model.dynamic_batching is None else f"set a lower count in instance_group in {file}"
        yield warning("batch_size", text, fix)


async def _run(client: TritonClient, spec: ModelSpec, images: int) -> Run:
    """Send images concurrently, one per request, and wait for all results."""
    tensor = blank_input(spec)
    before = await _read_counters(client, spec)
    start = perf_counter()
    calls = [
        asyncio.ensure_future(client.infer(spec, [tensor], timeout_seconds=_QUEUE_SECONDS, request_id="doctor"))
        for _ in range(images)
    ]
    done, silent = await asyncio.wait(calls, timeout=_PATIENCE_SECONDS)
    seconds = perf_counter() - start
    after = await _read_counters(client, spec)
    answers: list[InferResult] = []
    errors: list[GatewayError] = [Unanswered(f"no answer for {_PATIENCE_SECONDS:g} s") for _ in silent]
    for finished in done:
        try:
            answers.append(finished.result())
        except GatewayError as error:
            errors.append(error)
    counted = None if before is None or after is None else after.since(before)
    return Run(images, seconds, answers, errors, counted)


async def _read_counters(client: TritonClient, spec: ModelSpec) -> ModelStatistics | None:
    try:
        return (await read_statistics(client, _STATISTICS_SECONDS)).get((spec.name, spec.version))
    except GatewayError:
        return None
