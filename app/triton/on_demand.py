"""Load models at their first request, and unload those that have not been used for the longest time.

The workers of a host agree through their table. A request counts itself first and then looks whether the model has been unloaded;
a worker that unloads a model says so first and then looks whether a request uses it. So one of them always notices the other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import NamedTuple

import structlog
from tritonclient.grpc import service_pb2

from app.errors import GatewayError, ModelNotReady, TritonUnavailable
from app.resilience.model_queue import total_key
from app.resilience.single_flight import SingleFlight
from app.resilience.worker_table import WorkerTable
from app.triton.config_file import ConfigFileError, read_config_file
from app.triton.pool import TritonPool
from app.triton.repository import model_folders
from app.triton.server_info import ModelState
from app.triton.status import own_message

_LOAD_SECONDS, _UNLOAD_SECONDS = 120.0, 30.0
# How long a load waits until a loaded model is not used.
_ROOM_SECONDS = 10.0
_POLL_SECONDS = 0.05
# A model stays for so long after a request, however many others are requested.
_STAY_NS = 1_000_000_000
# For how long a failed load is not repeated.
_FAILED_NS = 5_000_000_000
# Maximum number of loads that go on or wait on the host.
_MAX_LOADS = 8
_READY = "READY"
_IN_MEMORY = {_READY, "UNLOADING"}
"""Triton's states of a model that takes memory."""
_LEAVING = -1
"""In the column of the last unloading: the model is being unloaded."""

LOG = structlog.get_logger()


class _Columns(NamedTuple):
    """The columns of one model in the table."""

    in_progress: int
    """Admitted requests."""
    users: int
    """Requests, from before the model is needed; times are on the `time.monotonic_ns` clock."""
    used_at: int
    left_at: int
    failed_at: int


