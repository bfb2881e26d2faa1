"""Run inferences, and keep track of those whose request has timed out or was cancelled."""

import asyncio
import random
from functools import partial
from time import monotonic

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.buffer import InputBuffer
from app.pipeline.call import CallContext
from app.pipeline.probe import run_probe
from app.resilience.circuit_breaker import CircuitBreaker
from app.resilience.model_queue import Permit
from app.resilience.retry_budget import RetryBudget
from app.telemetry.metrics import Metrics
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.specs import SpecCache
from app.triton.status import Disconnected, Draining, Overloaded, Unanswered, UnknownRegion, Unreachable
from app.triton.transport import Transport

_MAX_RETRY_DELAY_SECONDS = 0.05
_LATE = "the model did not answer in time"

Call = asyncio.Task[InferResult]


class InferenceRunner:
    """Runs inferences on one Triton, each in a task of its own that ends with its RPC.

    An RPC is never cancelled unless Triton is known to survive that, or does not run the model. What the RPCs tell of Triton
    opens the model's circuit.
    """

    def __init__(self, client: TritonClient, transport: Transport, specs: SpecCache, metrics: Metrics, hang_seconds: float) -> None:
        """Run inferences.

        Args:
            client: Calls Triton.
            transport: Owns the slots that Triton reads.
            specs: Told when a model may have changed.
            metrics: Counts inferences and retries.
            hang_seconds: An inference that has no answer after this time has failed, unless others of its model were answered.
        """
        self._client = client
        self._transport = transport
        self._specs = specs
        self._metrics = metrics
        self._hang_seconds = hang_seconds
        self._abandoned: dict[Call, str] = {}
        """With their models."""
        self._breakers: dict[str, CircuitBreaker] = {}
        self._answered_at: dict[str, float] = {}
        """When Triton last answered for a model, as `time.monotonic` counts."""
        self._retries = RetryBudget()

    def is_circuit_closed(self, model: str) -> bool:
        """Return whether Triton runs a model, as far as is known."""
        breaker = self._breakers.get(model)
        return breaker is None or breaker.state == "closed"

    @property
    def circuits(self) -> dict[str, bool]:
        """Models that have failed at some time, and whether their circuit is closed now."""
        return {model: breaker.state == "closed" for model, breaker in self._breakers.items()}

    async def run(self, spec: ModelSpec, buffer: InputBuffer, call: CallContext, permit: Permit) -> InferResult:
        """Run one inference on the image in a buffer.

        Args:
            spec: Spec of the model.
            buffer: The model's input.
            call: What goes with the request. After its deadline the RPC goes on, unless it reads no slot and Triton survives a
                cancel.
            permit: What the request uses; kept until the RPC has ended, and told how long that took.

        Raises:
            DeadlinePassed: No answer in time.
            ModelNotReady: Triton does not have the model any more.
            GatewayError: As `TritonClient.infer` says.
        """
        deadline = call.deadline
        if deadline.remaining <= 0:
            raise DeadlinePassed(_LATE)
        self._retries.note_request()
        started_at = monotonic()
        task = asyncio.create_task(self._infer(spec, buffer, call))
        permit.keep_for(task)
        task.add_done_callback(partial(self._note_end, spec, permit))
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlinePassed(_LATE) from error
        except (ModelNotReady, InferenceFailed):
            self._specs.forget(spec.name)
            raise
        except UnknownModel as error:
            self._specs.forget(spec.name)
            raise ModelNotReady("the model is not loaded any more") from error
        finally:
            if not task.done():
                self._abandon(task, spec, buffer, started_at)
            del task  # a failed task refers to its exception, whose traceback refers to this frame

    async def close(self, seconds: float) -> None:
        """Let abandoned inferences end: until then Triton reads their slots, and could not survive the end of the connection.

        Not those of a model whose circuit is open, which may never end.
        """
        waiting = [task for task, model in self._abandoned.items() if self.is_circuit_closed(model)]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)
        for breaker in self._breakers.values():
            await breaker.close()

    async def _infer(self, spec: ModelSpec, buffer: InputBuffer, call: CallContext) -> InferResult:
        """Call Triton; once more, if it has not seen the request or lost it."""
        infer = partial(self._client.infer, spec, buffer.tensor, request_id=call.request_id, trace=call.trace)
        deadline, slot = call.deadline, buffer.slot
        self._metrics.inferences.add(1, "inline" if slot is None else "shm")
        try:
            return await infer(timeout_seconds=deadline.remaining, slot=slot)
        except UnknownRegion:  # it was restarted; it rejects such a request at once, so that another try costs it nothing
            reason = "unknown_region"
            is_registered = slot is not None and deadline.remaining > 0 and await self._transport.register_again(slot.arena)
        except Unanswered:
            if slot is not None:
                self._transport.abandon(slot.arena)
            raise
        except (Unreachable, Disconnected, Draining) as error:
            if slot is not None and isinstance(error, Disconnected):
                self._transport.abandon(slot.arena)
            delay = random.uniform(0, _MAX_RETRY_DELAY_SECONDS)  # noqa: S311 - not a secret
            is_given_up = asyncio.current_task() in self._abandoned or deadline.remaining <= delay
            if is_given_up or not self._retries.take():
                raise
            reason = type(error).__name__.lower()
            await asyncio.sleep(delay)
            is_registered = False
        if deadline.remaining <= 0:
            raise DeadlinePassed(_LATE)
        self._metrics.retries.add(1, reason)
        return await infer(timeout_seconds=deadline.remaining, slot=slot if is_registered else None)

    def _abandon(self, task: Call, spec: ModelSpec, buffer: InputBuffer, started_at: float) -> None:
        """Stop waiting for an inference."""
        self._abandoned[task] = spec.name
        task.add_done_callback(self._forget)
        waited = monotonic() - started_at
        note_hang = partial(self._note_hang, spec, started_at)
        if self._client.survives_cancel and buffer.slot is None:
            task.cancel()
            if waited > self._hang_seconds / 2:  # a caller with less time says nothing about Triton
                note_hang()
        else:
            timer = asyncio.get_running_loop().call_later(self._hang_seconds - waited, note_hang)
            task.add_done_callback(lambda _: timer.cancel())

    def _forget(self, task: Call) -> None:
        """Forget an abandoned inference that has ended, and retrieve its exception, which asyncio would report otherwise."""
        del self._abandoned[task]
        if not task.cancelled():
            task.exception()

    def _note_end(self, spec: ModelSpec, permit: Permit, task: Call) -> None:
        """Tell how long an inference took, also one that came too late or that Triton dropped; and whether Triton works."""
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Unanswered) or (isinstance(error, TritonUnavailable) and not isinstance(error, Overloaded)):
            self._note_failure(spec)
        elif isinstance(error, GatewayError | None):
            if isinstance(error, DeadlinePassed | None):
                permit.measure()
            self._answered_at[spec.name] = monotonic()
            breaker = self._breakers.get(spec.name)
            if breaker is not None:
                breaker.note_success()

    def _note_hang(self, spec: ModelSpec, started_at: float) -> None:
        """Take an inference for failed that has had no answer for long, unless Triton is only busy with others of its model."""
        if self._answered_at.get(spec.name, 0.0) < started_at:
            self._note_failure(spec)

    def _note_failure(self, spec: ModelSpec) -> None:
        model = spec.name
        if model not in self._breakers:
            self._breakers[model] = CircuitBreaker(model, partial(run_probe, self._client, spec))
        self._breakers[model].note_failure()
