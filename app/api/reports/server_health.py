"""The state of each Triton, for the health report."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter

from app.api.reports.health_schema import ServerHealth, Services, TritonHealth, TritonService
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


def summarize(servers: Sequence[ServerHealth], *, is_usable: bool) -> TritonHealth:
    """Describe the Triton in the best state, with the models of all Tritons.

    Args:
        servers: The result of `examine`.
        is_usable: Whether the default model, if ready, can be used.
    """
    if not servers:
        return TritonHealth("unreachable")
    best = min(servers, key=lambda server: _STATES.index(server.status))
    status = "not_ready" if best.status == "ready" and not is_usable else best.status
    models = sorted({model for server in servers for model in server.models_ready})
    return TritonHealth(status, best.version, best.latency_ms, models)


def to_services(servers: Sequence[ServerHealth], triton: TritonHealth, reason: object) -> Services:
    """Report whether any Triton responds.

    Args:
        servers: The result of `examine`.
        triton: The result of `summarize`.
        reason: Why the default model cannot be used; None if it can.
    """
    detail = str(reason) if reason and triton.status == "not_ready" else triton.status
    url = ",".join(server.address for server in servers)
    return Services(TritonService(triton.status != "unreachable", detail, url))


async def _examine(server: TritonBackend, pool: TritonPool, model: str, sent: float) -> ServerHealth:
    client = server.client
    (version, latency_ms), models_ready, is_ready = await asyncio.gather(
        _ask_version(client), _list_ready(client), client.is_ready(model)
    )
    is_ready = is_ready and server.is_usable(model)
    return ServerHealth(
        server.address,
        "ready" if is_ready else "unreachable" if version is None else "not_ready",
        version,
        latency_ms,
        models_ready,
        "shm" if pool.transport.maps_memory(server.regions) else "inline",
        sorted(name for name, served in server.models.items() if not served.is_usable),
        round(server.recent_images / sent, 3) if sent else 0.0,
    )


async def _ask_version(client: TritonClient) -> tuple[str | None, float | None]:
    """Return a Triton's version and the latency of the request in milliseconds; None for both if it does not respond."""
    started = perf_counter()
    with suppress(GatewayError):
        version = (await client.read_server()).version
        return version, round((perf_counter() - started) * 1e3, 2)
    return None, None


async def _list_ready(client: TritonClient) -> list[str]:
    """List the ready models; return none if Triton fails or denies access to its index."""
    with suppress(GatewayError):
        return sorted(name for name, state in (await client.list_models()).items() if state.is_ready)
    return []
