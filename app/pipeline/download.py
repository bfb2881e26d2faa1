"""Fetch an image of a batch, with retries for lack of memory."""

from app.remote.address import ImageAddress
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.memory import Reservation


class Download:
    """Fetches an image in several attempts, if there is not enough memory for its bytes.

    Before another request to the host, the attempt reserves twice the bytes received so far. This limits the number of requests.
    """

    def __init__(self, fetcher: Fetcher, address: ImageAddress, memory: Reservation, deadline: Deadline) -> None:
        """Start without memory.

        Args:
            fetcher: Fetches the image.
            address: Address of the image.
            memory: Counts the bytes of the image.
            deadline: Deadline of the request.
        """
        self._fetcher = fetcher
        self._address = address
        self._memory = memory
        self._deadline = deadline
        self._needed = self._received = 0

    async def attempt(self) -> bytes:
        """Fetch the image.

        Raises:
            GatewayFull: There is not enough memory now; the memory reserved so far is released.
            GatewayError: See `Fetcher.fetch`.
        """
        self._received = 0
        try:
            self._memory.add(self._needed)
            image = await self._fetcher.fetch(self._address, self._count, self._deadline)
        except BaseException:
            self._memory.keep(0)
            self._needed = max(self._needed, 2 * self._received)
            raise
        self._memory.keep(len(image))
        return image

    def _count(self, nbytes: int) -> None:
        self._received += nbytes
        if self._received > self._needed:
            self._memory.add(min(nbytes, self._received - self._needed))
