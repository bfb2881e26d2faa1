"""Networks of their own: namespaces of the kernel, joined by virtual cables."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from pathlib import Path

import pytest

NEEDS_NETWORKS = pytest.mark.skipif(
    subprocess.run(["unshare", "--net", "ip", "link"], check=False, capture_output=True).returncode != 0,
    reason="a network of its own needs root or CAP_NET_ADMIN, and ip from iproute2",
)
_CLONE_NEWNET = 0x40000000
"""Of the kernel: a namespace that is a network."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def network(name: str) -> Iterator[str]:
    """Have a network with only its loopback interface until the block ends; needs CAP_NET_ADMIN."""
    ip("netns", "add", name)
    try:
        ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        ip("netns", "delete", name)


def bring_up(network: str, interface: str, address: str) -> None:
    ip("-n", network, "address", "add", f"{address}/24", "dev", interface)
    ip("-n", network, "link", "set", interface, "up")


def enter(network: str) -> None:
    """Move the calling thread, but not its process, to a network, to which all sockets belong that it makes from now on."""
    with Path("/run/netns", network).open("rb") as namespace:
        assert CDLL(None).setns(namespace.fileno(), _CLONE_NEWNET) == 0
