"""The state of each Triton, for the health report."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from app.api.reports.health_schema import ServerHealth
from app.errors import GatewayError
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.pool import TritonPool

_STATES = ("ready", "not_ready", "unreachable")


async def examine(pool: TritonPool, model: str) -> list[ServerHealth]:
    """Query all Tritons.

    Args:
        pool: The Tritons.
        model: The default model. A Triton is ready if this model is.
    """
    sent = sum(server.recent_images for server in pool.servers)
    return list(await asyncio.gather(*(_examine(server, pool, model, sent) for server in pool.servers)))


def best_status(servers: Sequence[ServerHealth]) -> str:
    """Return the status of the Triton in the best state."""
    return min((server.status for server in servers), key=_STATES.index, default=_STATES[-1])


async def _examine(server: TritonBackend, pool: TritonPool, model: str, sent: float) -> ServerHealth:
    version, is_ready = await asyncio.gather(_ask_version(server.client), server.client.is_ready(model))
    is_ready = is_ready and server.is_usable(model)
    return ServerHealth(
        server.address,
        "ready" if is_ready else "unreachable" if version is None else "not_ready",
        version,
        "shm" if pool.transport.maps_memory(server.regions) else "inline",
        sorted(name for name, served in server.models.items() if not served.is_usable),
        round(server.recent_images / sent, 3) if sent else 0.0,
    )


async def _ask_version(client: TritonClient) -> str | None:
    """Return a Triton's version; None if it does not respond."""
    with suppress(GatewayError):
        return (await client.read_server()).version
    return None
