"""Frames, masks, keypoints and labels: their positions and colours, and the pixels that do not change."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.imaging.decode import estimate_decoding
from app.imaging.drawing import Marks, colour_of, draw
from app.imaging.header import read_header
from app.imaging.picture import estimate_picture_bytes
from tests.imaging.samples import MEGA, encode, limits

GREY = 127
SQUARE = (100, 100, 200, 200)
TRIANGLE = np.array([[100, 100], [200, 100], [100, 200]], np.float32)
"""Half of the square."""


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


def test_pixels_outside_boxes_and_labels_do_not_change() -> None:
    pixels = drawn(640, 480, marks((100, 200, 300, 400)))
    changed = (pixels != GREY).any(axis=2)

    changed[200:400, 100:300] = False
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max()) == (183, 199)
    assert columns.min() == 100
    assert changed.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


@pytest.mark.parametrize("shape", ["frame", "mask", "corners", "keypoints"])
@given(
    width=st.integers(1, 400),
    height=st.integers(1, 400),
    boxes=st.lists(st.tuples(*[st.floats(-50, 450, width=32)] * 4, st.integers(0, 200)), max_size=12),
)
def test_any_boxes_can_be_drawn(shape: str, width: int, height: int, boxes: list[Any]) -> None:
    sorted_boxes = [(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)) for x1, y1, x2, y2, _ in boxes]
    what = marks(*sorted_boxes, class_ids=[box[4] for box in boxes])
    corners = what.boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    shapes: dict[str, dict[str, Any]] = {
        "mask": {"masks": [[own] for own in corners]},
        "corners": {"corners": corners},
        "keypoints": {"keypoints": corners},
    }
    pixels = drawn(width, height, what._replace(**shapes.get(shape, {})))

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


def test_a_mask_is_filled_and_has_a_contour() -> None:
    other = np.array([[170, 170], [200, 170], [200, 200], [170, 200]], np.float32)
    pixels = drawn(640, 480, marks(SQUARE)._replace(masks=[[TRIANGLE, other]]))
    filled = np.rint(0.45 * np.array(colour_of(0)) + 0.55 * GREY)

    assert is_coloured(pixels[98:102, 120:180]).any(axis=0).all()
    assert (pixels[110:130, 110:160] == filled).all()
    assert (pixels[180:190, 180:190] == filled).all()
    assert (pixels[155:165, 155:195] == GREY).all()
    assert (pixels[205:, 205:] == GREY).all()


def test_an_object_whose_mask_is_empty_has_its_label() -> None:
    pixels = drawn(640, 480, marks(SQUARE, names=["person"])._replace(masks=[[]]))

    assert (pixels == 255).any()


def test_where_masks_overlap_the_better_one_has_its_colour() -> None:
    alone, both = (drawn(640, 480, marks(*[SQUARE] * n)._replace(masks=[[TRIANGLE]] * n)) for n in (1, 2))

    assert (both[120:135, 110:150] == alone[120:135, 110:150]).all()


def test_masks_need_no_more_memory_than_the_picture_reserves() -> None:
    header = read_header(encode(Image.new("RGB", (1000, 500)), "PNG"), limits(MEGA))
    outline = np.array([[0, 0], [1000, 0], [1000, 500], [0, 500]], np.float32)
    what = marks(*[(0, 0, 1000, 500)] * 50)._replace(masks=[[outline]] * 50)
    pixels = np.zeros((500, 1000, 3), np.uint8)
    draw(pixels, what)  # loads the font
    tracemalloc.start()
    draw(pixels, what)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < estimate_picture_bytes(header) - estimate_decoding(header, (1000, 500)).nbytes


def test_the_frame_of_an_oriented_box_is_turned() -> None:
    diamond = np.array([[[150, 100], [200, 150], [150, 200], [100, 150]]], np.float32)
    pixels = drawn(640, 480, marks(SQUARE)._replace(corners=diamond))

    for x, y in ((125, 125), (175, 125), (175, 175), (125, 175)):
        assert is_coloured(pixels[y - 1 : y + 1, x - 1 : x + 1]).any()
    assert (pixels[140:160, 140:160] == GREY).all()
    assert (pixels[180:200, 100:115] == GREY).all()  # a corner of the box around it


@pytest.mark.parametrize("shape", ["corners", "masks"])
def test_the_label_of_an_oblique_object_touches_it(shape: str) -> None:
    """At the vertex near the top left: the box around it begins far from there."""
    steep = np.array([[300, 100], [310, 105], [110, 405], [100, 400]], np.float32)
    shapes: dict[str, Any] = {"corners": steep[None], "masks": [[steep]]}
    pixels = drawn(640, 480, marks((100, 100, 310, 405), names=["person"])._replace(**{shape: shapes[shape]}))
    rows, columns = np.nonzero((pixels == 255).all(axis=2))

    assert rows.max() <= 101
    assert columns.min() >= 300


@pytest.mark.parametrize("values", [2, 3])
def test_keypoints_are_dots_of_different_colours(values: int) -> None:
    keypoints = np.array([[[120, 120, 0.9], [150, 150, 0.5], [180, 180, 0.49]]], np.float32)[..., :values]
    pixels = drawn(640, 480, marks(SQUARE)._replace(keypoints=keypoints))

    assert [is_coloured(pixels[y - 2 : y + 2, y - 2 : y + 2], index).any() for index, y in enumerate((120, 150, 180))] == [
        True,
        True,
        values == 2,
    ]
    assert (pixels[130:140, 130:140] == GREY).all()
