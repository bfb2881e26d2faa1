"""Connections of clients that send no request."""

import asyncio
import os
import socket
import struct
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress

_CHECK_SECONDS = 5.0
_CHECKS = 3
# Of struct tcp_info in linux/tcp.h: state, segments received, and segments sent with data.
_TCP_INFO = struct.Struct("=B139xI12xI")
_ESTABLISHED = 1


async def end_silent(port: int, in_progress: Collection[str]) -> None:
    """End connections to a TCP port of this process whose first header is not complete after 10 to 15 s; never return.

    Granian has one time limit for a header and for an idle connection. `in_progress` has the clients' ports of all requests.
    """
    checks: dict[int, int] = {}
    """In how many checks in a row each connection had no request and no answer, by inode."""
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        with suppress(OSError):  # there is no free file
            checks = await asyncio.to_thread(_end_silent, port, in_progress, checks)


def _end_silent(port: int, in_progress: Collection[str], before: Mapping[int, int]) -> dict[int, int]:
    checks = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - there may be thousands
        with suppress(OSError), ExitStack() as stack:  # it is no TCP socket, or has just been closed
            descriptor = os.dup(int(name))  # otherwise the number may be that of another connection meanwhile
            stack.callback(os.close, descriptor)
            connection = socket.socket(fileno=descriptor)
            stack.callback(connection.detach)
            if not _is_unanswered(connection) or connection.getsockname()[1] != port:
                continue
            if str(connection.getpeername()[1]) not in list(in_progress):  # which changes meanwhile
                inode = os.fstat(descriptor).st_ino
                checks[inode] = before.get(inode, 0) + 1
                if checks[inode] >= _CHECKS:
                    connection.shutdown(socket.SHUT_RDWR)
    return checks


def _is_unanswered(connection: socket.socket) -> bool:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    if len(info) < _TCP_INFO.size:
        return False
    state, received, sent = _TCP_INFO.unpack(info)
    # The handshake has segments: a kernel that tells none, such as gVisor, counts nothing.
    return bool(state == _ESTABLISHED and received and not sent)
