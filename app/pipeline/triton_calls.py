"""Call Triton, retry calls that failed, and open and close the circuits of models according to the outcomes."""

import asyncio
import math
import random
from collections.abc import Callable
from functools import partial
from time import monotonic

from app.errors import (
    DeadlinePassed,
    GatewayError,
    InferenceFailed,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
    UnknownModel,
)
from app.model.spec import ModelSpec
from app.pipeline.batch import LATE, Batch, Call, PendingImage
from app.pipeline.examiner import Examiner
from app.pipeline.probe import run_probe
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.concurrency import BatchTimes
from app.resilience.retry_budget import RetryBudget
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall, ModelOnServer
from app.triton.pool import TritonPool
from app.triton.shared_memory import Slot
from app.triton.silence import QUIET_SECONDS
from app.triton.status import (
    Disconnected,
    Draining,
    ModelDied,
    ModelFailed,
    Overloaded,
    Refused,
    Unanswered,
    UnknownRegion,
    Unreachable,
    WrongAnswer,
)

WRONG = "Triton answers wrongly with this model, and has not recovered yet"
# Maximum delay of a retry, doubled for each preceding failure in a row, up to the second value.
_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 1.0
# This many consecutive missed deadlines open the circuit if Triton answers nothing at all.
_MISSED = 5
# The connection broke, or Triton is stopping. The same address may answer a moment later.
_INTERRUPTED = (Unreachable, Disconnected, Draining)
# Errors that open the circuit immediately if another Triton works.
_LOST = (*_INTERRUPTED, Refused)
# Errors after which a call is retried at another Triton, if any; the values are labels of the retry metric.
_REASONS: dict[type[GatewayError], str] = {
    Unreachable: "unreachable",
    Disconnected: "disconnected",
    Draining: "draining",
    ModelDied: "model_died",
    ModelFailed: "model_failed",
    Refused: "refused",
    Overloaded: "overloaded",
    WrongAnswer: "wrong_answer",
    ModelNotReady: "not_ready",
    UnknownModel: "not_ready",
}
_NOT_ANSWERED = tuple(_REASONS)
_UNKNOWN_REGION = "unknown_region"  # another such label


