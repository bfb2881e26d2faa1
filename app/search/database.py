"""The engine as requests ask it: measured, within their time, and each caller by a part of the connections only."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

    def __init__(self, engine: PostgresEngine, checking: PostgresEngine, metrics: Metrics, connections: int) -> None:
        # `checking` has a connection of its own, to find out whether the engine answers.
        self.engine = cast("PostgresEngine", _Measured(engine, metrics))
        self._to_check = checking
        self._share = connections // 2
        """Requests of a caller that ask at a time, so that slow ones leave some connections to others."""
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._checking = asyncio.Lock()
        self._check: asyncio.Future[bool] | None = None
        self._checked: tuple[float, str | None] = -_CHECK_SECONDS, None
        self.is_read_only = False
        """Whether the engine takes no images now, as `why_unusable` found."""
        self._active: dict[Family, tuple[float, str]] = {}

    @asynccontextmanager
    async def asking(self, call: CallContext) -> AsyncIterator[PostgresEngine]:
        """Ask one question after the other, as the stage `search` of a request; raise DeadlinePassed."""
        call.timing.start_lap()
        call.timing.begin(SEARCH)
        places = self._places.setdefault(call.caller.name, asyncio.Semaphore(self._share))
        try:
            async with asyncio.timeout(call.deadline.remaining), places:
                yield self.engine
        except TimeoutError:
            raise DeadlinePassed(_LATE) from None
        call.timing.lap(SEARCH)

    async def active_model(self, family: Family, call: CallContext) -> str | None:
        """Return the model that is searched, as it was at most a second ago: after a change, questions get 503 for so long."""
        read_at, model = self._active.get(family, (-_CHECK_SECONDS, None))
        if model is None or monotonic() - read_at >= _CHECK_SECONDS:
            async with self.asking(call) as engine:
                model = (await engine.models(family)).active
            if model is not None:
                self._active[family] = monotonic(), model
        return model

    async def why_unusable(self) -> str | None:
        """Return why the engine does not answer, None if it does; what is returned is at most a second old."""
        async with self._checking:
            if monotonic() - self._checked[0] >= _CHECK_SECONDS:
                reason: str | None = None
                # A late check goes on: to end it would take seconds, if the server hangs.
                self._check = self._check or asyncio.ensure_future(self._to_check.is_read_only())
                if (await asyncio.wait({self._check}, timeout=_CHECK_SECONDS))[0]:
                    check, self._check = self._check, None
                    if isinstance(error := check.exception(), SearchUnavailable):
                        reason = error.detail
                    elif error is not None:
                        raise error
                    else:
                        self.is_read_only = check.result()
                else:
                    reason = _LATE
                self._checked = monotonic(), reason
            return self._checked[1]


class _Measured:
    def __init__(self, engine: PostgresEngine, metrics: Metrics) -> None:
        self._engine, self._seconds = engine, metrics.search_seconds

    def __getattr__(self, operation: str) -> Any:  # noqa: ANN401 - a method of the engine
        async def measured(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - those of the method
            began = perf_counter()
            try:
                return await getattr(self._engine, operation)(*arguments, **options)
            finally:
                self._seconds.observe(perf_counter() - began, operation)

        return measured
