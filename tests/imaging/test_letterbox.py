"""A picture's way into the frame, and the boxes' way back."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.letterbox import Placement, draw, place

SIDES = st.integers(1, 16384)
FRAMES = st.sampled_from([32, 320, 416, 480, 640, 1280, 8192])


def noise(width: int, height: int) -> NDArray[np.uint8]:
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)


def drawn(picture: NDArray[np.uint8], placement: Placement, frame: tuple[int, int], pad: int = 114) -> NDArray[np.uint8]:
    out = np.full((frame[1], frame[0], 3), 7, np.uint8)
    draw(picture, placement, pad, out)
    return out


@given(
    st.builds(place, st.tuples(SIDES, SIDES), st.tuples(FRAMES, FRAMES), centred=st.booleans(), enlarge=st.booleans()),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
)
def test_boxes_come_back_where_they_were(placed: Placement, corners: list[float]) -> None:
    """A box of the picture, found where the frame shows it, is the same box to half a pixel."""
    picture = np.array([placed.picture_width, placed.picture_height] * 2)
    box = np.array(corners) * picture
    in_frame = np.array([placed.left, placed.top] * 2) + box * np.array([placed.width, placed.height] * 2) / picture

    back = placed.to_picture(in_frame[None].astype(np.float32))

    np.testing.assert_allclose(back[0], box, atol=0.5)


@given(picture=st.tuples(SIDES, SIDES), frame=st.tuples(FRAMES, FRAMES), centred=st.booleans(), enlarge=st.booleans())
def test_picture_lies_inside_the_frame(*, picture: tuple[int, int], frame: tuple[int, int], centred: bool, enlarge: bool) -> None:
    """Nothing of the placed picture is outside, and its proportions are kept to the rounding."""
    placed = place(picture, frame, centred=centred, enlarge=enlarge)
    right, bottom = frame[0] - placed.left - placed.width, frame[1] - placed.top - placed.height
    scale = min(frame[0] / picture[0], frame[1] / picture[1], *([] if enlarge else [1.0]))

    assert min(placed.left, placed.top, right, bottom) >= 0
    assert (placed.picture_width, placed.picture_height) == picture
    assert abs(placed.width - picture[0] * scale) <= (0.5 if centred else 1) or placed.width == 1
    assert abs(placed.height - picture[1] * scale) <= (0.5 if centred else 1) or placed.height == 1
    if centred:
        assert 0 <= right - placed.left <= 1
        assert 0 <= bottom - placed.top <= 1
    else:
        assert (placed.left, placed.top) == (0, 0)


@pytest.mark.parametrize(
    ("picture", "placed"),
    [
        ((640, 640), (0, 0, 640, 640)),
        ((640, 426), (0, 107, 640, 426)),
        ((640, 427), (0, 106, 640, 427)),
        ((427, 640), (106, 0, 427, 640)),
        ((500, 375), (0, 80, 640, 480)),
        ((333, 500), (107, 0, 426, 640)),
        ((1920, 1080), (0, 140, 640, 360)),
        ((1080, 1920), (140, 0, 360, 640)),
        ((512, 683), (80, 0, 480, 640)),
        ((1280, 855), (0, 106, 640, 428)),
        ((100, 1), (0, 317, 640, 6)),
        ((16384, 1), (0, 319, 640, 1)),
    ],
)
def test_placement_is_that_of_ultralytics(picture: tuple[int, int], placed: tuple[int, int, int, int]) -> None:
    """Left, top, width and height in a 640 frame are those its LetterBox computes."""
    assert place(picture, (640, 640), centred=True, enlarge=True) == Placement(*placed, *picture)


def test_frame_need_not_be_square() -> None:
    """The tighter side of the frame decides the scale."""
    assert place((1000, 1000), (640, 480), centred=True, enlarge=True) == Placement(80, 0, 480, 480, 1000, 1000)
    assert place((1000, 1000), (480, 640), centred=False, enlarge=True) == Placement(0, 0, 480, 480, 1000, 1000)


def test_small_picture_grows_only_where_it_may() -> None:
    """`enlarge` decides about pictures smaller than the frame, not about larger ones."""
    assert place((320, 160), (640, 640), centred=True, enlarge=True) == Placement(0, 160, 640, 320, 320, 160)
    assert place((320, 160), (640, 640), centred=True, enlarge=False) == Placement(160, 240, 320, 160, 320, 160)
    assert place((1280, 640), (640, 640), centred=True, enlarge=False) == Placement(0, 160, 640, 320, 1280, 640)


def test_boxes_are_clipped_to_the_picture() -> None:
    """What reaches into the padding ends at the picture's edge."""
    placement = Placement(0, 140, 640, 360, 1920, 1080)

    boxes = placement.to_picture(np.array([[-10, 0, 700, 640], [0, 140, 640, 500]], np.float32))

    np.testing.assert_array_equal(boxes, [[0, 0, 1920, 1080], [0, 0, 1920, 1080]])