class ModelsOnDemand:
    """The models of a repository, of which Triton keeps a limited number loaded."""

    def __init__(self, pool: TritonPool, table: WorkerTable, repository: Path, limit: int, kept: Callable[[], set[str]]) -> None:
        """Load models of this folder, which all Tritons of the pool read; those that `kept` returns are never unloaded."""
        self._pool = pool
        self._table = table
        self._repository = repository
        self._limit = limit
        self._kept = kept
        self._models: dict[str, _Columns] = {}
        """By name; only models of the repository, because callers choose the names in requests."""
        self._loaded: dict[str, int] = {}
        """When each model was last unloaded before this worker has found it loaded."""
        self._loads = table.column("loads of models")
        self._loading: SingleFlight[None] = SingleFlight()
        self._alone = asyncio.Lock()
        self._read()

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Keep a model loaded once it is."""
        columns = self._models.get(name)
        if columns is None:
            yield
            return
        self._table.add(columns.users, 1)
        try:
            yield
        finally:
            self._table.add(columns.users, -1)
            self._table.set(columns.used_at, monotonic_ns())

    def has(self, name: str) -> bool:
        """Return whether a model has not been unloaded since this worker has found it loaded."""
        columns = self._models.get(name)
        return columns is None or self._loaded.get(name) == self._left_at(columns)

    async def load(self, name: str, seconds: float) -> None:
        """Load a model of the repository unless Triton has it. After these seconds the load goes on in the background.

        Raises:
            ModelNotReady: It is not loaded yet, cannot be loaded, or too many are loaded or requested.
            GatewayError: Triton does not tell which models it has.
        """
        with suppress(OSError):  # the repository, which may be on a network's disk, cannot be read now
            await asyncio.to_thread(self._read)
        if name in self._models:
            try:
                async with asyncio.timeout(seconds):
                    await self._loading.run(name, lambda: self._load(name, self._models[name]))
            except TimeoutError:
                raise ModelNotReady("the model is being loaded") from None

    def close(self) -> None:
        """Stop waiting for Triton, which may go on."""
        self._loading.cancel()

    def _read(self) -> None:
        """Read the names of the models; a folder without a version has none that can be loaded."""
        folders = [folder for folder in model_folders(self._repository) if any(path.name.isdigit() for path in folder.iterdir())]
        self._models = {folder.name: self._models.get(folder.name) or self._columns(folder.name) for folder in folders}

    def _columns(self, name: str) -> _Columns:
        keys = (f"{what} of model {name}" for what in ("users", "last use", "unloading", "failed load"))
        return _Columns(self._table.column(total_key(name)), *map(self._table.column, keys))

    def _left_at(self, columns: _Columns) -> int:
        """Return when a model was last unloaded, or `_LEAVING`."""
        values = self._table.values(columns.left_at)
        return max(values) if min(values) >= 0 else _LEAVING

    async def _load(self, name: str, columns: _Columns) -> None:
        left_at = self._left_at(columns)
        if left_at == _LEAVING or _state(await self._pool.list_models(), name) != _READY:
            self._table.add(self._loads, 1)
            try:
                if self._table.total(self._loads) > _MAX_LOADS:
                    raise ModelNotReady("too many models are being loaded")
                async with self._turn():
                    left_at = self._left_at(columns)
                    states = await self._pool.list_models()
                    if _state(states, name) != _READY:
                        await self._load_now(name, columns, states)
            finally:
                self._table.add(self._loads, -1)
        self._table.set(columns.used_at, monotonic_ns())
        for server in self._pool.servers:
            server.specs.forget_all(name)
        self._loaded[name] = left_at

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait until no other load of this host goes on."""
        async with self._alone:
            while not self._table.try_lock():  # noqa: ASYNC110 - held by another process
                await asyncio.sleep(_POLL_SECONDS)
            try:
                self._table.refresh()  # without the marks of killed workers
                yield
            finally:
                self._table.unlock()

    async def _load_now(self, name: str, columns: _Columns, states: Mapping[str, ModelState]) -> None:
        if max(self._table.values(columns.failed_at)) > monotonic_ns() - _FAILED_NS:
            raise ModelNotReady("Triton could not load the model; its log says why")
        await self._make_room(states)
        start = monotonic()
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        errors = await self._tell("RepositoryModelLoad", request, _LOAD_SECONDS)
        if len(errors) == len(self._pool.servers):
            if unavailable := [error for error in errors if isinstance(error, TritonUnavailable)]:
                raise unavailable[0]
            self._table.set(columns.failed_at, monotonic_ns())
            LOG.warning("a model cannot be loaded", model=name, reason="; ".join(map(own_message, errors)))
            raise ModelNotReady("Triton could not load the model; its log says why")
        LOG.info("a model was loaded", model=name, seconds=round(monotonic() - start, 3))

    async def _make_room(self, states: Mapping[str, ModelState]) -> None:
        """Unload the least recently used models until there is room for one more."""
        until = monotonic() + _ROOM_SECONDS
        loaded = {name for name, state in states.items() if state.is_ready}
        needed = self._kept() | await asyncio.to_thread(self._steps, loaded)
        while len(loaded) >= self._limit:
            candidates = {name: self._models[name] for name in loaded - needed if name in self._models}
            for name in sorted(candidates, key=lambda name: self._used_at(candidates[name])):
                if await self._unload(name, candidates[name]):
                    loaded.remove(name)
                    break
            else:
                if monotonic() > until or not candidates:
                    raise ModelNotReady("as many models as may be loaded are in use")
                await asyncio.sleep(_POLL_SECONDS)

    def _steps(self, loaded: set[str]) -> set[str]:
        """Return the models that loaded ensembles run."""
        steps = set[str]()
        for name in loaded & self._models.keys():
            with suppress(ConfigFileError):  # the embedded Triton's own config, which has no ensembles
                config = read_config_file(self._repository / name / "config.pbtxt")
                steps |= {step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])}
        return steps

    def _used_at(self, columns: _Columns) -> int:
        return max(self._table.values(columns.used_at))

    def _is_used(self, columns: _Columns) -> bool:
        is_recent = self._used_at(columns) > monotonic_ns() - _STAY_NS
        return is_recent or any(map(self._table.total, (columns.users, columns.in_progress)))

    async def _unload(self, name: str, columns: _Columns) -> bool:
        """Unload a model, and wait until its memory is free; return False if a request uses it."""
        if self._is_used(columns):  # without a mark, which would make requests wait
            return False
        before = self._table.cells[columns.left_at]
        self._table.set(columns.left_at, _LEAVING)
        if self._is_used(columns):
            self._table.set(columns.left_at, before)
            return False
        try:
            request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
            await self._tell("RepositoryModelUnload", request, _UNLOAD_SECONDS)
            until = monotonic() + _UNLOAD_SECONDS
            while _state(await self._pool.list_models(), name) in _IN_MEMORY and monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._table.set(columns.left_at, monotonic_ns())
        LOG.info("a model was unloaded", model=name)
        return True

    async def _tell(self, method: str, request: object, seconds: float) -> list[GatewayError]:
        """Call all Tritons; return the errors of those that have not done it."""
        calls = [server.client.ask(method, request, seconds) for server in self._pool.servers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, GatewayError)]


def _state(states: Mapping[str, ModelState], name: str) -> str:
    return states[name].state if name in states else ""
