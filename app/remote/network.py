"""Connections to allowed IP addresses only, in which a host cannot block the event loop."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from ssl import SSLContext
from typing import Any

from httpcore import (
    SOCKET_OPTION,
    AnyIOBackend,
    AsyncNetworkBackend,
    AsyncNetworkStream,
    ConnectError,
    ConnectTimeout,
    RemoteProtocolError,
)

from app.errors import ImageNotFetched

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name for a port; raises `OSError` if there are none."""

UNREACHABLE = "the host of the image cannot be connected to, or has no valid certificate"
"""The error of a failed connection. All causes have the same text, so that callers cannot scan ports."""

_MAX_ADDRESSES = 4
# Per IP address of a host.
_CONNECT_SECONDS = 3.0
_READ_BYTES = 1 << 14
_MAX_HEAD_BYTES = 1 << 16


class CheckedNetwork(AsyncNetworkBackend):
    """Opens one connection. It resolves the name and checks the addresses itself, so they cannot change in between."""

    def __init__(self, resolve: Resolve, is_allowed: Callable[[str], bool]) -> None:
        self.awaits_head = True
        """Whether the head of the response, whose size is limited, is not complete."""
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._network = AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002, ASYNC109 - as the base class
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> AsyncNetworkStream:
        """Connect to the first reachable IP address of a name; raises ImageNotFetched."""
        failure: Exception | None = None
        for number in await self._lookup(host, port):
            try:
                stream = await self._network.connect_tcp(number, port, _CONNECT_SECONDS, local_address, socket_options)
            except (ConnectError, ConnectTimeout) as error:
                failure = error
            else:
                return _Stream(stream, self)
        raise ImageNotFetched(UNREACHABLE) from failure

    async def _lookup(self, name: str, port: int) -> list[str]:
        try:
            found = list(dict.fromkeys(await self._resolve(name, port)))
        except (OSError, UnicodeError):
            found = []
        if not found or not all(map(self._is_allowed, found)):
            # The same error in both cases, so that callers cannot find out which names exist in private networks.
            raise ImageNotFetched("the host of the image has no IP address that may be connected to")
        return found[:_MAX_ADDRESSES]


class _Stream(AsyncNetworkStream):
    """Reads in small pieces and yields to the event loop before each."""

    def __init__(self, stream: AsyncNetworkStream, network: CheckedNetwork) -> None:
        self._stream = stream
        self._network = network
        self._received = 0

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109 - as the base class
        await asyncio.sleep(0)
        data = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._received += len(data)
        if self._network.awaits_head and self._received > _MAX_HEAD_BYTES:  # such as endless informational responses
            raise RemoteProtocolError("the head of the response is too long")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout), self._network)

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401
        return self._stream.get_extra_info(info)


def system_resolver(threads: Executor) -> Resolve:
    """Return the system's resolver, which runs in threads."""

    async def resolve(name: str, port: int) -> list[str]:
        # AI_ADDRCONFIG: no IPv6 addresses on hosts without IPv6.
        look_up = partial(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
        return [str(entry[4][0]) for entry in await asyncio.get_running_loop().run_in_executor(threads, look_up)]

    return resolve
