"""TCP ports and unix sockets of this machine."""

import errno
import socket
from ipaddress import ip_address
from pathlib import Path


def is_free(host: str, port: int) -> bool:
    """Return whether a server can listen on the port.

    Raises:
        OSError: The host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(resolve(host), port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def resolve(host: str) -> str:
    """Return the IP address of a host, preferably IPv4.

    Raises:
        OSError: The host is unknown.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def remove_stale_socket(path: Path) -> bool:
    """Remove a unix socket without a listener; return whether a server can listen there now.

    Raises:
        OSError: The path cannot be accessed, or is not a socket.
    """
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, "something else is there", str(path))
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return path.parent.is_dir()
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return True
    return False


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on the address can be reached only from this machine.

    Raises:
        OSError: The host is not an address.
    """
    return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))


def is_this_machine(host: str) -> bool:
    """Return whether the host is an address or a name of this machine."""
    try:
        return is_free(host, 0)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return False
