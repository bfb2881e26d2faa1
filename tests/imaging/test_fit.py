"""Fitting images to the canvas by letterbox, centre crop, stretch, or as pages and lines of text, and mapping boxes back."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.imaging import jpeg
from app.imaging.fit import CenterCrop, Letterbox, Line, Page, Stretch, canvas_size, page_size
from app.imaging.patch import Patch
from app.imaging.transform import ImageTransform
from app.model.shapes import rectangles
from app.model.triton_config import Interpolation
from tests.imaging.samples import gradient
from tests.model.configs import spec_of, table

SIDES = st.integers(1, 16384)
CANVAS_SIDES = st.sampled_from([32, 320, 416, 480, 640, 1280, 8192])
LETTERBOXES = st.builds(
    Letterbox,
    st.tuples(CANVAS_SIDES, CANVAS_SIDES),
    st.sampled_from(["center", "top_left"]),
    st.booleans(),
    st.just(114),
    shapes=st.sampled_from([(), ((320, 192), (192, 320), (640, 480))]),
)
CENTRED = Letterbox((640, 640), "center", enlarge=True, pad=114)
SHAPES = CENTRED._replace(shapes=rectangles(640, 32))


def noise(width: int, height: int) -> NDArray[np.uint8]:
    return np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)


@given(LETTERBOXES, SIDES, SIDES, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_letterboxed_image_lies_inside_the_canvas_and_boxes_come_back(
    box: Letterbox, width: int, height: int, corners: list[float]
) -> None:
    transform = box.fit(width, height)
    columns, rows = canvas_size(box, transform)
    right, bottom = columns - transform.left - transform.width, rows - transform.top - transform.height
    scale = min(box.canvas_size[0] / width, box.canvas_size[1] / height, *([] if box.enlarge else [1.0]))
    rounding = 0.5 if box.placement == "center" else 1

    assert min(transform.left, transform.top, right, bottom) >= 0
    assert abs(transform.width - width * scale) <= rounding or transform.width == 1
    assert abs(transform.height - height * scale) <= rounding or transform.height == 1
    if box.placement == "center":
        assert 0 <= right - transform.left <= 1
        assert 0 <= bottom - transform.top <= 1
    else:
        assert (transform.left, transform.top) == (0, 0)
    image = np.array([width, height] * 2)
    boxes = np.array(corners) * image
    on_canvas = np.array([transform.left, transform.top] * 2) + boxes * np.array([transform.width, transform.height] * 2) / image
    np.testing.assert_allclose(transform.to_image(on_canvas[None].astype(np.float32))[0], boxes, atol=0.5)


@pytest.mark.parametrize(
    ("box", "image", "placed"),
    [
        # Left, top, width and height on a canvas of 640 pixels are those that LetterBox of Ultralytics computes.
        (CENTRED, (640, 426), (0, 107, 640, 426)),
        (CENTRED, (333, 500), (107, 0, 426, 640)),
        (CENTRED, (1920, 1080), (0, 140, 640, 360)),
        # With `auto=True`, also where one more row of padding is below, or no rectangle holds the image.
        (SHAPES, (1920, 1080), (0, 12, 640, 360)),
        (SHAPES, (640, 427), (0, 10, 640, 427)),
        (SHAPES, (333, 500), (11, 0, 426, 640)),
        (SHAPES, (1500, 2000), (0, 0, 480, 640)),
        (SHAPES, (500, 499), (0, 0, 640, 639)),
        # Width and height on a canvas of 416 pixels are truncated, as in preproc of YOLOX.
        (Letterbox((416, 416), "top_left", enlarge=True, pad=114), (999, 1), (0, 0, 416, 1)),
        (Letterbox((640, 480), "center", enlarge=True, pad=114), (1000, 1000), (80, 0, 480, 480)),
        (Letterbox((640, 640), "center", enlarge=False, pad=114), (320, 160), (160, 240, 320, 160)),
    ],
)
def test_placement_is_that_of_the_detectors_own_code(
    box: Letterbox, image: tuple[int, int], placed: tuple[int, int, int, int]
) -> None:
    assert box.fit(*image) == ImageTransform(*placed, *image)


def test_boxes_are_clipped_to_the_image() -> None:
    huge = float(np.finfo(np.float32).max)
    transform = ImageTransform(0, 140, 640, 360, 1920, 1080)
    boxes = np.array([[-10, 0, 700, 640], [-huge, -huge, huge, huge]], np.float32)

    np.testing.assert_array_equal(transform.to_image(boxes), [[0, 0, 1920, 1080]] * 2)
    assert transform.to_image(boxes[:0]).shape == (0, 4)


@pytest.mark.parametrize(("canvas_side", "size"), [(640, (1000, 750)), (640, (700, 7)), (640, (320, 240)), (64, (1, 100))])
def test_resizing_is_that_of_opencv(canvas_side: int, size: tuple[int, int]) -> None:
    pixels = noise(*size)
    box = Letterbox((canvas_side, canvas_side), "top_left", enlarge=True, pad=114)
    transform = box.fit(*size)

    canvas = np.full((canvas_side, canvas_side, 3), 7, np.uint8)
    box.draw(pixels, transform, canvas)
    area = transform.area(canvas)

    expected = cv2.resize(pixels, (transform.width, transform.height), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_allclose(area.astype(int), expected.reshape(area.shape).astype(int), atol=2)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(500, 375), (61, 3000), (30, 7)])
def test_middle_is_that_of_the_whole_image_when_it_has_been_resized(size: tuple[int, int], interpolation: Interpolation) -> None:
    """This is how torchvision crops, which takes much memory for a long image."""
    pixels, fit = noise(*size), CenterCrop((112, 112), 0.875, interpolation)
    canvas = np.empty((112, 112, 3), np.uint8)
    fit.draw(pixels, fit.fit(*size), canvas)

    width, height = (side * 128 // min(size) for side in size)
    whole = Image.fromarray(pixels).resize((width, height), Image.Resampling[interpolation.upper()])
    left, top = round((width - 112) / 2), round((height - 112) / 2)
    assert np.abs(canvas.astype(int) - np.asarray(whole.crop((left, top, left + 112, top + 112)))).max() <= 1


def test_image_is_decoded_large_enough() -> None:
    """A crop is decoded at four times the canvas to within a pixel; that of the second image has 1791.125 pixels."""
    fit = CenterCrop((224, 224), 0.875, "bilinear")

    assert CENTRED.fit(4000, 3000).min_decode_size == (2560, 1920)
    assert fit.fit(4096, 2048).min_decode_size == (2045, 1022)
    assert jpeg.reduced_size((16384, 2047), fit.fit(16384, 2047).min_decode_size) == (8192, 1024)
    assert jpeg.reduced_size((4080, 2040), fit.fit(4080, 2040).min_decode_size) == (4080, 2040)
    assert Stretch((224, 224), "bilinear").fit(4096, 2048).min_decode_size == (896, 896)


def test_stretched_image_fills_the_canvas() -> None:
    fit = Stretch((50, 100), "bilinear")
    canvas = np.empty((100, 50, 3), np.uint8)
    fit.draw(gradient(200, 100), fit.fit(200, 100), canvas)

    np.testing.assert_allclose(canvas[50, [0, 25, -1], 0], [2, 127, 248], atol=2)
    np.testing.assert_allclose(canvas[[0, 50, -1], 25, 1], [0, 126, 250], atol=2)
    for way, expected in ((fit, [40, 20, 200, 90]), (CenterCrop((50, 100), 0.5, "bilinear"), [93, 35, 113, 70])):
        boxes = way.fit(200, 100).to_image(np.array([[10, 20, 60, 90]], np.float32))
        np.testing.assert_allclose(boxes, [expected], atol=0.01)


PAGE = Page(2048 * 2048, 736, "bilinear")


@pytest.mark.parametrize(
    ("size", "canvas", "black"),
    [
        ((2560, 1707), (1984, 1344), 0),
        ((300, 2400), (736, 5696), 0),
        ((678, 79), (2976, 736), 44),
        ((6000, 300), (2944, 736), 625),
    ],
)
def test_pages_have_the_sizes_of_rapidocr(size: tuple[int, int], canvas: tuple[int, int], black: int) -> None:
    """Recorded from its release 3.10.0: multiples of 32, with black rows above and below an image that is very wide."""
    transform = PAGE.fit(*size)

    assert canvas_size(PAGE, transform) == canvas
    assert -(transform.crop.top if transform.crop else 0) == pytest.approx(black)
    pixels = np.full((*canvas[::-1], 3), 7, np.uint8)
    PAGE.draw(np.full((size[1], size[0], 3), 200, np.uint8), transform, pixels)
    column = pixels[:, canvas[0] // 2, 0]
    top = black * canvas[1] / (size[1] + 2 * black)
    assert set(column[: int(top) - 40 if black else 0].tolist()) <= {0}
    assert column[canvas[1] // 2] == 200
    np.testing.assert_allclose(transform.points_to_image(np.array([[0, top]], np.float32)), [[0, 0]], atol=0.01)


@given(SIDES, SIDES)
def test_page_of_any_size_is_bounded(width: int, height: int) -> None:
    sides = canvas_size(PAGE, PAGE.fit(width, height))

    assert sides[0] * sides[1] <= PAGE.max_pixels
    assert all(side >= 32 and side % 32 == 0 for side in sides)
    assert max(page_size(width, height)) <= 4096


@pytest.mark.parametrize(("size", "width", "canvas"), [((160, 48), 160, 160), ((161, 48), 161, 320), ((9999, 48), 640, 640)])
def test_line_is_padded_to_the_next_width_or_squeezed(size: tuple[int, int], width: int, canvas: int) -> None:
    """Its canvas follows from its own size alone, and so does its answer, whatever other lines are read with it."""
    line = Line(48, (160, 320, 640), 127, "bilinear")
    transform = line.fit(*size)
    pixels = np.full((48, canvas, 3), 7, np.uint8)
    line.draw(np.full((size[1], size[0], 3), 200, np.uint8), transform, pixels)

    assert (transform.width, canvas_size(line, transform)) == (width, (canvas, 48))
    assert (pixels[:, :width] == 200).all()
    assert (pixels[:, width:] == 127).all()


WANTED = np.array([[0.3, 0.3], [0.7, 0.3], [0.5, 0.5], [0.35, 0.7], [0.65, 0.7]])
IMAGE = table(1, 100, 100, 3, name="image", data_type="TYPE_UINT8")
SPEC = spec_of(table(1, 4), image=IMAGE, batch=0, task="embedding", landmarks=",".join(map(str, WANTED.ravel())))


def test_turned_object_lies_where_the_model_wants_it() -> None:
    for angle, scale, middle in ((0.5, 60, (110, 90)), (-2.5, 250, (120, 100)), (0, 80, (10, 100))):
        cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
        landmarks = (WANTED - 0.5) @ np.array([[cosine, sine], [-sine, cosine]]) + middle
        x, y = np.meshgrid(np.arange(200), np.arange(180))
        places = np.stack([x, y, np.zeros_like(x)], axis=-1).astype(np.uint8)  # each pixel tells where it is

        cut = Patch(places, landmarks=landmarks.astype(np.float32)).cut(SPEC)

        assert cut.shape == (100, 100, 3)
        for place, landmark in zip((WANTED * 100).astype(int), landmarks, strict=True):
            expected = landmark if (landmark >= 0).all() and (landmark < (200, 180)).all() else (0, 0)
            assert np.abs(cut[place[1], place[0], :2] - expected).max() <= max(2.0, scale / 100), (angle, place)


def test_straightened_line_is_at_most_as_large_as_a_page() -> None:
    image = np.zeros((2400, 3000, 3), np.uint8)
    image[:1200, :1500] = 200
    for corners in ([[0, 0], [3000, 0], [3000, 2400], [0, 2400]], [[0, 0], [9e6, 0], [9e6, 2400], [0, 2400]]):
        cut = Patch(image, corners=np.array(corners, np.float32)).cut(SPEC)

        height, width = cut.shape[:2]
        assert 3_900_000 < height * width <= 4_000_000
        assert cut[height // 4, 0].tolist() == [200] * 3
        assert cut[3 * height // 4, 0].tolist() == [0] * 3
