"""One HTTP/1.1 connection of the load driver: sends prebuilt requests, and parses as little as possible of responses."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from bench.load.target import Target

_VERSION = b"http/1.1 "
_OK = b"http/1.1 200"


class Response(NamedTuple):
    """What the driver needs of a response."""

    status: str
    """Status code, three digits; `wrong` once it was found to be so."""
    body: bytes
    timing: bytes
    """Value of the Server-Timing header; may be empty."""
    retry_after: float
    """Retry-After in seconds, if the status is not 200; 0 if absent."""


class Connection(asyncio.Protocol):
    """One connection; it is idle until `ask` is called."""

    def __init__(self, when_lost: Callable[["Connection"], object]) -> None:
        self._when_lost = when_lost
        self._answer: asyncio.Future[Response] | None = None
        self._buffer = b""
        self._needed = 0  # bytes of the whole response; known after its head
        self._body_start = 0
        self._is_last = False
        self._timing = b""
        self._retry_after = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    async def ask(self, message: bytes, bytes_per_second: int = 0) -> Response:
        """Send a request, at this speed unless it is 0; return the response.

        Raises:
            ConnectionError: The connection was lost, or the response is not HTTP/1.1 with a length.
        """
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._answer = answer
        step = bytes_per_second or len(message)
        self.transport.write(message[:step])
        for start in range(step, len(message), step):
            await asyncio.wait([answer], timeout=1)
            if answer.done():
                break
            self.transport.write(message[start : start + step])
        return await answer

    def data_received(self, data: bytes) -> None:
        """Collect a response."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        if self._answer is None or self._answer.done():  # unexpected data
            self.transport.abort()
        elif (self._needed or self._read_head(buffer)) and len(buffer) >= self._needed:
            body = buffer[self._body_start : self._needed]
            self._answer.set_result(Response(buffer[9:12].decode("latin-1"), body, self._timing, self._retry_after))
            self._buffer, self._needed, self._answer = b"", 0, None
            if self._is_last or self.transport.get_write_buffer_size():
                self.transport.abort()  # also after a response before the end of the request, whose rest is not needed

    def connection_lost(self, _error: Exception | None) -> None:
        """End the request in progress, if any."""
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionResetError())
        self._when_lost(self)

    def _read_head(self, buffer: bytes) -> bool:
        """Parse the required headers of a response; return whether the head is complete and valid."""
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            if not _VERSION.startswith(buffer[: len(_VERSION)].lower()):  # another protocol, such as HTTP/2
                self.transport.abort()
            return False
        lower = buffer[: end + 2].lower()
        length = _header(lower, lower, b"content-length")
        if not length.isdigit() or not lower.startswith(_VERSION):
            self.transport.abort()
            return False
        self._body_start = end + 4
        self._needed = self._body_start + int(length)
        self._is_last = b"\r\nconnection: close" in lower
        self._timing = _header(buffer, lower, b"server-timing")
        seconds = b"" if lower.startswith(_OK) else _header(lower, lower, b"retry-after")
        self._retry_after = float(seconds) if seconds.isdigit() else 0.0
        return True


def encode_request(target: Target, body: bytes) -> bytes:
    """Build a POST request with an image, a form or JSON."""
    content_type = "image/jpeg" if body.startswith(b"\xff\xd8") else "application/octet-stream"
    if body.startswith(b"--"):
        boundary = body[2 : body.index(b"\r")].decode("ascii")
        content_type = f"multipart/form-data; boundary={boundary}"
    elif body.startswith(b"{"):
        content_type = "application/json"
    head = (
        f"POST {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
        f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    )
    if target.key:
        head += f"Authorization: Bearer {target.key}\r\n"
    if target.stream:
        head += f"X-Stream: {target.stream}\r\n"
    return f"{head}\r\n".encode("ascii") + body


def _header(head: bytes, lower: bytes, name: bytes) -> bytes:
    """Return the value of a header, empty if absent; `lower` is the head in lower case."""
    start = lower.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    return head[start : lower.index(b"\r\n", start)].strip()
