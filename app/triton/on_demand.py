"""Load models at their first request, and unload those that have not been used for the longest time.

The workers of a host agree through their table. A request counts itself first and then looks whether the model has been unloaded;
a worker that unloads a model says so first and then looks whether a request uses it. So one of them always notices the other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from time import monotonic, monotonic_ns

import structlog

from app.errors import GatewayError, ModelNotReady, TritonUnavailable
from app.resilience.fairness import ANYBODY, Caller, CallerCounts
from app.resilience.model_queue import total_key
from app.resilience.single_flight import SingleFlight
from app.resilience.worker_table import WorkerTable
from app.triton.config_file import ConfigFileError, read_config_file
from app.triton.pool import TritonPool
from app.triton.repository import model_folders
from app.triton.status import NoReply, NotLoadedYet, own_message

_LOAD_SECONDS, _UNLOAD_SECONDS = 120.0, 30.0
# How long a load waits until a loaded model is not used.
_ROOM_SECONDS = 10.0
_POLL_SECONDS, _KEEP_SECONDS = 0.05, 1.0
# A model stays for so long after a request, however many others are requested.
_STAY_NS = 1_000_000_000
# A failed load is not repeated for so long, and for this many times what it took, so that others have their turn.
_FAILED_NS, _FAILED_TIMES = 5_000_000_000, 4
# Maximum number of loads that go on or wait on the host.
_MAX_LOADS = 8
_IN_MEMORY = {"LOADING", "READY", "UNLOADING"}
"""Triton's states of a model that takes memory."""
_USERS, _USED_AT, _LEFT_AT, _RETRY_AT = "users", "last use", "unloading", "next attempt"
"""What columns say of a model: how many requests use it, also those that wait for it; and times on the `monotonic_ns` clock."""
_LEAVING = -1
"""In the column of the last unloading: the model is being unloaded."""

LOG = structlog.get_logger()


