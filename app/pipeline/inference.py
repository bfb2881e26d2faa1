"""Run inferences, and keep track of those whose request has timed out or was cancelled."""

import asyncio
from functools import partial

from app.errors import DeadlinePassed, InferenceFailed, ModelNotReady, UnknownModel
from app.model.spec import ModelSpec
from app.pipeline.buffer import InputBuffer
from app.resilience.deadline import Deadline
from app.resilience.model_queue import Permit
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.specs import SpecCache
from app.triton.status import UnknownRegion
from app.triton.transport import Transport

_DRAIN_SECONDS = 8.0
_LATE = "the model did not answer in time"


class InferenceRunner:
    """Runs inferences on one Triton, each in a task of its own that ends with its RPC.

    An RPC is never cancelled unless Triton is known to survive that.
    """

    def __init__(self, client: TritonClient, transport: Transport, specs: SpecCache) -> None:
        self._client = client
        self._transport = transport
        self._specs = specs
        self._abandoned: set[asyncio.Task[InferResult]] = set()

    async def run(self, spec: ModelSpec, buffer: InputBuffer, deadline: Deadline, request_id: str, permit: Permit) -> InferResult:
        """Run one inference on the image in a buffer.

        Args:
            spec: Spec of the model.
            buffer: The model's input.
            deadline: When to stop waiting. The RPC itself goes on, unless it reads no slot and Triton survives a cancel.
            request_id: Request id, for Triton's log.
            permit: What the request uses; kept until the RPC has ended, and told how long that took.

        Raises:
            DeadlinePassed: No answer in time.
            GatewayError: As `TritonClient.infer` says.
        """
        if deadline.remaining <= 0:
            raise DeadlinePassed(_LATE)
        task = asyncio.create_task(self._infer(spec, buffer, deadline, request_id))
        permit.keep_for(task)
        task.add_done_callback(partial(_measure, permit))
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlinePassed(_LATE) from error
        except (UnknownModel, ModelNotReady, InferenceFailed):
            self._specs.forget(spec.name)
            raise
        finally:
            if not task.done():
                self._abandon(task, buffer)
            del task  # a failed task refers to its exception, whose traceback refers to this frame

    async def drain(self) -> None:
        """Let abandoned inferences end: until then, Triton reads their slots."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_DRAIN_SECONDS)

    async def _infer(self, spec: ModelSpec, buffer: InputBuffer, deadline: Deadline, request_id: str) -> InferResult:
        """Call Triton; if it has forgotten the shared memory, most likely in a restart, register it and call again."""

        async def infer(*, is_shared: bool) -> InferResult:
            return await self._client.infer(
                spec,
                buffer.tensor,
                timeout_seconds=deadline.remaining,
                request_id=request_id,
                slot=buffer.slot if is_shared else None,
            )

        try:
            return await infer(is_shared=True)
        except UnknownRegion:
            if buffer.slot is None:
                raise
            is_registered = deadline.remaining > 0 and await self._transport.register_again(buffer.slot.arena)
            if deadline.remaining <= 0:
                raise DeadlinePassed(_LATE) from None
            return await infer(is_shared=is_registered)

    def _abandon(self, task: asyncio.Task[InferResult], buffer: InputBuffer) -> None:
        """Stop waiting for an inference."""
        server = self._client.server
        if server is not None and server.survives_cancel and buffer.slot is None:
            task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[InferResult]) -> None:
        """Forget an abandoned inference that has ended, and retrieve its exception, which asyncio would report otherwise."""
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()


def _measure(permit: Permit, task: asyncio.Task[InferResult]) -> None:
    """Tell how long an inference took; also one that came too late, or that Triton dropped because it would have."""
    if not task.cancelled() and isinstance(task.exception(), DeadlinePassed | None):
        permit.measure()
