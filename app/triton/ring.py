"""Divide a span of memory into parts that lie in the order in which they were taken."""

from bisect import bisect_left


class Ring:
    """Lends parts of a span, each right behind the one before it while there is room there.

    So what is taken one after the other can be read in one piece. When nothing is lent, the next part lies at the start again:
    few parts at a time touch few pages.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lent_bytes = 0
        self._next = 0
        """Where the part that was taken last ends."""
        self._starts: list[int] = []
        """Offsets of the parts that are lent, ascending."""
        self._ends: list[int] = []
        """Where each of them ends."""

    def take(self, nbytes: int) -> int | None:
        """Take a part; return its offset, or None if there is no room for it."""
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
            ValueError: None is lent there.
        """
        index = self._starts.index(offset)
        self.lent_bytes -= self._ends.pop(index) - self._starts.pop(index)

    def _find_room(self, nbytes: int, offset: int) -> int | None:
        """Find the first room at an offset, at which no part is lent, or behind it."""
        for index in range(bisect_left(self._starts, offset), len(self._starts)):
            if self._starts[index] - offset >= nbytes:
                return offset
            offset = self._ends[index]
        return offset if self.nbytes - offset >= nbytes else None