class TritonCalls:
    """Calls the Tritons of a pool.

    Each model has a circuit for each Triton. Failed calls open it, and Triton gets no calls for the model until a probe succeeds.
    A call is only cancelled if Triton is known to survive that and reads no slot.
    """

    def __init__(self, pool: TritonPool, metrics: Metrics, max_calls: Callable[[ModelSpec], float], hang_seconds: float) -> None:
        """Start without calls. `max_calls` is as `calls_per_worker`, for a spec.

        A call without an answer for `hang_seconds` has failed, unless Triton has answered others for its model.
        """
        self.pool = pool
        self.metrics = metrics
        self._max_calls = max_calls
        self._hang_seconds = hang_seconds
        self._retries = RetryBudget()
        self.examiner = Examiner(pool, metrics, self.circuit)
        for reason in (*_REASONS.values(), _UNKNOWN_REGION):
            metrics.retries.add(0, reason)  # exported before the first one

    def find(self, spec: ModelSpec, more_calls: int = 0) -> ModelOnServer | None:
        """Select the Triton for the next call for a model; None while all have the allowed calls and `more_calls`."""
        served = self.pool.find(spec, self._max_calls, more_calls)
        if served is not None and served.circuit is None:
            self.circuit(served, spec)  # creates it, because other workers may have opened it
        return served

    async def infer(self, batch: Batch, in_flight: InFlightCall) -> list[InferResult]:
        """Run the inference of a batch, with at most one retry, which may move the call; return the result of each image.

        Raises ModelNotReady if the model has been unloaded, ModelReplaced, and the errors of `TritonClient.infer`.
        """
        spec, images = batch.spec, len(batch.images)
        self._retries.note_requests(images)
        self.metrics.batch_size.observe(images, spec.reference)
        try:
            result = await self._try(batch, in_flight)
        except GatewayError as error:
            self._note_end(batch, in_flight, error)
            if isinstance(error, UnknownModel):
                raise ModelNotReady("the model is not loaded any more") from error
            if isinstance(error, InferenceFailed):  # a model that has replaced this one may need another input
                await in_flight.served.server.specs.confirm(spec, spec.version)
            raise
        self._note_end(batch, in_flight, None)
        await in_flight.served.server.specs.confirm(spec, result.version)
        return result.split(spec, images)

    def abandon(self, image: PendingImage, call: Call | None) -> None:
        """Record that a request has left without a result, and cancel its call (None if it was still waiting) if possible."""
        waited = monotonic() - image.ready_at
        goes_on = call is not None and (call.in_flight.reads_slot or not call.in_flight.served.server.client.survives_cancel)
        if call is not None and not goes_on and call.batch.is_abandoned:
            call.task.cancel()
        if self._note_missed(image, call):
            return
        if call is not None and goes_on:
            timer = asyncio.get_running_loop().call_later(self._hang_seconds - waited, self._note_hang, image, call, goes_on)
            call.task.add_done_callback(lambda _: timer.cancel())
        elif waited > self._hang_seconds / 2:  # a shorter wait is no sign of a hang
            self._note_hang(image, call, goes_on)

    async def _try(self, batch: Batch, in_flight: InFlightCall) -> InferResult:
        slot = self.pool.transport.find(in_flight.served.server.regions, batch.slot)
        first = in_flight.served
        try:
            try:
                return await self._call(batch, in_flight, slot)
            except UnknownRegion:  # Triton was restarted, and has not run the model: the retry costs it nothing
                reason = _UNKNOWN_REGION
                slot = await self._restore_slot(batch, in_flight, slot)
        except _NOT_ANSWERED as error:
            reason = _REASONS[type(error)]
            slot = None
            if self._move(batch, in_flight, error):
                slot = self.pool.transport.find(in_flight.served.server.regions, batch.slot)
            elif not await self._may_retry(batch, in_flight, error):
                raise  # here, because the error and the frame of a function that gets and raises it would form a reference cycle
        if batch.remaining_seconds <= 0:
            raise DeadlinePassed(LATE)
        self.metrics.retries.add(1, reason)
        result = await self._call(batch, in_flight, slot)
        if reason == _REASONS[ModelFailed]:  # so the images are not the cause
            self._note_failure(first, batch.spec)
        return result

    async def _restore_slot(self, batch: Batch, in_flight: InFlightCall, slot: Slot | None) -> Slot | None:
        if slot is None or batch.remaining_seconds <= 0:
            return None
        try:
            return slot if await in_flight.served.server.regions.add_again(slot.arena) else None
        except _INTERRUPTED:
            raise
        except TritonUnavailable:  # it does not answer this in time
            return None

    def _move(self, batch: Batch, in_flight: InFlightCall, error: GatewayError) -> bool:
        if batch.is_abandoned:
            return False
        other = self.pool.find_other(in_flight.served, batch.spec, len(batch.images))
        if other is None:
            return False
        self.circuit(other, batch.spec)  # creates it, because other workers may have opened it
        if not other.is_usable:
            return False
        self._note_end(batch, in_flight, error)
        in_flight.move(other)  # may exceed the maximum number of calls there, by those of the first Triton at most
        return True

    async def _may_retry(self, batch: Batch, in_flight: InFlightCall, error: GatewayError) -> bool:
        """Return whether to call the same Triton again; if so, wait first, longer after more failures."""
        failures = self.circuit(in_flight.served, batch.spec).consecutive
        delay = random.uniform(0, min(_RETRY_SECONDS * 2**failures, _MAX_RETRY_SECONDS))  # noqa: S311 - not a secret
        is_given_up = batch.is_abandoned or batch.remaining_seconds <= delay
        if is_given_up or not isinstance(error, _INTERRUPTED) or not self._retries.take():
            return False
        await asyncio.sleep(delay)
        return True

    async def _call(self, batch: Batch, in_flight: InFlightCall, slot: Slot | None) -> InferResult:
        served, spec = in_flight.served, batch.spec
        server = served.server
        asyncio.get_running_loop().call_later(QUIET_SECONDS, server.silence.ask, monotonic(), partial(self._note_silence, served))
        in_flight.reads_slot = slot is not None
        images = len(batch.images)
        server.new_images += images
        self.metrics.inferences.add(images, "inline" if slot is None else "shm")
        try:
            result = await server.client.infer(
                spec.pinned if batch.is_pinned else spec,
                [image.buffer.tensor for image in batch.images],
                timeout_seconds=batch.remaining_seconds,
                request_id=batch.request_id,
                trace=batch.trace,
                slot=slot,
                priority=batch.priority,
            )
        except (Disconnected, Unanswered):
            if slot is not None:
                self.pool.transport.abandon(slot.arena)
            raise
        except ModelDied:
            self.examiner.note_death(served, spec)
            raise
        server.silence.heard_at = monotonic()
        if served.is_wrong:
            raise WrongAnswer(WRONG)
        return result

    def _note_end(self, batch: Batch, in_flight: InFlightCall, error: GatewayError | None) -> None:
        served, spec = in_flight.served, batch.spec
        if isinstance(error, Unanswered) and served.answered_at > in_flight.began_at:
            return  # only this call was lost
        if isinstance(error, Unanswered) or (isinstance(error, TritonUnavailable) and not isinstance(error, Overloaded)):
            self._note_failure(served, spec, is_lost=isinstance(error, _LOST))
            return
        # The duration of a call during a hang of Triton is no measure of the model's speed.
        is_usable = isinstance(error, DeadlinePassed | None) and served.is_usable
        if is_usable and in_flight.began_at >= served.measured_since:
            now = monotonic()
            for image in batch.images:
                image.permit.measure(BatchTimes(in_flight.began_at - image.ready_at, now - in_flight.began_at))
        served.note_answer(len(batch.images) if error is None else 0, in_flight.began_at, is_usable=is_usable)
        if isinstance(error, InferenceFailed | InvalidModelOutput):
            self.examiner.note_error(served, spec)
        if not isinstance(error, ModelFailed):
            self.circuit(served, spec).note_success()
        for silent in self.pool.find_silent(served, spec.reference, self._hang_seconds):
            self.circuit(silent, spec).open()
        if isinstance(error, ModelNotReady | InferenceFailed | UnknownModel):
            self.pool.forget(served, spec.reference)

    def _note_silence(self, called: ModelOnServer) -> None:
        for served in {called, *(served for served in called.server.models.values() if served.images)}:
            if served.circuit is not None:
                served.circuit.open()

    def _note_missed(self, image: PendingImage, call: Call | None) -> bool:
        silent = [served for served in self._waited_for(image, call) if served.server.silence.note_missed()]
        for served in silent:
            self._note_failure(served, image.spec)
            if served.server.silence.missed >= _MISSED:
                self.circuit(served, image.spec).open()
        return bool(silent)

    def _waited_for(self, image: PendingImage, call: Call | None) -> list[ModelOnServer]:
        if call is not None:
            return [call.in_flight.served]
        return [server.model(image.spec.reference) for server in self.pool.servers]

    def _note_hang(self, image: PendingImage, call: Call | None, goes_on: bool) -> None:  # noqa: FBT001 - for `call_later`
        """Record a failure for an image without a result, unless Triton has answered others for the model meanwhile."""
        for served in self._waited_for(image, call):
            if served.images and served.answered_at < image.ready_at:
                self._note_failure(served, image.spec)
                if goes_on and image.permit.is_last:  # no further request of this key could find out; a probe can
                    self.circuit(served, image.spec).open()

    def _note_failure(self, served: ModelOnServer, spec: ModelSpec, *, is_lost: bool = False) -> None:
        self.metrics.triton_failures.add(1, self.metrics.table.alias(served.server.address), spec.reference)
        served.server.specs.expire(spec.reference)
        circuit = self.circuit(served, spec)
        circuit.note_failure()
        if is_lost and self.pool.find_other(served, spec) is not None:
            circuit.open()

    def circuit(self, served: ModelOnServer, spec: ModelSpec) -> CircuitBreaker:
        """Return the circuit of a model on a Triton; create it on first use."""
        if served.circuit is None:
            server = served.server
            served.circuit = CircuitBreaker(server.table, spec.reference, server.address, partial(self._probe, served, spec))
        return served.circuit

    async def _probe(self, served: ModelOnServer, spec: ModelSpec) -> None:
        """Raise GatewayError if a Triton cannot run a model, unless the model fails at another Triton as well."""
        if served.is_wrong:
            await self.examiner.probe(served, spec)
        elif not await self._run_probe(served, spec):
            other = self.pool.find_other(served, spec)
            if other is not None and await self._run_probe(other, spec):
                raise ModelFailed("another Triton runs the model")
        served.forget_speed()

    async def _run_probe(self, served: ModelOnServer, spec: ModelSpec) -> bool:
        try:
            return await run_probe(served.server.client, spec)
        except ModelDied:
            self.examiner.note_death(served, spec)
            raise


def calls_per_worker(calls: int, table: WorkerTable, spec: ModelSpec) -> float:
    """Return how many calls for a model this worker may have under way at one Triton; other images wait, and form batches.

    `calls` is the number for all workers in the table; 0: one more than Triton runs at a time, or twice that without batches.
    """
    usual = (spec.instances + 1) * (2 if spec.max_batch == 1 else 1)
    return math.ceil((calls or usual) / table.workers)
