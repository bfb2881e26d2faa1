"""Aggregation: images of different requests go to Triton together when there are enough calls under way."""

import math
from collections.abc import Callable
from typing import NamedTuple

from app.model.spec import ModelSpec


class Aggregation(NamedTuple):
    """Limits the calls under way, so that images wait and form batches."""

    calls: int
    """Maximum number of calls for one model under way from a host to one Triton; 0: one more than Triton runs at a time."""
    workers: Callable[[], int]
    """Returns the number of workers on the host."""

    def max_calls(self, spec: ModelSpec) -> float:
        """Return how many calls for a model this worker may have under way at one Triton.

        There is no limit if waiting would not form a batch, because images should then wait in Triton's own queue.
        """
        if spec.max_batch == 1:
            return math.inf
        return math.ceil((self.calls or spec.instances + 1) / max(1, self.workers()))
