"""What tests of sockets need: IPv6, and a short path."""

import socket
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@pytest.fixture(name="tmp_path")
def short_tmp_path() -> Iterator[Path]:
    """Take the place of pytest's own, whose path has the names of user and test in it: the kernel takes 107 bytes."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


def _has_ipv6() -> bool:
    """Return whether this machine has the loopback address; that the kernel knows IPv6 is not enough."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


HAS_IPV6 = _has_ipv6()
NEEDS_IPV6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
