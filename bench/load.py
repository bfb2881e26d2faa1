"""Ask a server for detections, as often as it can or at a rate of our own, and count what comes back.

One process and no HTTP library: on shared cores every cycle of the client is taken from the server.
So requests are prebuilt bytes, and of an answer only the status, the length and Server-Timing are read;
of the bodies, every one of the first pass over the pictures and every 16th of the rest.
"""

import asyncio
import ipaddress
import sys
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from functools import cached_property
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import uvloop
from hdrh.histogram import HdrHistogram

CHECK_EVERY = 16
PATIENCE = 30.0
"""Seconds after which an answer is no longer waited for."""
PAUSE = 0.05
"""Seconds before a broken connection is opened again."""
TICK = 0.05
LONGEST = 60_000_000
"""Microseconds that a histogram can hold."""
BUSY = 0.8
"""Share of a core above which the driver may be what is measured."""

_NOT_OURS = b"decode", b"infer"

Progress = Callable[[float, int], None]
"""Is told the seconds since the start and the requests answered."""


class Sample(NamedTuple):
    """One picture to send."""

    name: str
    body: bytes
    expected: frozenset[str]
    """Class names that must be among the detections; empty: any well-formed answer will do."""


class Outcome(msgspec.Struct, dict=True):
    """What a run counted."""

    seconds: float
    """From the first request to the last answer."""
    requests: int
    statuses: dict[str, int]
    """How many ended in which way: a status, `wrong` (200 with a wrong answer) or `error` (no answer)."""
    latency: str
    """Of right answers and of those given up: an encoded HdrHistogram of microseconds."""
    stages: dict[str, float]
    """Mean milliseconds of every Server-Timing entry of right answers."""
    driver_cpu: float
    """Share of one core this process used."""
    own_p50: float = 0.0
    """Median milliseconds of right answers that were neither `decode` nor `infer`, as the client sees it."""

    @property
    def good(self) -> int:
        """Right answers."""
        return self.statuses.get("200", 0)

    @property
    def rate(self) -> float:
        """Right answers per second."""
        return self.good / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> float:
        """Share of requests without a right answer."""
        return 1 - self.good / self.requests if self.requests else 0.0

    @cached_property
    def histogram(self) -> HdrHistogram:
        """The latency, in microseconds."""
        return HdrHistogram.decode(self.latency)

    def percentile(self, percent: float) -> float:
        """Milliseconds within which `percent` of the answers came."""
        return float(self.histogram.get_value_at_percentile(percent)) / 1e3

    @cached_property
    def mean(self) -> float:
        """Milliseconds."""
        return float(self.histogram.get_mean_value()) / 1e3 if self.histogram.total_count else 0.0

    @cached_property
    def max(self) -> float:
        """Milliseconds."""
        return float(self.histogram.get_max_value()) / 1e3


