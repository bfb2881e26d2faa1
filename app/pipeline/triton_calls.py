"""Make calls to Triton, once more where that may help, and conclude from them whether it runs a model."""

import asyncio
import random
from functools import partial
from time import monotonic

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.batch import Batch, PendingImage
from app.pipeline.batcher import LATE, Call
from app.pipeline.probe import run_probe
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.retry_budget import RetryBudget
from app.telemetry.metrics import Metrics
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.specs import SpecCache
from app.triton.status import Disconnected, Draining, Overloaded, Unanswered, UnknownRegion, Unreachable
from app.triton.transport import Transport

_MAX_RETRY_DELAY_SECONDS = 0.05


class TritonCalls:
    """The calls of all models on one Triton.

    A call is never cancelled unless Triton is known to survive that, or does not run the model. What calls tell of Triton opens
    the model's circuit.
    """

    def __init__(self, client: TritonClient, transport: Transport, specs: SpecCache, metrics: Metrics, hang_seconds: float) -> None:
        """Call a Triton.

        Args:
            client: Calls it.
            transport: Owns the slots that it reads.
            specs: Told when a model may have changed.
            metrics: Counts inferences, batches and retries.
            hang_seconds: A call that has no answer after this time has failed, unless others of its model were answered.
        """
        self._client = client
        self._transport = transport
        self._specs = specs
        self._metrics = metrics
        self._hang_seconds = hang_seconds
        self._breakers: dict[str, CircuitBreaker] = {}
        self._answered_at: dict[str, float] = {}
        """When Triton last answered for a model, as `time.monotonic` counts."""
        self._retries = RetryBudget()

    @property
    def circuits(self) -> dict[str, bool]:
        """Models that have failed at some time, and whether their circuit is closed now."""
        return {model: breaker.state == "closed" for model, breaker in self._breakers.items()}

    def is_circuit_closed(self, model: str) -> bool:
        """Return whether Triton runs a model, as far as is known."""
        breaker = self._breakers.get(model)
        return breaker is None or breaker.state == "closed"

    async def infer(self, batch: Batch) -> InferResult:
        """Make a call for a batch, and a second one if Triton has not seen the first or has lost it.

        Raises:
            DeadlinePassed: Triton dropped it, or there is no time for the second call.
            ModelNotReady: Triton does not have the model any more.
            GatewayError: As `TritonClient.infer` says.
        """
        model, images = batch.spec.name, len(batch.images)
        for _ in batch.images:
            self._retries.note_request()
        self._metrics.inferences.add(images, "inline" if batch.slot is None else "shm")
        self._metrics.batch_images.observe(images, model)
        try:
            result = await self._try(batch)
        except GatewayError as error:
            self._note_end(batch, error)
            if isinstance(error, ModelNotReady | InferenceFailed | UnknownModel):
                self._specs.forget(model)
            if isinstance(error, UnknownModel):
                raise ModelNotReady("the model is not loaded any more") from error
            raise
        self._note_end(batch, None)
        return result

    def abandon(self, image: PendingImage, call: Call | None) -> None:
        """Note that a request has left without a result.

        Args:
            image: The request's.
            call: The call that it is in; it goes on, unless it reads no slot and Triton survives a cancel. None if it still waited.
        """
        waited = monotonic() - image.ready_at
        note_hang = partial(self._note_hang, image)
        if call is not None and not (self._client.survives_cancel and call.batch.slot is None):
            timer = asyncio.get_running_loop().call_later(self._hang_seconds - waited, note_hang)
            call.task.add_done_callback(lambda _: timer.cancel())
            return
        if call is not None and call.batch.is_abandoned:
            call.task.cancel()
        if waited > self._hang_seconds / 2:  # a caller with less time says nothing about Triton
            note_hang()

    async def close(self) -> None:
        """Stop probing."""
        for breaker in self._breakers.values():
            await breaker.close()

    async def _try(self, batch: Batch) -> InferResult:
        tensors, slot = batch.tensors, batch.slot
        infer = partial(self._client.infer, batch.spec, tensors, request_id=batch.request_id, trace=batch.trace)
        try:
            return await infer(timeout_seconds=batch.remaining_seconds, slot=slot)
        except UnknownRegion:  # it was restarted; it rejects such a request at once, so that another try costs it nothing
            reason = "unknown_region"
            has_time = slot is not None and batch.remaining_seconds > 0
            is_registered = has_time and slot is not None and await self._transport.register_again(slot.arena)
        except Unanswered:
            if slot is not None:
                self._transport.abandon(slot.arena)
            raise
        except (Unreachable, Disconnected, Draining) as error:
            if slot is not None and isinstance(error, Disconnected):
                self._transport.abandon(slot.arena)
            delay = random.uniform(0, _MAX_RETRY_DELAY_SECONDS)  # noqa: S311 - not a secret
            is_given_up = batch.is_abandoned or batch.remaining_seconds <= delay
            if is_given_up or not self._retries.take():
                raise
            reason = type(error).__name__.lower()
            await asyncio.sleep(delay)
            is_registered = False
        if batch.remaining_seconds <= 0:
            raise DeadlinePassed(LATE)
        self._metrics.retries.add(1, reason)
        return await infer(timeout_seconds=batch.remaining_seconds, slot=slot if is_registered else None)

    def _note_end(self, batch: Batch, error: GatewayError | None) -> None:
        """Tell how long a call took, also one that came too late or that Triton dropped; and whether Triton works."""
        if isinstance(error, Unanswered) or (isinstance(error, TritonUnavailable) and not isinstance(error, Overloaded)):
            self._note_failure(batch.spec)
            return
        if isinstance(error, DeadlinePassed | None):
            for image in batch.images:
                image.permit.measure()
        model = batch.spec.name
        self._answered_at[model] = monotonic()
        breaker = self._breakers.get(model)
        if breaker is not None:
            breaker.note_success()

    def _note_hang(self, image: PendingImage) -> None:
        """Take an image for failed that has had no result for long, unless Triton is only busy with others of its model."""
        if self._answered_at.get(image.spec.name, 0.0) < image.ready_at:
            self._note_failure(image.spec)

    def _note_failure(self, spec: ModelSpec) -> None:
        model = spec.name
        if model not in self._breakers:
            self._breakers[model] = CircuitBreaker(model, partial(run_probe, self._client, spec))
        self._breakers[model].note_failure()