def test_boxes_beyond_measure_are_clipped_without_a_warning() -> None:
    """A box as large as a float can say is clipped like any other."""
    placement = Placement(0, 0, 32, 32, 3200, 3200)
    limit = np.finfo(np.float32).max

    boxes = placement.to_picture(np.array([[-limit, -limit, limit, limit]], np.float32))

    np.testing.assert_array_equal(boxes, [[0, 0, 3200, 3200]])


def test_no_boxes_stay_no_boxes() -> None:
    """An empty answer has the right shape."""
    assert Placement(0, 0, 640, 480, 640, 480).to_picture(np.empty((0, 4), np.float32)).shape == (0, 4)


@pytest.mark.parametrize(("left", "top"), [(0, 0), (5, 3), (10, 0), (0, 6)])
def test_picture_is_copied_at_its_own_size(left: int, top: int) -> None:
    """At scale one the pixels are the picture's and all the rest is padding."""
    picture = noise(20, 10)
    expected = np.full((16, 30, 3), 99, np.uint8)
    expected[top : top + 10, left : left + 20] = np.asarray(picture)

    out = drawn(picture, Placement(left, top, 20, 10, 20, 10), (30, 16), pad=99)

    np.testing.assert_array_equal(out, expected)


def test_reduced_picture_lands_where_the_full_one_would() -> None:
    """A picture decoded smaller than its true size fills the same rectangle."""
    placement = place((800, 400), (64, 64), centred=True, enlarge=True)

    out = drawn(np.full((100, 200, 3), 255, np.uint8), placement, (64, 64), pad=0)

    np.testing.assert_array_equal(out[16:48], 255)
    assert out.sum() == 32 * 64 * 3 * 255


@pytest.mark.parametrize(
    "size",
    [
        *((1000, 750), (641, 480), (750, 1000), (4000, 3000), (1281, 961), (700, 7)),
        *((320, 240), (639, 480), (100, 100), (640, 1), (1, 60), (10, 640), (1, 1)),
    ],
)
def test_resizing_is_that_of_opencv(size: tuple[int, int]) -> None:
    """Shrunk or grown, noise looks as cv2.resize with INTER_LINEAR makes it, to two grey levels."""
    picture = noise(*size)
    placement = place(size, (640, 640), centred=False, enlarge=True)

    out = drawn(picture, placement, (640, 640))[: placement.height, : placement.width]

    expected = cv2.resize(np.asarray(picture), (placement.width, placement.height), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(out.astype(int), expected.astype(int), atol=2)


@pytest.mark.parametrize("size", [(1, 100), (100, 1), (2, 130)])
def test_shrinking_a_sliver_is_that_of_opencv(size: tuple[int, int]) -> None:
    """A picture so narrow that it keeps its width is still sampled along its length, not averaged."""
    picture = noise(*size)
    placement = place(size, (64, 64), centred=False, enlarge=True)

    out = drawn(picture, placement, (64, 64))[: placement.height, : placement.width]

    expected = cv2.resize(np.asarray(picture), (placement.width, placement.height), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(out.astype(int), expected.reshape(out.shape).astype(int), atol=2)
