"""The exceptions of this package.

NereidError
├── Problem             the gateway, or a proxy before it, has responded with an error
├── Unreachable         there is no response
├── UnexpectedResponse  the response is not that of a gateway
└── InvalidKey          the API key cannot be sent
"""

import httpx
import msgspec


class NereidError(Exception):
    """A request has failed."""


class Problem(NereidError):
    """The request got an error, usually as application/problem+json (RFC 9457)."""

    def __init__(self, status: int, document: "ProblemDocument", retry_after: float | None = None) -> None:
        super().__init__(status, document, retry_after)
        self.status = status
        self.code = document.code
        """Identifies the kind of error, such as `unsupported_format`; empty if the response has none."""
        self.title = document.title
        self.detail = document.detail
        self.request_id = document.request_id
        """The id of the request in the gateway's log."""
        self.retry_after = retry_after
        """What the response says about when to repeat the request, seconds."""

    def __str__(self) -> str:
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{self.status} {self.code}".rstrip() + f": {self.detail}{request}"


class Unreachable(NereidError):
    """There is no response: the connection failed or broke, or the response took too long. `__cause__` is httpx's error."""


class UnexpectedResponse(NereidError):
    """The response is successful, but not that of a gateway. Does the address belong to another server?"""


class InvalidKey(NereidError):
    """The API key cannot be sent, because it has characters that no key has. The message does not contain it."""


class ProblemDocument(msgspec.Struct, frozen=True):
    """The body of an error, and the problem of an image in a batch."""

    title: str = ""
    detail: str = ""
    code: str = ""
    request_id: str = ""
    status: int = 0


def is_local(url: httpx.URL) -> bool:
    """Return whether a URL is of this machine, to which no proxy of the environment leads."""
    return url.host in {"localhost", "::1"} or url.host.startswith("127.")


def address(url: httpx.URL) -> str:
    """Return the address of a server for messages, without a password."""
    return str(url.copy_with(userinfo=b"", path="/", query=None))
