"""Frames and labels: their positions and colours, and the pixels that do not change."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.imaging.drawing import Marks, colour_of, draw

GREY = 127


def marks(*boxes: tuple[float, ...], class_ids: list[int] | None = None, names: list[str] | None = None) -> Marks:
    ids = class_ids or list(range(len(boxes)))
    scores = np.linspace(0.9, 0.1, len(boxes), dtype=np.float32)
    return Marks(
        np.array(boxes, np.float32).reshape(-1, 4), scores, np.array(ids, np.int32), names or [f"class{id_}" for id_ in ids]
    )


def drawn(width: int, height: int, what: Marks) -> NDArray[np.uint8]:
    pixels = np.full((height, width, 3), GREY, np.uint8)
    draw(pixels, what)
    return pixels


def is_coloured(pixels: NDArray[np.uint8], class_id: int = 0) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (pixels == colour_of(class_id)).all(axis=-1)
    return found


def test_a_frame_lies_on_the_edge_of_its_box() -> None:
    pixels = drawn(640, 480, marks((100, 200, 300, 400)))

    for line in (pixels[200, 100:300], pixels[399, 100:300], pixels[200:400, 100], pixels[200:400, 299]):
        assert is_coloured(line).all()
    assert (pixels[210:390, 110:290] == GREY).all()


def test_nothing_outside_boxes_and_labels_changes() -> None:
    pixels = drawn(640, 480, marks((100, 200, 300, 400)))
    changed = (pixels != GREY).any(axis=2)

    changed[200:400, 100:300] = False
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max()) == (183, 199)
    assert columns.min() == 100
    assert changed.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.lists(st.tuples(*[st.floats(-50, 450, width=32)] * 4, st.integers(0, 200)), max_size=12),
)
def test_any_boxes_can_be_drawn(width: int, height: int, boxes: list[Any]) -> None:
    """Rows that are further from all boxes than the height of a label do not change."""
    sorted_boxes = [(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)) for x1, y1, x2, y2, _ in boxes]
    pixels = drawn(width, height, marks(*sorted_boxes, class_ids=[box[4] for box in boxes]))

    near = np.zeros((height, width), bool)
    for _, y1, _, y2 in sorted_boxes:
        # A label is 17 pixels high.
        near[max(0, min(int(y1), height) - 18) : max(0, int(y2)) + 19] = True
    assert (pixels[~near] == GREY).all()


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 100), (100, 1), (16, 16), (100, 30)])
def test_a_tiny_image_gets_its_frame(width: int, height: int) -> None:
    pixels = drawn(width, height, marks((0, 0, width, height)))

    assert is_coloured(pixels[0]).all()
    assert is_coloured(pixels[-1]).all()


@pytest.mark.parametrize("box", [(0, 0, 639, 100), (600, 0, 640, 30), (0, 470, 30, 480), (635, 475, 640, 480), (0, 0, 640, 480)])
def test_a_label_at_the_edge_stays_inside(box: tuple[float, ...]) -> None:
    in_middle, at_edge = (drawn(640, 480, marks(each, names=["person"])) for each in ((200, 200, 230, 210), box))

    def white(pixels: NDArray[np.uint8]) -> int:
        return int((pixels == 255).all(axis=2).sum())

    assert white(at_edge) == white(in_middle) > 0


def test_labels_do_not_hide_each_other() -> None:
    one, three = (
        drawn(640, 480, marks(*[(300 + i, 200 + i, 330, 230) for i in range(n)], class_ids=[0] * n, names=["person"] * n))
        for n in (1, 3)
    )

    assert (three == 255).all(axis=2).sum() > 2.5 * (one == 255).all(axis=2).sum()


def test_a_label_does_not_hide_a_small_object() -> None:
    pixels = drawn(640, 480, marks((300, 200, 330, 230), (300, 188, 312, 199)))

    assert (pixels[192:196, 304:308] == GREY).all()


def test_the_better_detection_is_on_top() -> None:
    pixels = drawn(640, 480, marks((100, 100, 300, 300), (200, 50, 400, 250)))

    assert is_coloured(pixels[100:250, 299], 0).all()


def test_lines_and_text_grow_with_the_image() -> None:
    small, large = (drawn(w, h, marks((w / 4, h / 4, w / 2, h / 2))) for w, h in ((320, 240), (4000, 3000)))

    def widths(pixels: NDArray[np.uint8]) -> tuple[int, int]:
        height, width = pixels.shape[:2]
        above = is_coloured(pixels[: height // 4, width // 4])
        return int(is_coloured(pixels[height * 3 // 8, : width * 3 // 8]).sum()), int(above.sum())

    assert widths(small) == (2, 17)
    assert widths(large) == (10, 106)


def test_a_class_has_one_colour_and_its_neighbours_have_others() -> None:
    assert len({colour_of(class_id) for class_id in range(16)}) == 16
    assert colour_of(5) == colour_of(5 + 16) != colour_of(6)
