"""The engine as requests ask it: measured, within their time, and each caller by a part of the connections only."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from time import monotonic, perf_counter
from typing import Any, cast
from weakref import WeakValueDictionary

from app.errors import DeadlinePassed, SearchUnavailable
from app.pipeline.call import CallContext
from app.search.engine import Family
from app.search.postgres.engine import PostgresEngine
from app.telemetry.metrics import Metrics
from app.telemetry.timing import SEARCH

_CHECK_SECONDS = 1.0
_LATE = "the database did not answer in time"


class Database:
    """The engine, in one worker."""

    def __init__(self, url: str, connections: int, metrics: Metrics) -> None:
        self._postgres, self._to_check = PostgresEngine(url, connections), PostgresEngine(url, 1)
        """The other one has a connection of its own, to find out whether the database answers: all others may be in use."""
        self.metrics = metrics
        self.engine = cast("PostgresEngine", _Measured(self._postgres, metrics))
        self._share = connections // 2
        """Questions of a caller at a time, so that slow ones leave some connections to others."""
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._checking = asyncio.Lock()
        self._check: asyncio.Future[bool] | None = None
        self._checked: tuple[float, str | None] = -_CHECK_SECONDS, None
        self.is_read_only = False
        """Whether the database takes no images now, as `why_unusable` found."""
        self.new_job = asyncio.Event()
        """Set when there is a job, which is begun at once."""
        self._active: dict[Family, tuple[float, str]] = {}

    def asking(self, call: CallContext) -> PostgresEngine:
        """Return the engine as a request asks it: as its stage `search`, and within its time, else it raises DeadlinePassed."""
        places = self._places.setdefault(call.caller.name, asyncio.Semaphore(self._share))
        return cast("PostgresEngine", _Measured(self._postgres, self.metrics, partial(_within, call, places)))

    async def active_model(self, family: Family, call: CallContext) -> str | None:
        """Return the model that is searched, as it was at most a second ago: after a change, questions get 503 for so long."""
        read_at, model = self._active.get(family, (-_CHECK_SECONDS, None))
        if model is None or monotonic() - read_at >= _CHECK_SECONDS:
            model = (await self.asking(call).models(family)).active
            if model is not None:
                self._active[family] = monotonic(), model
        return model

    async def why_unusable(self) -> str | None:
        """Return why the engine does not answer, None if it does; what is returned is at most a second old."""
        async with self._checking:
            if monotonic() - self._checked[0] >= _CHECK_SECONDS:
                reason: str | None = _LATE
                # A late check goes on: to end it would take seconds, if the server hangs.
                self._check = self._check or asyncio.ensure_future(self._to_check.is_read_only())
                if (await asyncio.wait({self._check}, timeout=_CHECK_SECONDS))[0]:
                    check, self._check = self._check, None
                    try:
                        self.is_read_only, reason = check.result(), None
                    except SearchUnavailable as error:
                        reason = error.detail
                self._checked = monotonic(), reason
            return self._checked[1]

    async def close(self) -> None:
        """Give back all connections."""
        await asyncio.gather(self._postgres.close(), self._to_check.close())


@asynccontextmanager
async def _within(call: CallContext, places: asyncio.Semaphore) -> AsyncIterator[None]:
    call.timing.start_lap(call.timing.stages.get(SEARCH, 0.0))
    call.timing.begin(SEARCH)
    try:
        async with asyncio.timeout(call.deadline.remaining), places:
            yield
    except TimeoutError:
        raise DeadlinePassed(_LATE) from None
    call.timing.lap(SEARCH)


class _Measured:
    def __init__(
        self, engine: PostgresEngine, metrics: Metrics, limits: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    ) -> None:
        self._engine, self._seconds, self._limits = engine, metrics.search_seconds, limits

    def __getattr__(self, operation: str) -> Any:  # noqa: ANN401 - a method of the engine
        async def measured(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the method
            async with self._limits():
                began = perf_counter()
                try:
                    return await getattr(self._engine, operation)(*arguments, **options)
                finally:
                    self._seconds.observe(perf_counter() - began, operation)

        return measured
