"""Let running Tritons load the models that are added to a repository which they share with this host."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import structlog
from tritonclient.grpc import service_pb2

from app.errors import GatewayError, TritonUnavailable
from app.resilience.worker_table import WorkerTable
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.repository import added_models, last_change

_INTERVAL_SECONDS, _LOAD_SECONDS = 1.0, 120.0

LOG = structlog.get_logger()


class _State(NamedTuple):
    connection: int
    """Number of the connection: Triton may have been started anew."""
    changed_at: int


class ModelLoader:
    """Lets each Triton, which must run with explicit model control, load all added models after each change and each start.

    Loading what has not changed costs Triton nothing. Models that were loaded here and are gone are unloaded.
    """

    def __init__(self, pool: TritonPool, repository: Path) -> None:
        self._pool = pool
        self._repository = repository
        self._done: WeakKeyDictionary[TritonClient, _State] = WeakKeyDictionary()
        self._loaded: set[str] = set()
        self._loading: set[asyncio.Task[None]] = set()

    async def run(self, table: WorkerTable) -> None:
        """Look for changes whenever this worker is the host's first one; never returns."""
        while True:
            if table.is_first:
                with suppress(OSError):  # the repository cannot be read now
                    await self._look()
            await asyncio.sleep(_INTERVAL_SECONDS)

    async def _look(self) -> None:
        changed_at = await asyncio.to_thread(last_change, self._repository)
        models: set[str] | None = None
        for client in [server.client for server in self._pool.servers]:
            state = _State(client.connection, changed_at)
            if client.server is None or self._done.get(client) == state:
                continue
            models = await asyncio.to_thread(added_models, self._repository) if models is None else models
            gone = self._loaded - models
            self._done[client] = state
            task = asyncio.create_task(self._load(client, models, gone))
            self._loading.add(task)
            task.add_done_callback(self._loading.discard)
        self._loaded |= models or set()

    async def _load(self, client: TritonClient, models: set[str], gone: set[str]) -> None:
        calls = [("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name=model)) for model in sorted(models)]
        calls += [("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name=model)) for model in sorted(gone)]
        for method, request in calls:
            try:
                await client.ask(method, request, _LOAD_SECONDS)
            except GatewayError as error:
                LOG.warning("a Triton cannot load a model", triton=client.address, model=request.model_name, reason=error.detail)
                if isinstance(error, TritonUnavailable):
                    self._done.pop(client, None)  # once more
                    return
