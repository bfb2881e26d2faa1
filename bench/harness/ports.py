"""Free ports for servers that are measured."""

import secrets

from app.host.ports import is_free

# Below the range from which the kernel picks ports for outgoing connections.
_LOWEST, _HIGHEST = 10_000, 30_000


def find_free(count: int) -> list[int]:
    """Find `count` different free ports on loopback."""
    found: set[int] = set()
    while len(found) < count:
        port = secrets.choice(range(_LOWEST, _HIGHEST))
        if is_free("127.0.0.1", port):
            found.add(port)
    return list(found)
