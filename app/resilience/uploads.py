"""Bodies being received: their number and bytes on the whole host."""

from app.errors import GatewayFull
from app.resilience.fairness import caller_at, network_digest
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget, Reservation
from app.resilience.worker_table import WorkerTable

_ANONYMOUS = 64
_ANONYMOUS_PER_ADDRESS = 8


class Upload(Lease):
    """A body being received and parsed; counted until it is released."""

    def __init__(self, memory: Reservation) -> None:
        """Count the bytes in a reservation, which is released with this lease."""
        super().__init__()
        self._memory = memory
        self.on_release(memory.release)

    @property
    def nbytes(self) -> int:
        """Number of counted bytes."""
        return self._memory.nbytes

    def add(self, nbytes: int) -> None:
        """Count received bytes; raises GatewayFull if the budget is exhausted."""
        self._memory.add(nbytes)


class AnonymousUploads:
    """Bodies of anonymous requests: at most 64 on the whole host, and 8 per client address.

    Each worker has 64 cells, one per body, which contain a hash of the client's address.
    """

    def __init__(self, table: WorkerTable, max_bytes: int) -> None:
        self._table = table
        self._columns = [table.column(f"anonymous upload {number}") for number in range(_ANONYMOUS)]
        self.memory = MemoryBudget(table, "anonymous upload memory", max_bytes)

    def check(self, address: str, nbytes: int) -> None:
        """Raise GatewayFull if a body of this declared length would not be received now."""
        if self._is_full(address, 1) or (self.memory.used_bytes and not self.memory.has_room(caller_at(address), nbytes)):
            raise _full()

    def start(self, address: str) -> Upload:
        """Count a body, or raise GatewayFull; an empty address (a unix socket without a proxy) has no limit of its own."""
        free_column = next((column for column in self._columns if not self._table.cells[column]), None)
        if free_column is None:
            raise _full()
        upload = Upload(self.memory.reserve(caller_at(address)))
        mark = _mark_of(address)
        self._table.add(free_column, mark)  # first: two workers never use the same room
        upload.on_release(lambda: self._table.add(free_column, -mark))
        if self._is_full(address, 0):
            upload.release()
            raise _full()
        return upload

    def _is_full(self, address: str, more: int) -> bool:
        marks = [mark for mark in self._table.values(*self._columns) if mark]
        return len(marks) + more > _ANONYMOUS or bool(address and marks.count(_mark_of(address)) + more > _ANONYMOUS_PER_ADDRESS)


def _mark_of(address: str) -> int:
    return network_digest(address) + 1


def _full() -> GatewayFull:
    return GatewayFull("too many bodies are being received whose API key is not known yet; send it in a header", "uploads")
