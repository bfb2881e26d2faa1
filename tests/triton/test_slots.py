"""Slots of an arena never overlap, and are adjacent if possible."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from app.triton.shared_memory import Arena, Slot
from tests.machines import Machine, check

NBYTES = 60


class Parts(Machine):
    """An arena lends the first room after the last slot, or else the first room, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NBYTES)
        self.memory = bytearray(NBYTES)
        """The number of the slot that each byte belongs to; 0 if to none."""
        self.lent: dict[int, Slot] = {}
        self.last = self.number = 0
        """End of the last slot, and its number."""
        self.is_retired = False

    @rule(nbytes=st.sampled_from([1, 5, 10, 10, 15, 20, 30]))
    def take(self, nbytes: int) -> None:
        self.last = self.last if self.lent else 0
        starts = [*range(self.last, NBYTES - nbytes + 1), *range(NBYTES - nbytes + 1)]
        free = [start for start in starts if not self.is_retired and not any(self.memory[start : start + nbytes])]
        slot = self.arena.take(nbytes)
        assert (slot and slot.offset) == (free[0] if free else None)
        if slot is not None:
            self.number = self.number % 255 + 1
            self.memory[slot.offset : slot.end] = [self.number] * nbytes
            slot.array((nbytes,), np.uint8)[:] = self.number
            self.lent[slot.offset], self.last = slot, slot.end

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = self.lent.pop(data.draw(st.sampled_from(sorted(self.lent))))
        self.memory[slot.offset : slot.end] = bytes(slot.end - slot.offset)
        slot.free()

    @rule(offset=st.integers(-1, NBYTES))
    def give_back_what_is_not_lent(self, offset: int) -> None:
        if offset not in self.lent:
            with pytest.raises(ValueError, match="not in list"):
                self.arena.give_back(Slot(self.arena, offset, offset + 1))

    @precondition(lambda self: self.number > 5)
    @rule(is_unconditional=st.booleans())
    def retire(self, is_unconditional: bool) -> None:  # noqa: FBT001
        if is_unconditional:
            self.arena.retire()
        assert self.arena.retire(only_unused=True) == (not self.lent)
        self.is_retired = self.is_retired or is_unconditional or not self.lent

    @invariant()
    def slots_do_not_overlap(self) -> None:
        for slot in self.lent.values():
            assert slot.array((slot.end - slot.offset,), np.uint8).tobytes() == self.memory[slot.offset : slot.end]
        assert self.arena.lent_bytes == NBYTES - self.memory.count(0)

    def finish(self) -> None:
        self.arena.close()


def test_slots_of_an_arena() -> None:
    check(Parts, runs=120, steps=40)
