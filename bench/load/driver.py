"""The load driver: clients that wait for their responses, or a schedule that does not, over the same pool of connections.

It is one process without an HTTP library, because on shared cores the client takes CPU time from the server. So requests are
prebuilt, and only status, length and Server-Timing of a response are parsed, except for the responses that `tally` checks.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Sequence
from random import uniform
from time import perf_counter, thread_time
from typing import Any

import uvloop

from bench.load.connection import Connection, Response, encode_request
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.tally import Tally
from bench.load.target import Target, local_target

PATIENCE_SECONDS = 30.0
"""Maximum time to wait for a response; longer than the gateway's deadline."""
OPEN_CONNECTIONS = 256
"""Maximum number of requests in progress at a constant rate."""
BUSY_SHARE = 0.8
"""Share of a core above which the load driver may limit the throughput."""

_RECONNECT_SECONDS = 0.05
_TICK_SECONDS = 0.05
_JITTER = 0.1  # fraction of the seconds in Retry-After

Progress = Callable[[float, int], None]
"""Called with the seconds since the start and the number of ended requests."""


def run(load: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Run a load to its end on uvloop, the event loop with the least CPU time; warn if the driver was busy."""
    outcome = uvloop.run(load)
    if outcome.driver_cpu > BUSY_SHARE:
        share = f"{outcome.driver_cpu:.0%} of a core"
        print(f"warning: the load driver used {share}; the server may be faster than this shows", file=sys.stderr)
    return outcome


class Driver:
    """One run: its parameters and results so far."""

    counts_unfinished = True
    """Whether requests in progress at the end are errors."""
    keeps_connections = True
    """Whether a connection is used again; otherwise each request has one of its own."""
    bytes_per_second = 0
    """Speed of each upload; 0 for no limit."""

    def __init__(
        self,
        url: str | Target,
        samples: Sequence[Sample],
        seconds: float,
        *,
        patience: float = PATIENCE_SECONDS,
        progress: Progress | None = None,
    ) -> None:
        """Prepare to send `samples` in turn for `seconds`.

        Args:
            url: URL to post to, on this machine; or another target.
            samples: Images, sent in turn.
            seconds: Duration of sending.
            patience: Seconds to wait for a response. The latency includes requests without a response in this time.
            progress: Called regularly.

        Raises:
            ValueError: A URL is not on this machine, or there are no samples.
        """
        if not samples:
            raise ValueError("there is nothing to send")
        self._target = url if isinstance(url, Target) else local_target(url)
        self._seconds = seconds
        self._patience = patience
        self._progress = progress
        self._messages = [encode_request(self._target, sample.body) for sample in samples]
        self._tally = Tally([sample.expected for sample in samples], patience, seconds)
        self._connections: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Idle connections, the most recently used one last."""
        self._pending: dict[int, float] = {}
        """Requests in progress: their numbers, and when their latency began."""
        self._issued = 0
        self._started = 0.0

    async def closed(
        self, clients: int, *, requests: int | None = None, is_polite: bool = False, spread_seconds: float = 0.0
    ) -> Outcome:
        """Let each of so many clients send its next request as soon as it has the response to the previous one.

        Args:
            clients: Number of connections.
            requests: Maximum number of requests; None for no limit.
            is_polite: Whether a client waits for the time in Retry-After, and up to a tenth more: they must not retry together.
            spread_seconds: Time within which the clients begin.

        Raises:
            OSError: The server does not accept connections.
        """
        limit = sys.maxsize if requests is None else requests

        async def send() -> None:
            pauses = (place * spread_seconds / clients for place in range(clients))
            await asyncio.gather(*(self._client(pause, limit, is_polite=is_polite) for pause in pauses))

        return await self._measure(clients, send())

    async def constant(self, rate: float, connections: int = OPEN_CONNECTIONS) -> Outcome:
        """Send `rate` requests per second, independent of the server's speed; connections are opened when they are needed.

        Latency counts from when a request was due, not from when a connection was free: a server that stalls delays all that were
        due meanwhile. The event loop's timers have a resolution of a millisecond. Errors as for `closed`.
        """
        return await self._measure(1, self._schedule(rate, connections))

    async def _measure(self, opened: int, work: Coroutine[Any, Any, None]) -> Outcome:
        tick = _TICK_SECONDS if self._progress else None
        sending: asyncio.Task[None] | None = None
        try:
            await self._open(opened)
            cpu, self._started = thread_time(), perf_counter()
            self._tally.start()
            end = self._started + self._seconds + (self._patience if self.counts_unfinished else 0)
            sending = asyncio.ensure_future(work)
            while not sending.done() and (left := end - perf_counter()) > 0:
                if self._progress:
                    self._progress(perf_counter() - self._started, self._tally.ended)
                await asyncio.wait([sending], timeout=min(left, tick or left))
            elapsed = perf_counter() - self._started
            cpu = (thread_time() - cpu) / elapsed
        finally:
            work.close() if sending is None else sending.cancel()
            for connection in list(self._connections):
                connection.transport.abort()
            await asyncio.sleep(0)  # transports close in the next iteration of the event loop
        await asyncio.gather(sending, return_exceptions=True)
        for since in self._pending.values() if self.counts_unfinished else ():
            self._tally.gave_up(since)
        if self._progress:
            self._progress(elapsed, self._tally.ended)
        return self._tally.outcome(cpu)

    async def _client(self, pause: float, limit: int, *, is_polite: bool) -> None:
        """Send requests until the time or the number of requests is over."""
        await asyncio.sleep(pause)
        while self._issued < limit and (now := perf_counter()) - self._started < self._seconds:
            number, self._issued = self._issued, self._issued + 1
            self._pending[number] = now
            response = await self._request(number, now)
            if response is None:
                await asyncio.sleep(_RECONNECT_SECONDS)
            elif is_polite and response.retry_after:
                left = self._started + self._seconds - perf_counter()
                await asyncio.sleep(min(left, response.retry_after * uniform(1, 1 + _JITTER)))  # noqa: S311 - not a secret

    async def _schedule(self, rate: float, connections: int) -> None:
        """Start each request when it is due, and wait for all."""
        room, tasks = asyncio.Semaphore(connections), set[asyncio.Task[None]]()
        try:
            for number in range(max(1, round(rate * self._seconds))):
                due = self._started + number / rate
                if (left := due - perf_counter()) > 0:
                    await asyncio.sleep(left)
                self._tally.due(perf_counter() - due)
                self._pending[number] = due
                tasks.add(task := asyncio.ensure_future(self._scheduled(number, due, room)))
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            for task in list(tasks):
                task.cancel()

    async def _scheduled(self, number: int, due: float, room: asyncio.Semaphore) -> None:
        async with room:
            await self._request(number, due)

    async def _request(self, number: int, since: float) -> Response | None:
        """Send a request over a free connection or a new one, and count the response; return None if there is none."""
        connection = self._idle.popitem()[0] if self._idle else None
        try:
            async with asyncio.timeout(max(0.0, since + self._patience - perf_counter())):
                connection = connection or await self._connect()
                response = await connection.ask(self._messages[number % len(self._messages)], self.bytes_per_second)
        except OSError:  # also if the time is over
            if connection:
                connection.transport.abort()
            del self._pending[number]
            self._tally.gave_up(since)
            return None
        del self._pending[number]
        result = self._tally.answered(number, since, response.status, response.body, response.timing)
        if not self.keeps_connections:
            connection.transport.close()
        elif not connection.transport.is_closing():
            self._idle[connection] = None
        return response if result == response.status else response._replace(status=result)

    async def _connect(self) -> Connection:
        loop, target = asyncio.get_running_loop(), self._target
        local = (target.source, 0) if target.source else None
        _, connection = await loop.create_connection(
            lambda: Connection(self._lost), target.host, target.port, ssl=target.tls, server_hostname=target.name, local_addr=local
        )
        self._connections.add(connection)
        return connection

    def _lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._idle.pop(connection, None)

    async def _open(self, count: int) -> None:
        try:
            async with asyncio.timeout(self._patience):
                self._idle = dict.fromkeys(await asyncio.gather(*(self._connect() for _ in range(count))))
        except TimeoutError as error:
            raise TimeoutError(f"no connection within {self._patience:g} s") from error
