"""The memory that the input tensor of one request lies in."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.resilience.lease import Lease
from app.triton.shared_memory import Slot
from app.triton.transport import Transport


class InputBuffer:
    """A slot in shared memory or memory of its own, allocated once. The slot is given back with the request's lease."""

    def __init__(self, transport: Transport, lease: Lease) -> None:
        self.slot: Slot | None = None
        self.tensor: NDArray[Any] = np.empty(0, np.uint8)
        self._transport = transport
        self._lease = lease

    def allocate(self, shape: tuple[int, ...], dtype: type[np.generic], slot_bytes: int) -> NDArray[Any]:
        """Allocate `tensor`, uninitialised; in a slot, if it fits into one of that size and there is room. From any thread."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes <= slot_bytes:
            self.slot = self._transport.take(slot_bytes, nbytes)
        if self.slot is None:
            self.tensor = np.empty(shape, dtype)
        else:
            self._lease.on_release(self.slot.free)
            self.tensor = self.slot.array(shape, dtype)
        return self.tensor
