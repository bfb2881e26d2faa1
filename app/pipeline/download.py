"""Fetch an image of a batch while there may be too little memory for it."""

from app.remote.address import ImageAddress
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.memory import JointReservation


class Download:
    """One image, which is fetched anew if there was no memory left for its last bytes.

    Each time its host is asked, there is at least twice the memory of the time before, so that it is not asked often.
    """

    def __init__(self, fetcher: Fetcher, address: ImageAddress, memory: JointReservation, deadline: Deadline) -> None:
        """Prepare to fetch.

        Args:
            fetcher: Fetches the image.
            address: Where it is.
            memory: Gets its bytes.
            deadline: That of the request.
        """
        self._fetcher = fetcher
        self._address = address
        self._memory = memory
        self._deadline = deadline
        self._needed = self._received = 0

    async def attempt(self) -> bytes:
        """Fetch the image.

        Raises:
            GatewayFull: There is no memory left for it now; none is kept.
            GatewayError: As `Fetcher.fetch` says.
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
