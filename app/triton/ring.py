"""Ring allocator: consecutive allocations are adjacent in memory."""

from bisect import bisect_left, insort


class Ring:
    """Lends parts of `nbytes` bytes, each directly after the previous one if there is room, to be read in one piece."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent_bytes = 0
        self._next = 0
        """End of the part that was taken last."""
        self._lent: list[tuple[int, int]] = []
        """Offset and end of each lent part, ascending."""

    def take(self, nbytes: int) -> int | None:
        """Take a part, and return its offset; None if there is no room."""
        if not self._lent:
            self._next = 0  # few parts touch few pages
        offset = self._find_room(nbytes, self._next)
        if offset is None:
            offset = self._find_room(nbytes, 0)
        if offset is None:
            return None
        self._next = offset + nbytes
        insort(self._lent, (offset, self._next))
        self.lent_bytes += nbytes
        return offset

    def give_back(self, offset: int, end: int) -> None:
        """Give back a part; raises ValueError if it is not lent."""
        self._lent.remove((offset, end))
        self.lent_bytes -= end - offset

    def _find_room(self, nbytes: int, offset: int) -> int | None:
        """Find the first room from an offset on, which must not lie inside a lent part."""
        for start, end in self._lent[bisect_left(self._lent, (offset, 0)) :]:
            if start - offset >= nbytes:
                return offset
            offset = end
        return offset if self.nbytes - offset >= nbytes else None
