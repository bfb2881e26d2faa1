"""The memory that the input tensor of one request lies in."""

import math
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from app.triton.shared_memory import Slot
from app.triton.transport import Transport


class Job(Protocol):
    """A future of a thread pool or of an event loop."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> None:
        """Call `callback` once the job has ended."""


class InputBuffer:
    """A slot in shared memory or memory of its own, allocated once within a `with` block.

    The slot is given back when the block has been left and all jobs passed to `keep_for` have ended: a decoding
    thread cannot be stopped, and Triton reads a slot until the RPC ends, whether or not the request still waits for it.
    """

    def __init__(self, transport: Transport) -> None:
        self.slot: Slot | None = None
        self.tensor: NDArray[Any] = np.empty(0, np.uint8)
        self._transport = transport
        self._users = 0
        self._lock = Lock()

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic], slot_bytes: int) -> NDArray[Any]:
        """Allocate `tensor`, uninitialised; in a slot of that size, if it fits and one is free. From any thread."""
        if math.prod(shape) * np.dtype(dtype).itemsize <= slot_bytes:
            self.slot = self._transport.take(slot_bytes)
        self.tensor = np.empty(shape, dtype) if self.slot is None else self.slot.array(shape, dtype)
        return self.tensor

    def keep_for(self, job: Job) -> None:
        """Keep the slot at least until a job has ended."""
        self._add_user()
        job.add_done_callback(lambda _: self._remove_user())

    def __enter__(self) -> Self:
        self._add_user()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._remove_user()

    def _add_user(self) -> None:
        with self._lock:
            self._users += 1

    def _remove_user(self) -> None:
        with self._lock:
            self._users -= 1
            is_unused = self._users == 0
        if is_unused and self.slot is not None:
            self.slot.free()
