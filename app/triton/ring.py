"""Ring allocator: consecutive allocations are adjacent in memory."""

from bisect import bisect_left


class Ring:
    """Lends parts of `nbytes` bytes, each directly after the previous one if there is room.

    So consecutive parts can be read in one piece. If none is lent, the next part begins at offset 0: few parts touch few pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent_bytes = 0
        self._next = 0
        """End of the part that was taken last."""
        self._starts: list[int] = []
        """Offsets of the lent parts, ascending."""
        self._ends: list[int] = []
        """End of each lent part."""

    def take(self, nbytes: int) -> int | None:
        """Take a part, and return its offset; None if there is no room."""
        if not self._starts:
            self._next = 0
        offset = self._find_room(nbytes, self._next)
        if offset is None:
            offset = self._find_room(nbytes, 0)
        if offset is None:
            return None
        index = bisect_left(self._starts, offset)
        self._next = offset + nbytes
        self._starts.insert(index, offset)
        self._ends.insert(index, self._next)
        self.lent_bytes += nbytes
        return offset

    def give_back(self, offset: int) -> None:
        """Give back the part at an offset.

        Raises:
            ValueError: No part is lent at this offset.
        """
        index = self._starts.index(offset)
        self.lent_bytes -= self._ends.pop(index) - self._starts.pop(index)

    def _find_room(self, nbytes: int, offset: int) -> int | None:
        """Find the first room from an offset on, which must not lie inside a lent part."""
        for index in range(bisect_left(self._starts, offset), len(self._starts)):
            if self._starts[index] - offset >= nbytes:
                return offset
            offset = self._ends[index]
        return offset if self.nbytes - offset >= nbytes else None
