"""State machines whose asynchronous work runs on an event loop of their own, in a time that passes only when a rule lets it."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from app.resilience import worker_table
from app.resilience.worker_table import WorkerTable
from tests.support import TABLE_VARIABLE, Clock

T = TypeVar("T")


class _Immediately(ThreadPoolExecutor):
    """Runs what is submitted at once, so that no thread decides the order of events."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":  # noqa: ANN401
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - of whoever waits for it
            future.set_exception(error)
        return future


class Machine(RuleBasedStateMachine):
    """A state machine with an event loop, which runs only during a rule."""

    TIMED: tuple[str, ...] = ()
    """Modules of the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.clock = Clock(self.patch, *self.TIMED)
        self.loop = asyncio.new_event_loop()
        self.patch.setattr(self.loop, "time", self.clock)
        self.loop.set_default_executor(_Immediately())
        self._tables: list[WorkerTable] = []
        self._has_table = False

    def open_tables(self, workers: int) -> list[WorkerTable]:
        """Open the table of a new host in so many workers."""
        self.patch.setenv(TABLE_VARIABLE, "")
        worker_table.create()
        self._has_table = True
        self._tables = [WorkerTable() for _ in range(workers)]
        return self._tables

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.loop.run_until_complete(wait())

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop, and let everything happen that follows at once."""

        async def turns() -> None:
            function()
            for _ in range(15):
                await asyncio.sleep(0)

        self.run(turns())

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = self.loop.create_task(work)
        self.call(lambda: None)
        return task

    def skip(self, seconds: float) -> None:
        self.clock.now += seconds
        self.call(lambda: None)

    def finish(self) -> None:
        """End what goes on, and check that nothing is left."""

    def teardown(self) -> None:
        try:
            self.finish()
        finally:
            self.run(_cancel_all())
            self.loop.close()
            for table in self._tables:
                table.close()
            if self._has_table:
                os.close(int(os.environ[TABLE_VARIABLE]))
            self.patch.undo()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check(machine: type[RuleBasedStateMachine], *, runs: int, steps: int) -> None:
    """Run a machine so many times, with at most so many steps each; the same ones in each run of the tests."""
    chosen = settings(
        max_examples=runs,
        stateful_step_count=steps,
        # Finding the shortest failure takes minutes: longer than a test may.
        phases=[phase for phase in Phase if phase not in {Phase.shrink, Phase.explain}],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=chosen)