def run(asking: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Wait for a run on the cheapest event loop there is."""
    return uvloop.run(asking)


async def closed(  # noqa: PLR0913
    url: str,
    samples: Sequence[Sample],
    *,
    clients: int,
    seconds: float,
    requests: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Let each client ask again once it is answered, until the time or the number of requests is used up."""
    return await _Closed(url, samples, clients, seconds, requests).measure(progress)


async def constant(  # noqa: PLR0913
    url: str,
    samples: Sequence[Sample],
    *,
    rate: float,
    seconds: float,
    connections: int = 256,
    progress: Progress | None = None,
) -> Outcome:
    """Ask `rate` times a second, whatever the server does.

    Latency counts from when a request was due, not from when a connection was free for it: a server that
    stalls makes all requests late that were due in the meantime. The event loop's timers are a millisecond coarse.
    """
    return await _Constant(url, samples, connections, seconds, rate).measure(progress)


class _Detection(msgspec.Struct):
    class_name: str


class _Answer(msgspec.Struct):
    detections: list[_Detection]


_answer = msgspec.json.Decoder(_Answer)


def _is_right(body: bytes, expected: frozenset[str]) -> bool:
    try:
        return expected <= {detection.class_name for detection in _answer.decode(body).detections}
    except msgspec.DecodeError:
        return False


def _message(host: str, path: str, body: bytes) -> bytes:
    kind = "image/jpeg" if body.startswith(b"\xff\xd8") else "application/octet-stream"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("ascii") + body


class _Connection(asyncio.Protocol):
    """One client. It is free until it is told to ask."""

    def __init__(self, owner: "_Run") -> None:
        self.number: int | None = None
        self.since = 0.0
        self._owner = owner
        self._buffer = b""
        self._need = 0  # bytes of the whole answer, once its head was read
        self._body = 0  # where its body starts
        self._timing = b""
        self._is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._owner.connections.add(self)

    def ask(self, number: int, since: float) -> None:
        self.number = number
        self.since = since
        messages = self._owner.messages
        self.transport.write(messages[number % len(messages)])

    def data_received(self, data: bytes) -> None:
        self._buffer = buffer = self._buffer + data if self._buffer else data
        if self.number is None:  # nobody asked
            self.transport.abort()
            return
        if not self._need and not self._read_head(buffer):
            return
        if len(buffer) >= self._need:
            number, since = self.number, self.since
            status, body, is_last = buffer[9:12].decode("latin-1"), buffer[self._body : self._need], self._is_last
            self._buffer, self._need, self.number = b"", 0, None
            self._owner.answered(number, since, status, body, self._timing)
            if is_last:
                self.transport.close()
            else:
                self._owner.free(self)

    def _read_head(self, buffer: bytes) -> bool:
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lower = buffer[: end + 2].lower()
        start = lower.find(b"\r\ncontent-length:")
        if start < 0 or not lower.startswith(b"http/1.1 "):
            self.transport.abort()
            return False
        start += 17
        self._body = end + 4
        self._need = self._body + int(lower[start : lower.index(b"\r\n", start)])
        self._is_last = b"\r\nconnection: close" in lower
        start = lower.find(b"\r\nserver-timing:")
        self._timing = buffer[start + 16 : lower.index(b"\r\n", start + 16)] if start >= 0 else b""
        return True

    def connection_lost(self, _error: Exception | None) -> None:
        number, self.number = self.number, None
        self._owner.lost(self, number, self.since)


class _Run:
    """One run: what it was asked to do, what came back so far."""

    def __init__(self, url: str, samples: Sequence[Sample], width: int, seconds: float) -> None:
        parts = urlsplit(url)
        self.host, self.port = _loopback(url), parts.port or 80
        if not samples or width < 1:
            raise ValueError("nothing to send, or nobody to send it")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self.messages = [_message(parts.netloc, path, sample.body) for sample in samples]
        self.expected = [sample.expected for sample in samples]
        self.width = width
        self.length = seconds
        self.connections: set[_Connection] = set()
        self.issued = 0
        self.ended = 0
        self.statuses: Counter[str] = Counter()
        self._latency = array("d")
        self._own = array("d")
        self._stages: defaultdict[bytes, float] = defaultdict(float)
        self._timed = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_over = False
        self.start = self._last = 0.0

    def begin(self) -> None:
        """Start asking; all connections are open."""
        raise NotImplementedError

    def free(self, connection: _Connection) -> None:
        """Give a connection without a request something to do."""
        raise NotImplementedError

    def is_done(self, now: float) -> bool:
        """Is nothing left to send or to wait for?"""
        raise NotImplementedError

    async def measure(self, progress: Progress | None) -> Outcome:
        try:
            await asyncio.gather(*(self._connect() for _ in range(self.width)))
            cpu, self.start = process_time(), perf_counter()
            self._last = self.start
            self.begin()
            while not self.is_done(now := perf_counter()):
                for connection in [c for c in self.connections if c.number is not None and now - c.since > PATIENCE]:
                    connection.transport.abort()
                if now - self.start > self.length + PATIENCE:
                    break
                if progress:
                    progress(now - self.start, self.ended)
                await asyncio.sleep(TICK)
            elapsed = perf_counter() - self.start
            cpu = (process_time() - cpu) / elapsed
        finally:
            await self._close()
        if progress:
            progress(elapsed, self.ended)
        if cpu > BUSY:
            print(f"warning: the load driver used {cpu:.0%} of a core; the server may do more than this shows", file=sys.stderr)
        return self._outcome(cpu)

    def answered(self, number: int, since: float, status: str, body: bytes, timing: bytes) -> None:
        expected = self.expected
        if (
            status == "200"
            and (number < len(expected) or not number % CHECK_EVERY)
            and not _is_right(body, expected[number % len(expected)])
        ):
            status = "wrong"
        self._count(status)
        if status != "200":
            return
        self._latency.append(self._last - since)
        if timing:
            self._timed += 1
            stages = self._stages
            own = (self._last - since) * 1e3
            for entry in timing.split(b","):
                name, _, duration = entry.strip().partition(b";dur=")
                milliseconds = float(duration or 0)
                stages[name] += milliseconds
                if name in _NOT_OURS:
                    own -= milliseconds
            self._own.append(own)

    def lost(self, connection: _Connection, number: int | None, since: float) -> None:
        self.connections.discard(connection)
        if self.is_over:
            return
        if number is not None:
            self.give_up(since)
        task = asyncio.ensure_future(self._reconnect(0 if number is None else PAUSE))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def give_up(self, since: float) -> None:
        """Count a request without an answer; the time it took only if it was waited for to the end."""
        self._count("error")
        if self._last - since > PATIENCE:
            self._latency.append(self._last - since)

    def refused(self) -> None:
        """Note that a connection could not be opened again."""

    def _count(self, status: str) -> None:
        self._last = perf_counter()
        self.ended += 1
        self.statuses[status] += 1

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(lambda: _Connection(self), self.host, self.port)
        return connection

    async def _reconnect(self, pause: float) -> None:
        await asyncio.sleep(pause)
        while not self.is_over:
            try:
                connection = await self._connect()
            except OSError:
                self.refused()
                await asyncio.sleep(PAUSE)
            else:
                self.free(connection)
                return

    async def _close(self) -> None:
        self.is_over = True
        for connection in list(self.connections):
            connection.transport.abort()
            if connection.number is not None:
                self.give_up(connection.since)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)

    def _outcome(self, cpu: float) -> Outcome:
        histogram = HdrHistogram(1, LONGEST, 3)
        for seconds in self._latency:
            histogram.record_value(min(LONGEST, max(1, round(seconds * 1e6))))
        return Outcome(
            seconds=max(self._last - self.start, 1e-9),
            requests=self.ended,
            statuses=dict(sorted(self.statuses.items())),
            latency=histogram.encode().decode("ascii"),
            stages={name.decode("latin-1"): total / self._timed for name, total in self._stages.items()},
            driver_cpu=cpu,
            own_p50=median(self._own) if self._own else 0.0,
        )


