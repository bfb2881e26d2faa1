"""Parts of a span of memory: never two in one place, and one behind the other where that is possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.triton.ring import Ring


def test_parts_lie_one_behind_the_other() -> None:
    ring = Ring(100)

    assert [ring.take(nbytes) for nbytes in (10, 1, 30)] == [0, 10, 11]
    assert ring.lent_bytes == 41


def test_without_parts_it_starts_over() -> None:
    """A few parts at a time then touch few pages."""
    ring = Ring(100)
    for _ in range(3):
        offset = ring.take(10)
        assert offset == 0
        ring.give_back(offset)

    assert ring.lent_bytes == 0


def test_what_is_given_back_is_taken_again_after_the_rest() -> None:
    """The part behind the last one comes first, so that neighbours in memory are neighbours in time."""
    ring = Ring(40)
    first, second = ring.take(10), ring.take(10)
    assert (first, second) == (0, 10)
    ring.give_back(0)

    assert [ring.take(10) for _ in range(4)] == [20, 30, 0, None]


def test_parts_in_between_are_passed_over() -> None:
    ring = Ring(50)
    for _ in range(5):
        ring.take(10)
    for offset in (0, 10, 30, 40):
        ring.give_back(offset)

    assert [ring.take(10) for _ in range(5)] == [0, 10, 30, 40, None]


def test_a_gap_that_is_too_small_is_passed_over() -> None:
    """A part needs contiguous room."""
    ring = Ring(50)
    for nbytes in (10, 20, 20):
        ring.take(nbytes)
    ring.give_back(0)
    ring.give_back(30)

    assert ring.take(15) == 30
    assert ring.take(15) is None
    assert ring.take(5) == 45


@pytest.mark.parametrize("offset", [5, 10, -1])
def test_only_what_is_lent_can_be_given_back(offset: int) -> None:
    """Otherwise two requests could write to the same place."""
    ring = Ring(100)
    ring.take(10)

    with pytest.raises(ValueError, match="not in list"):
        ring.give_back(offset)
    assert ring.lent_bytes == 10


@given(st.lists(st.one_of(st.integers(1, 40), st.integers(-8, -1)), max_size=60))
def test_parts_never_overlap(steps: list[int]) -> None:
    """However they are taken and given back; and where there is room in one piece, there is a part."""
    ring = Ring(100)
    lent: dict[int, int] = {}
    for step in steps:
        if step < 0:
            if lent:
                offset = list(lent)[step % len(lent)]
                ring.give_back(offset)
                del lent[offset]
            continue
        taken = ring.take(step)
        used = sorted(lent.items())
        gaps = [begin - end for end, begin in zip([0, *(a + n for a, n in used)], [*(a for a, _ in used), 100], strict=True)]
        assert (taken is not None) == (max(gaps) >= step)
        if taken is not None:
            assert 0 <= taken <= 100 - step
            assert all(taken + step <= begin or begin + nbytes <= taken for begin, nbytes in used)
            lent[taken] = step
        assert ring.lent_bytes == sum(lent.values())
