"""Bodies being received: their number and bytes on the whole host."""

import asyncio
import hashlib
from ipaddress import IPv6Address, ip_address

from app.errors import GatewayFull
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget, Reservation
from app.resilience.pacer import Pacer
from app.resilience.worker_table import WorkerTable

_ANONYMOUS = 64
_ANONYMOUS_PER_ADDRESS = 8
_REJECTIONS_PER_SECOND, _MAX_WAIT_SECONDS = 20, 2.0  # of one worker; a rejection takes no longer than a body may


class Upload(Lease):
    """A body being received and parsed; counted until it is released."""

    def __init__(self, budget: MemoryBudget, table: WorkerTable, column: int, mark: int = 1) -> None:
        """Add `mark` to this worker's cell in `column`; count the bytes in a budget."""
        super().__init__()
        self._budget = budget
        self._memory: Reservation | None = None
        table.add(column, mark)
        self.on_release(lambda: table.add(column, -mark))

    @property
    def nbytes(self) -> int:
        """Number of counted bytes."""
        return 0 if self._memory is None else self._memory.nbytes

    def add(self, nbytes: int) -> None:
        """Count received bytes.

        Raises:
            GatewayFull: The budget is exhausted.
        """
        if self._memory is None:
            self._memory = self._budget.reserve()
            self.on_release(self._memory.release)
        self._memory.add(nbytes)


class AnonymousUploads:
    """Bodies of anonymous requests: at most 64 on the whole host, and 8 per client address.

    Each worker has 64 cells, one per body, which contain a hash of the client's address.
    """

    def __init__(self, table: WorkerTable, max_bytes: int) -> None:
        """Count in a table, up to `max_bytes`."""
        self._table = table
        self._columns = [table.column(f"anonymous upload {number}") for number in range(_ANONYMOUS)]
        self.memory = MemoryBudget(table, "anonymous upload memory", max_bytes)
        self._rejections = Pacer(_REJECTIONS_PER_SECOND, _MAX_WAIT_SECONDS)

    async def check(self, address: str, nbytes: int) -> None:
        """Reject a body of a declared length early; if many are, each waits: they take the CPU from callers with a key.

        Raises:
            GatewayFull: It would not be received now.
        """
        if self._is_full(address, 1) or 0 < self.memory.used_bytes > self.memory.limit_bytes - nbytes:
            await asyncio.sleep(self._rejections.wait())
            raise _full()

    def start(self, address: str) -> Upload:
        """Count a body from an address; an empty address (a unix socket without a proxy) has no limit of its own.

        Raises:
            GatewayFull: There are too many anonymous bodies.
        """
        free_column = next((column for column in self._columns if not self._table.cells[column]), None)
        if free_column is None:
            raise _full()
        upload = Upload(self.memory, self._table, free_column, _mark_of(address))  # first: two workers never use the same room
        if self._is_full(address, 0):
            upload.release()
            raise _full()
        return upload

    def _is_full(self, address: str, more: int) -> bool:
        marks = [mark for mark in self._table.values(*self._columns) if mark]
        return len(marks) + more > _ANONYMOUS or bool(address and marks.count(_mark_of(address)) + more > _ANONYMOUS_PER_ADDRESS)


def _mark_of(address: str) -> int:
    """Return a hash of what identifies a client: an IPv4 address, or the 64-bit prefix of an IPv6 address."""
    network: object = address and ip_address(address)
    if isinstance(network, IPv6Address):
        network = network.ipv4_mapped or int(network) >> 64
    return int.from_bytes(hashlib.blake2b(str(network).encode(), digest_size=7).digest()) + 1


def _full() -> GatewayFull:
    return GatewayFull("too many bodies are being received whose API key is not known yet; send it in a header", "uploads")
