"""Make calls to Triton, once more where that may help, and conclude from them which Tritons run a model."""

import asyncio
import math
import random
from collections.abc import Callable
from functools import partial
from time import monotonic

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.batch import Batch, PendingImage
from app.pipeline.batcher import LATE, Call
from app.pipeline.probe import run_probe
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.concurrency import BatchTimes
from app.resilience.retry_budget import RetryBudget
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
)

# The first retry is delayed by up to this time, doubled for each call in a row that has failed before.
_RETRY_SECONDS = 0.05
_MAX_RETRY_SECONDS = 1.0
# So many requests in a row that miss their deadline, while Triton answers nothing at all, open the circuit at once.
_MISSED = 5
# The connection broke, or Triton ends: the same address may answer a moment later.
_INTERRUPTED = (Unreachable, Disconnected, Draining)
# A process of the model, or the connection, may be replaced a moment later: the same Triton is called once more.
_RETRIED = (*_INTERRUPTED, ModelDied)
# A Triton that has lost a call is left out at once if another one works.
_LOST = (*_RETRIED, Refused)
# Why a call is made once more, elsewhere if possible.
_REASONS: dict[type[GatewayError], str] = {
    Unreachable: "unreachable",
    Disconnected: "disconnected",
    Draining: "draining",
    ModelDied: "model_died",
    ModelFailed: "model_failed",
    Refused: "refused",
    Overloaded: "overloaded",
    ModelNotReady: "not_ready",
    UnknownModel: "not_ready",
}
_NOT_ANSWERED = tuple(_REASONS)


