"""Memory that receiving a body may take."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def peak_below(nbytes: float) -> Iterator[None]:
    """Demand that the memory of a `with` block stays below this."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes
