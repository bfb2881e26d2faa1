"""Callers that share a server: each has its own API key and address, most send as much as they can, and one is measured."""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from math import ceil
from time import perf_counter
from typing import NamedTuple

import msgspec
import uvloop

from app.host.processes import raise_file_limit
from bench.load.connection import Connection
from bench.load.target import local_target

PATIENCE_SECONDS = 10.0
"""Maximum time that the measured caller waits for a response."""

_RETRY_SECONDS = 0.05  # after a connection that could not be opened
_TICKS = 20  # per second, for slow uploads


class Request(NamedTuple):
    """A POST request."""

    path: str
    headers: dict[str, str]
    body: bytes


class Caller(NamedTuple):
    """One user of the server."""

    request: Request
    """What it sends, over and over."""
    credential: str
    """Its API key for a header; empty if it is in the body."""
    address: str
    """Its own address, of 127.0.0.0/8."""
    clients: int = 1
    """Number of connections."""
    bytes_per_second: int = 0
    """Speed of its uploads; 0 for no limit."""


class Answers(NamedTuple):
    """Responses to the measured caller."""

    statuses: Counter[str]
    """Number of requests by result: an HTTP status, or `error` (no response)."""
    milliseconds: list[float]
    """Times since the served requests were due, ascending, and the whole patience for each request without a response."""

    @property
    def served(self) -> float:
        """Share of the requests with status 200."""
        return self.statuses["200"] / self.statuses.total()

    def percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the responses arrived; infinite if all requests were rejected."""
        return self.milliseconds[ceil(len(self.milliseconds) * percent / 100) - 1] if self.milliseconds else float("inf")


async def flood(url: str, callers: Sequence[Caller], seconds: float) -> list[Counter[str]]:
    """Let each client of several callers send its next request after the response to the previous one, without a pause.

    Returns:
        Number of requests by result, for each caller: an HTTP status, or `error` (no response).
    """
    floods = [(_SlowFlood if caller.bytes_per_second else _Flood)(url, caller) for caller in callers]
    await asyncio.gather(*(each.run(seconds) for each in floods))
    return [each.statuses for each in floods]


def main() -> None:
    """Call `flood` in a process of its own: read the arguments as MessagePack; write a line at the start, then the results."""
    url, callers, seconds = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[str, list[Caller], float])
    raise_file_limit()
    print(flush=True)
    sys.stdout.buffer.write(msgspec.msgpack.encode(uvloop.run(flood(url, callers, seconds))))


async def probe(url: str, caller: Caller, rate: float, seconds: float) -> Answers:
    """Send `rate` requests per second, each over a free connection or a new one, independent of the server's speed."""
    return await _Probe(url, caller).run(rate, round(rate * seconds))


class _Base:
    """The connections of a caller, and its requests by result."""

    def __init__(self, url: str, caller: Caller) -> None:
        self.statuses: Counter[str] = Counter()
        self.caller = caller
        self.message = _encode(url, caller)
        self.connections: set[Connection] = set()
        self.target = local_target(url)

    def opened(self, connection: Connection) -> None:
        self.connections.add(connection)

    def close(self) -> None:
        for connection in list(self.connections):
            connection.transport.abort()


class _Flood(_Base):
    _is_over = False

    async def run(self, seconds: float) -> None:
        self._opening = {asyncio.ensure_future(self._open()) for _ in range(self.caller.clients)}
        await asyncio.sleep(seconds)
        self._is_over = True
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        self.close()
        await asyncio.sleep(0)  # transports close in the next iteration of the event loop

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> None:  # noqa: ARG002
        self.statuses[status] += 1

    def free(self, connection: Connection) -> None:
        connection.send(self.message, 0, 0.0)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:  # noqa: ARG002
        self.connections.discard(connection)
        if self._is_over:
            return
        if number is not None:
            self.statuses["error"] += 1
        task = asyncio.ensure_future(self._open())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self) -> None:
        while True:
            try:
                self.free(await _connect(self))
            except OSError:
                self.statuses["error"] += 1
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return


class _SlowFlood(_Flood):
    async def run(self, seconds: float) -> None:
        self._sent: dict[Connection, int] = {}
        trickle = asyncio.ensure_future(self._trickle())
        await super().run(seconds)
        trickle.cancel()

    def free(self, connection: Connection) -> None:
        self._sent[connection] = self.caller.bytes_per_second
        connection.send(self.message[: self.caller.bytes_per_second], 0, 0.0)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        self._sent.pop(connection, None)
        super().lost(connection, number, since)

    async def _trickle(self) -> None:
        """Send the next piece on each connection every second, a part of them at a time."""
        while True:
            connections = list(self._sent)
            for first in range(_TICKS):
                await asyncio.sleep(1 / _TICKS)
                for connection in connections[first::_TICKS]:
                    if connection.number is not None and connection in self._sent:
                        start = self._sent[connection]
                        self._sent[connection] = start + self.caller.bytes_per_second
                        connection.transport.write(self.message[start : self._sent[connection]])


class _Probe(_Base):
    async def run(self, rate: float, count: int) -> Answers:
        started = perf_counter()
        self._idle: list[Connection] = []
        self._results = [asyncio.get_running_loop().create_future() for _ in range(count)]
        milliseconds = await asyncio.gather(*(self._request(number, started + number / rate) for number in range(count)))
        self.close()
        await asyncio.sleep(0)  # as above
        return Answers(self.statuses, sorted(each for each in milliseconds if each is not None))

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> None:  # noqa: ARG002
        if not self._results[number].done():
            self._results[number].set_result(status)

    def free(self, connection: Connection) -> None:
        self._idle.append(connection)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:  # noqa: ARG002
        self.connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        if number is not None and not self._results[number].done():
            self._results[number].set_result("error")

    async def _request(self, number: int, due: float) -> float | None:
        """Send one request when it is due; return the milliseconds since then, None if it is rejected."""
        await asyncio.sleep(due - perf_counter())
        status, connection = "error", None
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                connection = self._idle.pop() if self._idle else await _connect(self)
                connection.send(self.message, number, due)
                status = await self._results[number]
        except (OSError, TimeoutError):
            if connection:
                connection.transport.abort()
        self.statuses[status] += 1
        if status == "error":
            return PATIENCE_SECONDS * 1e3
        return (perf_counter() - due) * 1e3 if status == "200" else None


async def _connect(owner: _Flood | _Probe) -> Connection:
    """Open a connection from the caller's address; raise OSError if that fails."""
    loop, target = asyncio.get_running_loop(), owner.target
    local = owner.caller.address, 0
    return (await loop.create_connection(lambda: Connection(owner), target.host, target.port, local_addr=local))[1]


def _encode(url: str, caller: Caller) -> bytes:
    request = caller.request
    headers = {"host": local_target(url).authority, **request.headers}
    if caller.credential:
        headers["authorization"] = f"Bearer {caller.credential}"
    lines = [f"POST {request.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + request.body


if __name__ == "__main__":
    main()