class TritonCalls:
    """The calls of all models.

    A call is never cancelled unless Triton is known to survive that, or does not run the model. What calls tell of a Triton
    opens the model's circuit there; it then gets no calls until a probe succeeds.
    """

    def __init__(self, pool: TritonPool, metrics: Metrics, max_calls: Callable[[ModelSpec], float], hang_seconds: float) -> None:
        """Call the Tritons of a pool.

        Args:
            pool: The Tritons.
            metrics: Counts inferences, batches and retries.
            max_calls: How many calls for a model one Triton may have.
            hang_seconds: A call that has no answer after this time has failed, unless others of its model were answered.
        """
        self.pool = pool
        self.metrics = metrics
        self._max_calls = max_calls
        self._hang_seconds = hang_seconds
        self._retries = RetryBudget()

    def find(self, spec: ModelSpec) -> ModelOnServer | None:
        """Find the Triton for the next call for a model; None if there are as many as allowed."""
        served = self.pool.find(spec, self._max_calls)
        if served is not None:
            self._circuit(served, spec)  # which other workers may have opened
        return served

    async def infer(self, batch: Batch, in_flight: InFlightCall) -> InferResult:
        """Make a call for a batch, and a second one if Triton has not seen the first or has lost it.

        Args:
            batch: The images.
            in_flight: Where it is under way; it may be moved.

        Raises:
            DeadlinePassed: Triton dropped it, or there is no time for the second call.
            ModelNotReady: Triton does not have the model any more; ModelReplaced: or another one of that name.
            GatewayError: As `TritonClient.infer` says.
        """
        for _ in batch.images:
            self._retries.note_request()
        self.metrics.batch_size.observe(len(batch.images), batch.spec.reference)
        try:
            result = await self._try(batch, in_flight)
        except GatewayError as error:
            self._note_end(batch, in_flight, error)
            if isinstance(error, UnknownModel):
                raise ModelNotReady("the model is not loaded any more") from error
            if isinstance(error, InferenceFailed):  # another model may not take what this one does
                await in_flight.served.server.specs.confirm(batch.spec, batch.spec.version)
            raise
        self._note_end(batch, in_flight, None)
        await in_flight.served.server.specs.confirm(batch.spec, result.version)
        return result

    def abandon(self, image: PendingImage, call: Call | None) -> None:
        """Note that a request has left without a result.

        Args:
            image: The request's.
            call: The call that it is in; it goes on, unless it reads no slot and Triton survives a cancel. None if it still waited.
        """
        waited = monotonic() - image.ready_at
        note_hang = partial(self._note_hang, image, call)
        goes_on = call is not None and (call.in_flight.reads_slot or not call.in_flight.served.server.client.survives_cancel)
        if call is not None and not goes_on and call.batch.is_abandoned:
            call.task.cancel()
        if self._note_missed(image, call):
            return
        if call is not None and goes_on:
            timer = asyncio.get_running_loop().call_later(self._hang_seconds - waited, note_hang)
            call.task.add_done_callback(lambda _: timer.cancel())
        elif waited > self._hang_seconds / 2:  # a caller with less time says nothing about Triton
            note_hang()

    async def close(self) -> None:
        """Stop probing."""
        await self.pool.stop_probing()

    async def _try(self, batch: Batch, in_flight: InFlightCall) -> InferResult:
        slot = self._readable_slot(batch, in_flight)
        first = in_flight.served
        try:
            try:
                return await self._call(batch, in_flight, slot)
            except UnknownRegion:  # Triton was restarted
                reason = "unknown_region"
                slot = await self._restore_slot(batch, in_flight, slot)
        except _NOT_ANSWERED as error:
            reason = _REASONS[type(error)]
            slot = None
            if self._move(batch, in_flight, error):
                slot = self._readable_slot(batch, in_flight)
            elif not await self._may_retry(batch, in_flight, error):
                raise  # not in a function that gets the error: its frame and the error would refer to each other, and to the images
        if batch.remaining_seconds <= 0:
            raise DeadlinePassed(LATE)
        self.metrics.retries.add(1, reason)
        result = await self._call(batch, in_flight, slot)
        if reason == _REASONS[ModelFailed]:  # nothing is wrong with the images
            self._note_failure(first, batch.spec)
        return result

    async def _restore_slot(self, batch: Batch, in_flight: InFlightCall, slot: Slot | None) -> Slot | None:
        """Have the images' memory mapped again; without it, they travel inline.

        Triton rejects a request for memory that it does not know at once, so that another try costs it nothing.

        Raises:
            Unreachable, Disconnected, Draining: It has died meanwhile.
        """
        if slot is None or batch.remaining_seconds <= 0:
            return None
        try:
            return slot if await in_flight.served.server.regions.add_again(slot.arena) else None
        except _INTERRUPTED:
            raise
        except TritonUnavailable:  # it has just been started, and the key for its controls is not known yet
            return None

    def _move(self, batch: Batch, in_flight: InFlightCall, error: GatewayError) -> bool:
        """Let another Triton have a call that has failed, if there is one that works and takes as many images."""
        if batch.is_abandoned:
            return False
        images = len(batch.images)
        other = self.pool.find(batch.spec, lambda own: math.inf if own.max_batch >= images else 0, besides=in_flight.served)
        if other is None:
            return False
        self._note_end(batch, in_flight, error)
        in_flight.move(other)  # it gets no more than the calls that the first one had
        return True

    async def _may_retry(self, batch: Batch, in_flight: InFlightCall, error: GatewayError) -> bool:
        """Wait before the same Triton is called again, the longer the more calls have failed; return whether it is to be."""
        failures = self._circuit(in_flight.served, batch.spec).consecutive
        delay = random.uniform(0, min(_RETRY_SECONDS * 2**failures, _MAX_RETRY_SECONDS))  # noqa: S311 - not a secret
        is_given_up = batch.is_abandoned or batch.remaining_seconds <= delay
        if is_given_up or not isinstance(error, _RETRIED) or not self._retries.take():
            return False
        await asyncio.sleep(delay)
        return True

    def _readable_slot(self, batch: Batch, in_flight: InFlightCall) -> Slot | None:
        return self.pool.transport.find(in_flight.served.server.regions, batch.slot)

    async def _call(self, batch: Batch, in_flight: InFlightCall, slot: Slot | None) -> InferResult:
        served = in_flight.served
        server = served.server
        asyncio.get_running_loop().call_later(QUIET_SECONDS, self._ask, served, monotonic())
        in_flight.reads_slot = slot is not None
        images = len(batch.images)
        server.new_images += images
        self.metrics.inferences.add(images, "inline" if slot is None else "shm")
        try:
            result = await server.client.infer(
                batch.spec.pinned if batch.is_pinned else batch.spec,
                batch.tensors,
                timeout_seconds=batch.remaining_seconds,
                request_id=batch.request_id,
                trace=batch.trace,
                slot=slot,
            )
        except (Disconnected, Unanswered):
            if slot is not None:
                self.pool.transport.abandon(slot.arena)
            raise
        except ModelDied:
            self.metrics.model_deaths.add(1, batch.spec.reference)
            raise
        server.silence.heard_at = monotonic()
        return result

    def _note_end(self, batch: Batch, in_flight: InFlightCall, error: GatewayError | None) -> None:
        """Tell how long a call took, also one that came too late or that Triton dropped; and whether Triton works."""
        served, spec = in_flight.served, batch.spec
        if isinstance(error, Unanswered) and served.answered_at > in_flight.began_at:
            return  # the call was lost, but Triton has answered others
        if isinstance(error, Unanswered) or (isinstance(error, TritonUnavailable) and not isinstance(error, Overloaded)):
            self._note_failure(served, spec, is_lost=isinstance(error, _LOST))
            return
        # What waited for a Triton that hung says nothing about the model's speed.
        if isinstance(error, DeadlinePassed | None) and served.is_usable and in_flight.began_at >= served.measured_since:
            now = monotonic()
            for image in batch.images:
                image.permit.measure(BatchTimes(in_flight.began_at - image.ready_at, now - in_flight.began_at))
        served.note_answer(len(batch.images) if error is None else 0, in_flight.began_at)
        if not isinstance(error, ModelFailed):
            self._circuit(served, spec).note_success()
        for silent in self.pool.find_silent(served, spec.reference, self._hang_seconds):
            self._circuit(silent, spec).open()
        if isinstance(error, ModelNotReady | InferenceFailed | UnknownModel):
            self.pool.forget(served, spec.reference)

    def _ask(self, served: ModelOnServer, began_at: float) -> None:
        """Ask a Triton that has answered nothing since a call began whether it answers at all."""
        served.server.silence.ask(began_at, partial(self._note_silence, served))

    def _note_silence(self, called: ModelOnServer) -> None:
        """Open the circuits of a Triton that answers nothing, of all models that it was called for."""
        models = next((server.models.values() for server in self.pool.servers if server is called.server), ())
        for served in {called, *(served for served in models if served.images)}:
            if served.circuit is not None:
                served.circuit.open()

    def _note_missed(self, image: PendingImage, call: Call | None) -> bool:
        """Count an image without a result as failed if Triton answers nothing at all; return whether it does not."""
        silent = [served for served in self._waited_for(image, call) if served.server.silence.note_missed()]
        for served in silent:
            self._note_failure(served, image.spec)
            if served.server.silence.missed >= _MISSED:
                self._circuit(served, image.spec).open()
        return bool(silent)

    def _waited_for(self, image: PendingImage, call: Call | None) -> list[ModelOnServer]:
        if call is not None:
            return [call.in_flight.served]
        return [server.model(image.spec.reference) for server in self.pool.servers]

    def _note_hang(self, image: PendingImage, call: Call | None) -> None:
        """Take an image for failed that has had no result for long, unless Triton is only busy with others of its model."""
        for served in self._waited_for(image, call):
            if served.images and served.answered_at < image.ready_at:
                self._note_failure(served, image.spec)

    def _note_failure(self, served: ModelOnServer, spec: ModelSpec, *, is_lost: bool = False) -> None:
        """Count a failure; a Triton that has lost a call is left out at once if another one works."""
        self.metrics.triton_failures.add(1, self.metrics.table.alias(served.server.address), spec.reference)
        served.server.specs.expire(spec.reference)
        circuit = self._circuit(served, spec)
        circuit.note_failure()
        if is_lost and self.pool.find(spec, _no_limit, besides=served) is not None:
            circuit.open()

    def _circuit(self, served: ModelOnServer, spec: ModelSpec) -> CircuitBreaker:
        if served.circuit is None:
            server = served.server
            served.circuit = CircuitBreaker(server.table, spec.reference, server.address, partial(self._probe, served, spec))
        return served.circuit

    async def _probe(self, served: ModelOnServer, spec: ModelSpec) -> None:
        """Find out whether a Triton runs a model. A failure that also occurs at another Triton does not count.

        Raises:
            GatewayError: It does not run the model.
        """
        try:
            is_well = await run_probe(served.server.client, spec)
        except ModelDied:
            self.metrics.model_deaths.add(1, spec.reference)
            raise
        if not is_well:
            other = self.pool.find(spec, _no_limit, besides=served)
            if other is not None and await run_probe(other.server.client, spec):
                raise ModelFailed("another Triton runs the model")
        served.forget_speed()


def _no_limit(_: ModelSpec) -> float:
    return math.inf
