"""A cable with a delay, for kernels without netem: a TUN device in each of two networks, and a thread that passes packets on."""

import fcntl
import os
import select
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from time import monotonic

from tests.networks import bring_up, enter

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_BYTES = 2048
"""More than a packet has with the usual MTU."""


@contextmanager
def delayed_cable(name: str, ends: Mapping[str, str], seconds: float) -> Iterator[None]:
    """Join two networks until the block ends.

    Args:
        name: Name of the interface in both.
        ends: IPv4 addresses of the ends by network, with 24 bits for the subnet.
        seconds: How long each packet takes in either direction.
    """
    files = [_plug_in(network, name) for network in ends]
    for network, address in ends.items():
        bring_up(network, name, address)
    stop, stopped = os.pipe()
    thread = Thread(target=_pass_on, args=(*files, stop, seconds))
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join()
        for file in (*files, stop):
            os.close(file)


def _plug_in(network: str, name: str) -> int:
    """Create a TUN device in a network; return the file with its packets."""

    def create() -> int:
        enter(network)
        file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name.encode("ascii"), _IFF_TUN | _IFF_NO_PI))
        return file

    with ThreadPoolExecutor(1) as thread:  # which ends afterwards, in that network
        return thread.submit(create).result()


def _pass_on(one: int, other: int, stop: int, seconds: float) -> None:
    """Pass on each packet of a device to the other one after a time, until a pipe is closed."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        pause = max(0.0, waiting[0][0] - monotonic()) if waiting else None
        ready, _, _ = select.select([one, other, stop], [], [], pause)
        if stop in ready:
            return
        waiting.extend((monotonic() + seconds, other if file == one else one, os.read(file, _MAX_BYTES)) for file in ready)
        while waiting and waiting[0][0] <= monotonic():
            _, file, packet = waiting.popleft()
            os.write(file, packet)
