"""TCP ports of this machine."""

import errno
import secrets
import socket
from ipaddress import ip_address

# Below the range from which the kernel picks ports for outgoing connections.
_LOWEST, _HIGHEST = 10_000, 30_000


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on the port.

    Raises:
        OSError: The host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens on the address.

    Raises:
        OSError: The host is not an address.
    """
    return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))


def find_free(count: int) -> list[int]:
    """Find that many different ports on which nobody listens on loopback."""
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(range(_LOWEST, _HIGHEST))
        if is_free("127.0.0.1", port):
            found.add(port)
    return list(found)