class _Closed(_Run):
    def __init__(self, url: str, samples: Sequence[Sample], clients: int, seconds: float, requests: int | None) -> None:
        super().__init__(url, samples, clients, seconds)
        self.limit = sys.maxsize if requests is None else requests

    def begin(self) -> None:
        for connection in list(self.connections):
            self.free(connection)

    def free(self, connection: _Connection) -> None:
        now = perf_counter()
        if self._may_ask(now):
            self.issued += 1
            connection.ask(self.issued - 1, now)

    def refused(self) -> None:
        if self._may_ask(perf_counter()):
            self.issued += 1
            self._count("error")

    def is_done(self, now: float) -> bool:
        return self.issued == self.ended and not self._may_ask(now)

    def _may_ask(self, now: float) -> bool:
        return self.issued < self.limit and now - self.start < self.length


class _Constant(_Run):
    def __init__(self, url: str, samples: Sequence[Sample], connections: int, seconds: float, rate: float) -> None:
        super().__init__(url, samples, connections, seconds)
        if rate <= 0:
            raise ValueError("the rate must be above zero")
        self.rate = rate
        self.total = max(1, round(rate * seconds))
        self._idle: list[_Connection] = []
        self._due: deque[int] = deque()  # numbers of requests that no connection was free for

    def begin(self) -> None:
        self._idle = list(self.connections)
        self._send()

    def free(self, connection: _Connection) -> None:
        if self._due:
            self._ask(connection, self._due.popleft())
        else:
            self._idle.append(connection)

    def lost(self, connection: _Connection, number: int | None, since: float) -> None:
        if number is None and connection in self._idle:
            self._idle.remove(connection)
        super().lost(connection, number, since)

    def is_done(self, now: float) -> bool:  # noqa: ARG002
        return self.ended == self.total

    def _send(self) -> None:
        """Send all that is due by now, and come back when the next is."""
        if self.is_over:
            return
        now = perf_counter()
        while self.issued < self.total and self.start + self.issued / self.rate <= now:
            if self._idle:
                self._ask(self._idle.pop(), self.issued)
            else:
                self._due.append(self.issued)
            self.issued += 1
        if self.issued < self.total:
            asyncio.get_running_loop().call_later(self.start + self.issued / self.rate - now, self._send)

    def _ask(self, connection: _Connection, number: int) -> None:
        connection.ask(number, self.start + number / self.rate)

    async def _close(self) -> None:
        await super()._close()
        for number in [*self._due, *range(self.issued, self.total)]:
            self.give_up(self.start + number / self.rate)


def _loopback(url: str) -> str:
    """Give the host, if it is this machine.

    Raises:
        ValueError: It is not, or the URL is none of ours.

    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme != "http":
        raise ValueError(f"{url} does not start with http://")
    if host == "localhost":
        return host
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if not is_here:
        raise ValueError(f"load is put on this machine alone: 127.0.0.1, ::1 or localhost, not on {host}")
    return host
