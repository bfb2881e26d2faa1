"""Let running Tritons load the models that are added to a repository which they share with this host."""

import asyncio
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import structlog

from app.errors import GatewayError
from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.repository import LOCK, added_models, identify, removed_models

_INTERVAL_SECONDS, _LOAD_SECONDS = 1.0, 120.0
_LOADED = "loaded "
"""Prefix of the columns that tell the workers what all Tritons have loaded."""

LOG = structlog.get_logger()


class _State(NamedTuple):
    connection: int
    """Number of the connection: Triton may have been started anew."""
    changed_at: int
    loads: int
    """On demand."""


class ModelLoader:
    """Lets each Triton, which must run with explicit model control, load all added models after each change and each start.

    Triton unloads those that were removed. If others are loaded on demand, it loads those that are always loaded, and those that
    any Triton has loaded.
    """

    def __init__(self, pool: TritonPool, repository: Path, on_demand: ModelsOnDemand | None = None) -> None:
        self._pool = pool
        self._repository = repository
        self._on_demand = on_demand
        self._tasks: dict[TritonClient, tuple[_State, asyncio.Task[None]]] = {}
        self._loaded: dict[TritonClient, dict[str, str]] = {}
        """What `identify` returned for each model before the Triton has loaded it."""
        self._published: set[str] = set()

    async def run(self, table: WorkerTable) -> None:
        """Look for changes whenever this worker is the host's first one; never returns."""
        try:
            while True:
                if table.is_first:
                    with suppress(OSError):  # the repository, which may be on a network's disk, cannot be read now
                        await self._look()
                self._publish(table)
                await asyncio.sleep(_INTERVAL_SECONDS)
        finally:
            for _, task in self._tasks.values():
                task.cancel()

    async def _look(self) -> None:
        changed_at = (await asyncio.to_thread((self._repository / LOCK).stat)).st_mtime_ns
        clients = {server.client for server in self._pool.servers}
        self._tasks = {client: known for client, known in self._tasks.items() if client in clients}
        self._loaded = {client: loaded for client, loaded in self._loaded.items() if client in clients}
        for client in clients:
            loads = self._on_demand.loads if self._on_demand else 0
            state, (done, task) = _State(client.connection, changed_at, loads), self._tasks.get(client, (None, None))
            if client.server is not None and state != done and (task is None or task.done()):
                added, removed = await asyncio.to_thread(self._read)
                self._tasks[client] = state, asyncio.create_task(self._load(client, added, removed))

    def _read(self) -> tuple[dict[str, str], set[str]]:
        added = {model: identify(self._repository / model) for model in added_models(self._repository)}
        return added, removed_models(self._repository)

    async def _load(self, client: TritonClient, added: dict[str, str], removed: set[str]) -> None:
        if self._on_demand is None:
            await self._load_now(client, added, removed)
            return
        async with self._on_demand.turn():  # otherwise it might load what is just being unloaded
            wanted = await self._on_demand.wanted()
            await self._load_now(client, {model: identity for model, identity in added.items() if model in wanted}, removed)

    async def _load_now(self, client: TritonClient, added: dict[str, str], removed: set[str]) -> None:
        loaded = added.copy()
        calls = [("RepositoryModelUnload", model) for model in sorted(removed)]
        for method, model in [*calls, *(("RepositoryModelLoad", model) for model in sorted(added))]:
            try:
                await client.ask(method, _LOAD_SECONDS, model_name=model)
            except GatewayError as error:
                loaded.pop(model, None)
                LOG.warning("a Triton cannot load a model", triton=client.address, model=model, reason=error.detail)
        self._loaded[client] = loaded

    def _publish(self, table: WorkerTable) -> None:
        clients = [server.client for server in self._pool.servers] if table.is_first else []
        loaded = [{*self._loaded.get(client, {}).items()} for client in clients]
        common = dict(set.intersection(*loaded)) if loaded else {}
        for model in self._published | common.keys():
            table.set(table.column(_LOADED + model), _mark(common[model], self._pool) if model in common else 0)
        self._published |= common.keys()


def has_loaded(table: WorkerTable, pool: TritonPool, model: str, identity: str) -> bool:
    """Return whether all Tritons of the pool have loaded just the files of a model for which `identify` returns this."""
    return {*table.values(table.column(_LOADED + model))} - {0} == {_mark(identity, pool)}


def _mark(identity: str, pool: TritonPool) -> int:
    tritons = sorted(server.address for server in pool.servers)
    return int.from_bytes(blake2b(repr((identity, tritons)).encode(), digest_size=7).digest())
