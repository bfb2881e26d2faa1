"""TCP ports of this machine, and who uses them."""

import errno
import re
import socket
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

_LISTEN = "0A"  # state in /proc/net/tcp
NEREID = re.compile(r"^nereid|^\S+ worker-\d+$|^\S*(python\S* .*(-m app|/nereid)|/nereid) (serve|api)\b")
"""Matches the command lines of this program and of its processes."""


def is_free(host: str, port: int) -> bool:
    """Return whether a server can listen on the port; raise OSError if the host is not an address of this machine."""
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
    """Return the IP address of a host, preferably IPv4, and for `::` that of all IPv4 addresses if the kernel has no IPv6.

    Raise OSError for an unknown host.
    """
    if host == "::" and not _has_ipv6():
        return "0.0.0.0"  # noqa: S104 - as the user asked
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError:
        return False
    return True


def holder(port: int) -> tuple[int, str] | None:
    """Find id and command line of the process that listens on a port, of Nereid the first; None if this user may not see it."""
    sockets = _listeners(port)
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda process: int(process.name)):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if any(str(file.readlink()) in sockets for file in (process / "fd").iterdir()):
                while NEREID.search(_command(parent := _parent(process))):
                    process = parent  # noqa: PLW2901 - and then the loop ends
                return int(process.name), _command(process)
    return None


def _listeners(port: int) -> set[str]:
    # Named as in /proc/PID/fd.
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # a dual-stack server has an IPv6 socket
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:] if Path(table).exists() else ():
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{inode}]")
    return sockets


def _command(process: Path) -> str:
    with suppress(OSError):
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _parent(process: Path) -> Path:
    with suppress(OSError):
        return process.with_name((process / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return process


def remove_stale_socket(path: Path) -> bool:
    """Remove a unix socket without a listener; return whether a server can listen there now, or raise OSError."""
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
    """Return whether only this machine can reach a server that listens on the address; raise OSError if it is none."""
    return all(ip_address(found[4][0]).is_loopback for found in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))


def is_this_machine(host: str) -> bool:
    """Return whether the host is an address or a name of this machine."""
    try:
        return is_free(host, 0)
    except (OSError, UnicodeError):  # UnicodeError: not a valid host name
        return False
