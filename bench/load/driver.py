"""Base of all kinds of load: open connections, wait, reconnect, and count.

It is one process without an HTTP library, because on shared cores the client takes CPU time from the server. So requests are
prebuilt, and only status, length and Server-Timing of a response are parsed, except for the responses that `tally` checks.
"""

import asyncio
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter, thread_time
from typing import Any

import uvloop

from bench.load.connection import Connection, encode_request
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.tally import Tally
from bench.load.target import Target, local_target

PATIENCE_SECONDS = 30.0
"""Maximum time to wait for a response."""
BUSY_SHARE = 0.8
"""Share of a core above which the load driver may limit the throughput."""

_RECONNECT_SECONDS = 0.05

Progress = Callable[[float, int], None]
"""Called with the seconds since the start and the number of ended requests."""


def run(load: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a load to its end on uvloop, the event loop with the least CPU time; warn if the driver was busy."""
    outcome = uvloop.run(load)
    if outcome.driver_cpu > BUSY_SHARE:
        share = f"{outcome.driver_cpu:.0%} of a core"
        print(f"warning: the load driver used {share}; the server may be faster than this shows", file=sys.stderr)
    return outcome


class Driver(ABC):
    """One run: its parameters and results so far. A subclass decides when to send."""

    times_abandoned = True
    """Whether the latency includes requests without a response, after the whole patience."""
    counts_unfinished = True
    """Whether requests in progress at the end are errors."""
    tick_seconds = 0.05
    """Time between two looks at whether the run is over."""

    def __init__(self, url: str | Target, samples: Sequence[Sample], width: int, seconds: float, patience: float) -> None:
        """Prepare to send `samples` in turn over `width` connections for `seconds`.

        Raises:
            ValueError: A URL is not on this machine, or there are no samples or no connections.
        """
        self.target = url if isinstance(url, Target) else local_target(url)
        if not samples or width < 1:
            raise ValueError("there is nothing to send, or no connection to send it over")
        self.seconds = seconds
        self.connections: set[Connection] = set()
        self.issued = 0
        """Number of requests that are sent or due."""
        self.tally = Tally([sample.expected for sample in samples], patience if self.times_abandoned else math.inf, seconds)
        self.started = 0.0
        self.is_over = False
        self.messages = [encode_request(self.target, sample.body) for sample in samples]
        self._width = width
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def begin(self) -> None:
        """Start sending; all connections are open."""

    @abstractmethod
    def free(self, connection: Connection) -> None:
        """Handle a connection that is ready for a request."""

    @abstractmethod
    def is_done(self, now: float) -> bool:
        """Return whether there is nothing left to send or to wait for."""

    def pause_after(self, connection: Connection) -> float:  # noqa: ARG002 - most loads never pause
        """Return the pause of a client after the last response on a connection, in seconds."""
        return 0.0

    def connection_refused(self) -> None:  # noqa: B027 - most loads need not know
        """Handle a failed reconnection."""

    def abandon_unsent(self) -> None:  # noqa: B027 - only a load with a schedule has any
        """Count the requests that were due, but never sent."""

    async def measure(self, progress: Progress | None = None) -> Outcome:
        """Run the load.

        Raises:
            OSError: The server does not accept connections.
        """
        try:
            await self._connect_all()
            cpu, self.started = thread_time(), perf_counter()
            self.tally.start()
            self.begin()
            while not self.is_done(now := perf_counter()):
                for connection in [c for c in self.connections if c.number is not None and now - c.since > self._patience]:
                    connection.transport.abort()
                if now - self.started > self.seconds + self._patience:
                    break
                if progress:
                    progress(now - self.started, self.tally.ended)
                await asyncio.sleep(self.tick_seconds)
            elapsed = perf_counter() - self.started
            cpu = (thread_time() - cpu) / elapsed
        finally:
            await self._close()
        if progress:
            progress(elapsed, self.tally.ended)
        return self.tally.outcome(cpu)

    def send(self, connection: Connection, number: int, since: float) -> None:
        """Send a request; its latency began at `since`."""
        connection.send(self.messages[number % len(self.messages)], number, since)

    def opened(self, connection: Connection) -> None:
        """Handle a new connection."""
        self.connections.add(connection)

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> None:
        """Count a response.

        Args:
            number: Number of the request.
            since: Start of the latency.
            status: Status code, three digits.
            body: Body of the response.
            timing: Value of the Server-Timing header; may be empty.
        """
        self.tally.answered(number, since, status, body, timing)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        """Count the unanswered request of a closed connection, and open another connection."""
        self.connections.discard(connection)
        if self.is_over:
            return
        if number is not None:
            self.tally.gave_up(since)
        self.spawn(self._reconnect(_RECONNECT_SECONDS if number is not None else self.pause_after(connection)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something until the load ends."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(self) -> Connection:
        """Open a connection."""
        loop, target = asyncio.get_running_loop(), self.target
        local = (target.source, 0) if target.source else None
        _, connection = await loop.create_connection(
            lambda: Connection(self), target.host, target.port, ssl=target.tls, server_hostname=target.name, local_addr=local
        )
        return connection

    async def _connect_all(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.gather(*(self.connect() for _ in range(self._width)))
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {self._patience:g} s") from error

    async def _reconnect(self, pause: float) -> None:
        await asyncio.sleep(pause)
        while not self.is_over:
            try:
                connection = await self.connect()
            except OSError:
                self.connection_refused()
                await asyncio.sleep(_RECONNECT_SECONDS)
            else:
                self.free(connection)
                return

    async def _close(self) -> None:
        self.is_over = True
        for connection in list(self.connections):
            connection.transport.abort()
            if connection.number is not None and self.counts_unfinished:
                self.tally.gave_up(connection.since)
        self.abandon_unsent()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop
