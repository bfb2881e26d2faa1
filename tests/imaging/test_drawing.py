"""Frames, masks, keypoints and labels: their positions, colours and texts, and the pixels that do not change."""

import subprocess
import sys
import zlib
from io import BytesIO
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.imaging.drawing import Marks, colour_of, draw
from app.imaging.header import read_header
from app.imaging.label import fit, readable_name, render
from app.imaging.picture import PictureType, draw_picture
from app.imaging.thumbnail import to_thumbnail
from tests.imaging.samples import AVIF, FORMATS, HEIC, MEGA, PIXELS, encode, limits, made_profile, png_chunk, with_property
from tests.support import peak_below

GREY = 127
SQUARE = (100, 100, 200, 200)
TRIANGLE = np.array([[100, 100], [200, 100], [100, 200]], np.float32)
"""Half of the square."""


def drawn(
    *boxes: tuple[float, ...],
    size: tuple[int, int] = (640, 480),
    class_ids: list[int] | None = None,
    **shapes: Any,  # noqa: ANN401
) -> NDArray[np.uint8]:
    pixels = np.full((*size[::-1], 3), GREY, np.uint8)
    ids = np.array(class_ids or range(len(boxes)), np.int32)
    scores = np.linspace(0.9, 0.1, len(boxes), dtype=np.float32)
    draw(pixels, Marks(np.array(boxes, np.float32).reshape(-1, 4), scores, ids, ["person"] * len(boxes), **shapes))
    return pixels


def is_coloured(pixels: NDArray[np.uint8], class_id: int = 0) -> NDArray[np.bool_]:
    return np.asarray((pixels == colour_of(class_id)).all(axis=-1))


def count_white(pixels: NDArray[np.uint8]) -> int:
    return int((pixels == 255).all(axis=-1).sum())


def test_frame_lies_on_the_edge_of_its_box_and_its_label_above() -> None:
    pixels = drawn((100, 200, 300, 400))
    for line in (pixels[200, 100:300], pixels[399, 100:300], pixels[200:400, 100], pixels[200:400, 299]):
        assert is_coloured(line).all()
    assert (pixels[210:390, 110:290] == GREY).all()

    changed = (pixels != GREY).any(axis=2)
    changed[200:400, 100:300] = False
    rows, columns = np.nonzero(changed)
    assert (rows.min(), rows.max(), columns.min()) == (183, 199, 100)
    assert changed.sum() == (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1)


@given(
    shape=st.sampled_from(["frame", "masks", "corners", "keypoints"]),
    size=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    boxes=st.lists(st.tuples(*[st.floats(-50, 450, width=32)] * 4, st.integers(0, 200)), max_size=12),
)
def test_any_boxes_can_be_drawn(shape: str, size: tuple[int, int], boxes: list[Any]) -> None:
    ordered = [(min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)) for x1, y1, x2, y2, _ in boxes]
    corners = np.array(ordered, np.float32).reshape(-1, 4)[:, [0, 1, 2, 1, 2, 3, 0, 3]].reshape(-1, 4, 2)
    shapes = {"frame": {}, "masks": {"masks": [[outline] for outline in corners]}}.get(shape, {shape: corners})
    pixels = drawn(*ordered, size=size, class_ids=[box[4] for box in boxes], **shapes)

    near = np.zeros(size[1], bool)
    for _, y1, _, y2 in ordered:
        near[max(0, min(int(y1), size[1]) - 18) : max(0, int(y2)) + 19] = True  # a label is 17 pixels high
    assert (pixels[~near] == GREY).all()


def test_labels_at_the_edge_stay_inside_and_do_not_hide_each_other() -> None:
    for box in ((600, 0, 640, 30), (635, 475, 640, 480), (0, 0, 640, 480)):
        assert count_white(drawn(box)) == count_white(drawn((200, 200, 230, 210))) > 0
    one, three = (drawn(*[(300 + i, 200 + i, 330, 230) for i in range(n)], class_ids=[0] * n) for n in (1, 3))
    assert count_white(three) > 2.5 * count_white(one)


def test_mask_is_filled_and_has_a_contour() -> None:
    other = np.array([[170, 170], [200, 170], [200, 200], [170, 200]], np.float32)
    pixels = drawn(SQUARE, masks=[[TRIANGLE, other]])
    filled = np.rint(0.45 * np.array(colour_of(0)) + 0.55 * GREY)

    assert is_coloured(pixels[98:102, 120:180]).any(axis=0).all()
    assert (pixels[110:130, 110:160] == filled).all()
    assert (pixels[180:190, 180:190] == filled).all()
    assert (pixels[155:165, 155:195] == GREY).all()
    assert (pixels[205:, 205:] == GREY).all()
    assert (drawn(SQUARE, SQUARE, masks=[[TRIANGLE]] * 2)[120:135, 110:150] == filled).all()  # the better one's
    assert count_white(drawn(SQUARE, masks=[[]]))  # an empty mask has a label


def test_frame_of_an_oriented_box_is_turned_and_touches_its_label() -> None:
    """At the vertex near the top left: the box around it begins far from there."""
    pixels = drawn(SQUARE, corners=np.array([[[150, 100], [200, 150], [150, 200], [100, 150]]], np.float32))
    for x, y in ((125, 125), (175, 125), (175, 175), (125, 175)):
        assert is_coloured(pixels[y - 1 : y + 1, x - 1 : x + 1]).any()
    assert (pixels[140:160, 140:160] == GREY).all()

    steep = np.array([[[300, 100], [310, 105], [110, 405], [100, 400]]], np.float32)
    rows, columns = np.nonzero((drawn((100, 100, 310, 405), corners=steep) == 255).all(axis=2))
    assert (rows.max() <= 101, columns.min() >= 300) == (True, True)


def test_keypoints_are_dots_of_different_colours() -> None:
    points = np.array([[[120, 120, 0.9], [150, 150, 0.5], [180, 180, 0.49]]], np.float32)
    for keypoints, shown in ((points, [True, True, False]), (points[..., :2], [True] * 3)):
        pixels = drawn(SQUARE, keypoints=keypoints)
        dots = [is_coloured(pixels[y - 2 : y + 2, y - 2 : y + 2], index).any() for index, y in enumerate((120, 150, 180))]
        assert dots == shown
        assert (pixels[130:140, 130:140] == GREY).all()


@given(st.text(max_size=50), st.integers(6, 80), st.integers(1, 500), st.integers(1, 200))
def test_label_is_one_line_that_can_be_drawn_and_fits(name: str, text_size: int, max_width: int, max_height: int) -> None:
    label = fit(readable_name(name, 1), "0.50", text_size, max_width, max_height)
    if label is not None:
        assert (label.width <= max_width, label.height <= max_height) == (True, True)
        assert render(label, (230, 25, 75)).shape == (label.height, label.width, 3)
    given = {"\x00\x1b[31mcar": "[31mcar", "x" * 99: "x" * 40 + "…", "自転車": "自転車", "العربية": "class 3", "\ud800": "class 3"}
    assert {text: readable_name(text, 3) for text in given} == given
    texts = [fit("fire hydrant", "0.87", 12, width, 100) for width in (200, 100, 40, 20)]
    assert [found and found.text for found in texts] == ["fire hydrant 0.87", "fire hydr… 0.87", "0.87", None]


NOTHING = Marks(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32), [])


def pictured(data: bytes, picture_type: PictureType = "image/png") -> NDArray[np.uint8]:
    with Image.open(BytesIO(draw_picture(read_header(data, limits(MEGA)), NOTHING, picture_type))) as image:
        assert Image.MIME[image.format or ""] == picture_type
        return np.asarray(image)


@pytest.mark.parametrize("image_format", FORMATS)
def test_image_of_any_format_keeps_its_colours(image_format: str) -> None:
    data = encode(Image.fromarray(PIXELS), image_format)

    assert np.abs(pictured(data).astype(int) - PIXELS).max() <= (0 if image_format in {"PNG", "BMP", "WEBP"} else 12)
    assert np.abs(pictured(data, picture_type="image/jpeg").astype(int) - PIXELS).mean() < 3


@pytest.mark.parametrize(
    ("image_format", "mode"),
    [
        ("JPEG", "RGB"),
        ("PNG", "RGB"),
        ("WEBP", "RGB"),
        ("TIFF", "RGB"),
        ("AVIF", "RGB"),
        ("HEIC", "RGB"),
        ("JPEG", "L"),
        ("PNG", "L"),
    ],
)
def test_colour_profile_stays_if_it_can_be_applied(image_format: str, mode: str) -> None:
    """The picture is RGB. Pillow here does not read the profiles of JPEGs; one with its defaults does."""
    profile = made_profile(mode)
    if image_format in {"AVIF", "HEIC"}:
        data = with_property(*{"AVIF": (AVIF, 5), "HEIC": (HEIC, 3)}[image_format], b"colr", b"prof" + profile)
    else:
        data = encode(Image.fromarray(PIXELS).convert(mode), image_format, icc_profile=profile)
    read = "import sys; from PIL import Image; sys.stdout.buffer.write(Image.open(sys.stdin.buffer).info.get('icc_profile') or b'')"
    for picture_type in get_args(PictureType):
        picture = draw_picture(read_header(data, limits(MEGA)), NOTHING, picture_type)
        done = subprocess.run([sys.executable, "-c", read], input=picture, capture_output=True, check=True)
        assert done.stdout == (profile if mode == "RGB" else b"")


def test_hostile_profile_takes_little_memory_and_is_dropped() -> None:
    data, bomb = encode(Image.fromarray(PIXELS), "PNG"), png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(100_000_000)))
    with peak_below(10_000_000):
        picture = draw_picture(read_header(data[:33] + bomb + data[33:], limits(MEGA)), NOTHING, "image/png")
    assert b"iCCP" not in picture
    short = encode(Image.fromarray(PIXELS), "JPEG", icc_profile=made_profile("RGB")[:-1])
    assert b"ICC_PROFILE" not in draw_picture(read_header(short, limits(MEGA)), NOTHING, "image/jpeg")


@pytest.mark.parametrize(
    ("box", "size"),
    [((0, 0, 1, 1), (200, 50)), ((0.5, 0, 0.75, 1), (100, 100)), ((1, 1, 1, 1), (1, 1))],
)
def test_thumbnail_is_a_part_shrunk_to_its_longer_side_but_never_enlarged(box: tuple[float, ...], size: tuple[int, int]) -> None:
    pixels = np.full((100, 400, 3), (0, 0, 255), np.uint8)
    pixels[:, :200] = (255, 0, 0)
    picture = Image.open(BytesIO(to_thumbnail(pixels, 200, box)))
    assert (picture.format, picture.size) == ("JPEG", size)
    red, _, blue = np.asarray(picture)[-1, -1]
    assert (blue > 200, red < 50) == (True, True)
