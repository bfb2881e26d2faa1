"""Find out whether a Triton answers anything at all.

Unanswered inferences may mean that the model is slow; an unanswered request for the server's metadata means that Triton hangs.
"""

import asyncio
import math
from collections.abc import Callable
from time import monotonic

from app.errors import GatewayError
from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.status import NoReply

QUIET_SECONDS = 0.25
"""Time without any answer after which a Triton is asked for its metadata, and without this answer after which it is silent."""
# A Triton whose CPU others use answers late. It is silent after this multiple of the time that it lately took.
_LATE = 2.0
# How long a late answer counts.
_MEMORY_SECONDS = 10.0
# A Triton that would have to be given this time has been stopped, not slow.
_MAX_PATIENCE_SECONDS = 2.0


class Silence:
    """Asks one Triton for its metadata until it answers, and counts requests that miss their deadline meanwhile."""

    def __init__(self, client: TritonClient, table: WorkerTable) -> None:
        self._client = client
        self._table = table
        self._missed = table.column(f"missed:{table.alias(client.address)}")
        self.heard_at = 0.0
        """When Triton last answered an inference, on the `time.monotonic` clock."""
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._slow_patience = 0.0
        """The patience after a late answer, seconds."""
        self._slow_until = 0.0

    @property
    def missed(self) -> int:
        """Requests of all workers that missed their deadline since Triton stopped answering; 0 while it answers."""
        return self._table.total(self._missed)

    def note_missed(self) -> bool:
        """Count a request without a result if Triton was asked and has not answered since; return whether Triton is silent."""
        if self._asking is None:
            return False
        waited = monotonic() - max(self._asked_at, self.heard_at)
        if waited >= QUIET_SECONDS:
            self._table.add(self._missed, 1)
        return waited >= self._patience

    def ask(self, since: float, on_silent: Callable[[], object]) -> None:
        """Ask until Triton answers, unless it has answered an inference since then; call `on_silent` after each time-out."""
        if self._asking is None and self.heard_at < since:
            self._asked_at = monotonic()
            self._asking = asyncio.create_task(self._ask(on_silent))

    async def stop(self) -> None:
        """Stop asking, for good."""
        self.heard_at = math.inf
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    @property
    def _patience(self) -> float:
        return self._slow_patience if monotonic() < self._slow_until else QUIET_SECONDS

    async def _ask(self, on_silent: Callable[[], object]) -> None:
        try:
            while await self._is_silent():
                on_silent()
        finally:
            self._asking = None
            self._table.set(self._missed, 0)

    async def _is_silent(self) -> bool:
        try:
            await self._client.read_server()
        except NoReply:
            return self.heard_at < self._asked_at
        except GatewayError:
            return False
        now = monotonic()
        patience = _LATE * (now - self._asked_at)
        if self._patience <= patience < _MAX_PATIENCE_SECONDS:
            self._slow_patience, self._slow_until = patience, now + _MEMORY_SECONDS
        return False
