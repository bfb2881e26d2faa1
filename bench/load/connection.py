"""One HTTP/1.1 connection of the load driver: sends prebuilt requests, and parses as little as possible of responses."""

import asyncio
from typing import TYPE_CHECKING

from bench.load.target import Target

if TYPE_CHECKING:
    from bench.load.driver import Driver

_VERSION = b"http/1.1 "
_OK = b"http/1.1 200"


class Connection(asyncio.Protocol):
    """One client, which tells its driver what happens. It is idle until `send` is called."""

    def __init__(self, owner: "Driver") -> None:
        self.number: int | None = None
        """Number of the request in progress."""
        self.since = 0.0
        """Start of its latency."""
        self.retry_after = 0.0
        """Retry-After of the last response in seconds; 0 if absent."""
        self._owner = owner
        self._buffer = b""
        self._needed = 0  # bytes of the whole response; known after its head
        self._body_start = 0
        self._timing = b""
        self._is_last = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Report to the owner."""
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._owner.opened(self)

    def send(self, message: bytes, number: int, since: float) -> None:
        """Send a request; its latency began at `since`."""
        self.number = number
        self.since = since
        self.transport.write(message)

    def data_received(self, data: bytes) -> None:
        """Collect a response."""
        self._buffer = buffer = self._buffer + data if self._buffer else data
        if self.number is None:  # unexpected data
            self.transport.abort()
            return
        if not self._needed and not self._read_head(buffer):
            return
        if len(buffer) >= self._needed:
            number, since = self.number, self.since
            status, body, is_last = buffer[9:12].decode("latin-1"), buffer[self._body_start : self._needed], self._is_last
            self._buffer, self._needed, self.number = b"", 0, None
            self._owner.answered(number, since, status, body, self._timing)
            if is_last or self.transport.get_write_buffer_size():
                self.transport.abort()  # also after a response before the end of the request, whose rest is not needed
            else:
                self._owner.free(self)

    def connection_lost(self, _error: Exception | None) -> None:
        """Report to the owner."""
        number, self.number = self.number, None
        self._owner.lost(self, number, self.since)

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
        self.retry_after = float(seconds) if seconds.isdigit() else 0.0
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
    return f"{head}\r\n".encode("ascii") + body


def _header(head: bytes, lower: bytes, name: bytes) -> bytes:
    """Return the value of a header, empty if absent; `lower` is the head in lower case."""
    start = lower.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    return head[start : lower.index(b"\r\n", start)].strip()
