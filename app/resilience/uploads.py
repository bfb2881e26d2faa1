"""Bodies being received: their number and bytes on the whole host."""

import hashlib
from ipaddress import IPv6Address, ip_address

from app.errors import GatewayFull
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget, Reservation
from app.resilience.worker_table import WorkerTable

_ANONYMOUS = 64
_ANONYMOUS_PER_ADDRESS = 8


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

    def start(self, address: str) -> Upload:
        """Count a body from an address; an empty address (a unix socket without a proxy) has no limit of its own.

        Raises:
            GatewayFull: There are too many anonymous bodies.
        """
        free_column = next((column for column in self._columns if not self._table.own(column)), None)
        if free_column is None:
            raise _full()
        mark = int.from_bytes(hashlib.blake2b(_network_of(address).encode(), digest_size=7).digest()) + 1
        upload = Upload(self.memory, self._table, free_column, mark)  # counted first, so that two workers never use the same room
        marks = [cell for column in self._columns for cell in self._table.values(column) if cell]
        if len(marks) > _ANONYMOUS or (address and marks.count(mark) > _ANONYMOUS_PER_ADDRESS):
            upload.release()
            raise _full()
        return upload


def _network_of(address: str) -> str:
    """Return the part of an address that identifies a client: an IPv4 address, or the 64-bit prefix of an IPv6 address."""
    if not address:
        return address
    parsed = ip_address(address)
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or int(parsed) >> 64)
    return str(parsed)


def _full() -> GatewayFull:
    return GatewayFull("too many bodies are being received whose API key is not known yet; send it in a header", "uploads")
