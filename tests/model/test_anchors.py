"""The anchor grid of detection heads."""

from hypothesis import given
from hypothesis import strategies as st

from app.model.anchors import anchor_grid, count_anchors

SIDES = st.integers(1, 700)


def test_anchors_cover_the_input_row_by_row() -> None:
    """Anchors run over x, then y, then the strides 8, 16 and 32."""
    corners, strides = anchor_grid((64, 32))

    assert len(corners) == 8 * 4 + 4 * 2 + 2 * 1
    assert corners[[0, 1, 7, 8, 31, 32, 35, 36, 40, 41]].tolist() == [
        [0, 0], [1, 0], [7, 0], [0, 1], [7, 3], [0, 0], [3, 0], [0, 1], [0, 0], [1, 0]
    ]  # fmt: skip
    assert strides.ravel().tolist() == [8] * 32 + [16] * 8 + [32] * 2


@given(st.tuples(SIDES, SIDES))
def test_anchors_are_counted_as_they_are_laid_out(input_size: tuple[int, int]) -> None:
    corners, strides = anchor_grid(input_size)

    assert count_anchors(input_size) == len(corners) == len(strides)
