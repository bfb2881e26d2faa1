"""Interrupt a block of code from outside of it."""

import asyncio
from types import TracebackType
from typing import Self


class Interruption:
    """A `with` block that `interrupt` cancels, as `asyncio.timeout` does; it then raises the error passed to `interrupt`."""

    _task: asyncio.Task[object] | None = None
    _error: Exception | None = None

    def interrupt(self, error: Exception) -> None:
        """Interrupt the block if it is running. Call this in the event loop, but not from the block itself."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        task, self._task = self._task, None
        reason, self._error = self._error, None
        try:
            if reason is not None and task is not None and task.uncancel() == 0 and kind is asyncio.CancelledError:
                raise reason from None
        finally:
            del task, reason, error  # break the reference cycle with this frame
