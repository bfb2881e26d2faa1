"""Inferences in progress, including those that nobody waits for any more."""

import asyncio

from app.errors import DeadlinePassed, GatewayError, TritonUnavailable
from app.model.spec import ModelSpec
from app.pipeline.buffer import InputBuffer
from app.resilience.deadline import Deadline
from app.triton.client import TritonClient
from app.triton.messages import Answer
from app.triton.specs import ModelSpecs
from app.triton.status import UnknownRegion
from app.triton.transport import Transport

# Each of them holds a slot or its pixels.
_MAX_ABANDONED = 64
_DRAIN_SECONDS = 8.0


class Inferences:
    """Runs inferences on one Triton, each in a task of its own that ends with its RPC.

    An RPC is never cancelled unless Triton is known to survive that.
    """

    def __init__(self, client: TritonClient, transport: Transport, specs: ModelSpecs) -> None:
        self._client = client
        self._transport = transport
        self._specs = specs
        self._abandoned: set[asyncio.Task[Answer]] = set()

    async def run(self, spec: ModelSpec, buffer: InputBuffer, deadline: Deadline, request_id: str) -> Answer:
        """Run one inference about the image in a buffer.

        Args:
            spec: Of the model to ask.
            buffer: Its input; kept until the RPC has ended.
            deadline: When to stop waiting. The RPC itself goes on, unless it reads no slot and Triton survives a cancel.
            request_id: For Triton's own log.

        Raises:
            DeadlinePassed: No answer in time.
            GatewayError: As `TritonClient.infer` says.
        """
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise TritonUnavailable("too many inferences that nobody waits for have not ended")
        task = asyncio.create_task(self._infer(spec, buffer, deadline, request_id))
        buffer.keep_for(task)
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.shield(task)
        except TimeoutError as error:
            raise DeadlinePassed("the model did not answer in time") from error
        except (TritonUnavailable, DeadlinePassed):
            raise
        except GatewayError:
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

    async def _infer(self, spec: ModelSpec, buffer: InputBuffer, deadline: Deadline, request_id: str) -> Answer:
        """Ask Triton; if it has forgotten the shared memory, most likely in a restart, register it and ask again."""

        async def ask(*, is_shared: bool) -> Answer:
            return await self._client.infer(
                spec,
                buffer.tensor,
                timeout_seconds=deadline.remaining,
                request_id=request_id,
                slot=buffer.slot if is_shared else None,
            )

        try:
            return await ask(is_shared=True)
        except UnknownRegion:
            if buffer.slot is None:
                raise
            return await ask(is_shared=await self._transport.register_again(buffer.slot.arena))

    def _abandon(self, task: asyncio.Task[Answer], buffer: InputBuffer) -> None:
        """Stop waiting for an inference."""
        server = self._client.server
        if server is not None and server.survives_cancel and buffer.slot is None:
            task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Answer]) -> None:
        """Forget an abandoned inference that has ended, and retrieve its exception, which asyncio would report otherwise."""
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()
