"""Whether one Triton answers anything at all.

Inferences without an answer do not tell a Triton that hangs from one with a slow model. A question about the server does.
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
"""A Triton that has answered nothing for this long is asked."""


class Silence:
    """Asks one Triton whether it answers, and counts the requests that it has made miss their deadline meanwhile."""

    def __init__(self, client: TritonClient, table: WorkerTable) -> None:
        self._client = client
        self._table = table
        self._missed = table.column(f"missed:{table.alias(client.address)}")
        self.heard_at = 0.0
        """When Triton last answered a call, as `time.monotonic` counts."""
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        """The question, until it is answered."""

    @property
    def missed(self) -> int:
        """Requests of all workers that have missed their deadline since Triton stopped to answer; 0 while it answers."""
        return self._table.total(self._missed)

    def note_missed(self) -> bool:
        """Count a request without a result if Triton has answered neither it nor a question; return whether that is so."""
        is_silent = self._asking is not None and monotonic() - max(self._asked_at, self.heard_at) >= QUIET_SECONDS
        if is_silent:
            self._table.add(self._missed, 1)
        return is_silent

    def ask(self, since: float, on_silent: Callable[[], object]) -> None:
        """Ask until Triton answers or its connection breaks, unless it has answered since a time.

        Args:
            since: As `time.monotonic` counts.
            on_silent: Called each time that a question has timed out.
        """
        if self._asking is None and self.heard_at < since:
            self._asked_at = monotonic()
            self._asking = asyncio.create_task(self._ask(on_silent))

    async def stop(self) -> None:
        """Ask no more."""
        self.heard_at = math.inf
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask(self, on_silent: Callable[[], object]) -> None:
        is_silent = True
        try:
            while is_silent:
                try:
                    await self._client.read_server()
                    is_silent = False
                except NoReply:
                    is_silent = self.heard_at < self._asked_at
                    if is_silent:
                        on_silent()
                except GatewayError:
                    is_silent = False
        finally:
            self._asking = None
            self._table.set(self._missed, 0)