class ModelsOnDemand:
    """The models of a repository, of which Triton keeps a limited number loaded."""

    def __init__(self, pool: TritonPool, table: WorkerTable, repository: Path, limit: int, kept: Callable[[], set[str]]) -> None:
        """Load models of this folder, which all Tritons of the pool read; those that `kept` returns are never unloaded."""
        self._pool = pool
        self._table = table
        self._repository = repository
        self._limit = limit
        self._kept = kept
        self._loaded: dict[str, int] = {}
        """When each model was last unloaded before this worker has found it loaded."""
        self._loads = CallerCounts(table, "loads of models")
        self._done = table.column("models loaded on demand")
        self._loading: SingleFlight[None] = SingleFlight()
        self._reading: SingleFlight[None] = SingleFlight()
        self._alone = asyncio.Lock()
        self._models = set[str]()
        """Only these have columns, because callers choose the names in requests."""
        self._read()

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Keep a model loaded once it is."""
        if name not in self._models:
            yield
            return
        users = self._column(_USERS, name)
        self._table.add(users, 1)
        try:
            yield
        finally:
            self._table.add(users, -1)
            self._table.set(self._column(_USED_AT, name), monotonic_ns())

    def has(self, name: str) -> bool:
        """Return whether a model has not been unloaded since this worker has found it loaded."""
        return name not in self._models or self._loaded.get(name) == self._left_at(name)

    async def load(self, name: str, seconds: float, caller: Caller = ANYBODY) -> None:
        """Load a model of the repository unless Triton has it. After these seconds the load goes on in the background.

        Raises NotLoadedYet if it is late, or too many are requested, or ModelNotReady if Triton cannot load it.
        """
        try:
            async with asyncio.timeout(seconds):
                with suppress(OSError):  # the repository, which may be on a network's disk, cannot be read now
                    await self._reading.run(None, lambda: asyncio.to_thread(self._read))
                if name in self._models:
                    await self._loading.run(name, lambda: self._load(name, caller))
        except TimeoutError:
            if name in self._models:
                raise NotLoadedYet("the model is being loaded") from None

    async def run(self) -> None:
        """Load the models that stay loaded, which Triton may have lost; never returns."""
        while True:
            await asyncio.sleep(_KEEP_SECONDS)
            lost = set[str]()
            with suppress(GatewayError):  # Triton does not answer
                lost = self._kept() - (await self._in_memory()).keys() if self._table.is_first else lost
            for name in lost:
                with suppress(GatewayError):  # the load goes on, or is tried again
                    await self.load(name, _KEEP_SECONDS)

    @property
    def loads(self) -> int:
        """A number that changes whenever a model was loaded on this host."""
        return self._table.total(self._done)

    async def wanted(self) -> set[str]:
        """Return the models that each Triton should have: those that stay loaded, and those that any of them says it has."""
        wanted = self._kept()
        with suppress(GatewayError):
            wanted |= {name for name, is_ready in (await self._in_memory()).items() if is_ready}
        return wanted

    def close(self) -> None:
        """Stop waiting for Triton, which may go on."""
        self._loading.cancel()

    def _read(self) -> None:
        folders = model_folders(self._repository)
        self._models = {folder.name for folder in folders if any(path.name.isdigit() for path in folder.glob("[0-9]*"))}

    def _column(self, what: str, name: str) -> int:
        return self._table.column(f"{what} of model {name}")

    def _left_at(self, name: str) -> int:
        values = self._table.values(self._column(_LEFT_AT, name))
        return max(values) if min(values) >= 0 else _LEAVING

    def _used_at(self, name: str) -> int:
        return max(self._table.values(self._column(_USED_AT, name)))

    def _is_used(self, name: str) -> bool:
        if self._used_at(name) > monotonic_ns() - _STAY_NS:
            return True
        return any(self._table.total(self._table.column(key)) for key in (total_key(name), f"{_USERS} of model {name}"))

    async def _in_memory(self) -> dict[str, bool]:
        return {name: state.is_ready for name, state in (await self._pool.list_models()).items() if state.state in _IN_MEMORY}

    async def _load(self, name: str, caller: Caller) -> None:
        left_at = self._left_at(name)
        if left_at == _LEAVING or not (await self._in_memory()).get(name):
            self._loads.add(caller, 1)
            try:
                if not self._loads.has_place(caller, _MAX_LOADS):
                    raise NotLoadedYet("too many models are being loaded")
                async with self.turn():
                    left_at = self._left_at(name)
                    if not (await self._in_memory()).get(name):
                        await self._load_now(name)
            finally:
                self._loads.add(caller, -1)
        self._table.set(self._column(_USED_AT, name), monotonic_ns())
        for server in self._pool.servers:
            server.specs.forget_all(name)
        self._loaded[name] = left_at

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Load and unload models while no other worker of the host does."""
        waits = self._alone.locked()
        async with self._alone:
            if waits:  # let other workers, which only look from time to time, have their turn
                await asyncio.sleep(2 * _POLL_SECONDS)
            while not self._table.try_lock():  # noqa: ASYNC110 - held by another process
                await asyncio.sleep(_POLL_SECONDS)
            try:
                self._table.refresh()  # without the marks of killed workers
                yield
            finally:
                self._table.unlock()

    async def _load_now(self, name: str) -> None:
        retry_at = self._column(_RETRY_AT, name)
        if max(self._table.values(retry_at)) > monotonic_ns():
            raise ModelNotReady("Triton could not load the model; its log says why")
        await self._make_room(name)
        start = monotonic()
        errors = await self._tell("RepositoryModelLoad", name, _LOAD_SECONDS)
        seconds = monotonic() - start
        if len(errors) == len(self._pool.servers):
            if all(isinstance(error, TritonUnavailable) and not isinstance(error, NoReply) for error in errors):
                raise errors[0]
            self._table.set(retry_at, monotonic_ns() + max(_FAILED_NS, int(_FAILED_TIMES * seconds * 1e9)))
            LOG.warning("a model cannot be loaded", model=name, reason="; ".join(map(own_message, errors)))
            raise ModelNotReady("Triton could not load the model; its log says why")
        self._table.add(self._done, 1)
        LOG.info("a model was loaded", model=name, seconds=round(seconds, 3))

    async def _make_room(self, name: str) -> None:
        until = monotonic() + _ROOM_SECONDS
        while len((loaded := await self._in_memory()).keys() - {name}) >= self._limit:
            needed = self._kept() | await asyncio.to_thread(self._steps, loaded.keys())
            others = {other for other, is_ready in loaded.items() if is_ready} & self._models - needed
            for other in sorted(others, key=self._used_at):
                if await self._unload(other):
                    break
            else:
                if monotonic() > until or not others:
                    raise NotLoadedYet("as many models as may be loaded are in use")
                await asyncio.sleep(_POLL_SECONDS)

    def _steps(self, loaded: Collection[str]) -> set[str]:
        steps = set[str]()
        for name in self._models.intersection(loaded):
            with suppress(ConfigFileError):  # the embedded Triton's own config, which has no ensembles
                config = read_config_file(self._repository / name / "config.pbtxt")
                steps |= {step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])}
        return steps

    async def _unload(self, name: str) -> bool:
        """Unload a model, and wait until its memory is free; return False if a request uses it."""
        if self._is_used(name):  # without a mark, which would make requests wait
            return False
        left_at = self._column(_LEFT_AT, name)
        before = self._table.cells[left_at]
        self._table.set(left_at, _LEAVING)
        if self._is_used(name):
            self._table.set(left_at, before)
            return False
        try:
            await self._tell("RepositoryModelUnload", name, _UNLOAD_SECONDS)
            until = monotonic() + _UNLOAD_SECONDS
            while name in await self._in_memory() and monotonic() < until:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._table.set(left_at, monotonic_ns())
        LOG.info("a model was unloaded", model=name)
        return True

    async def _tell(self, method: str, name: str, seconds: float) -> list[GatewayError]:
        calls = [server.client.ask(method, seconds, model_name=name) for server in self._pool.servers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, GatewayError)]
