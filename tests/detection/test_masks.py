"""Masks from coefficients and prototypes."""

from typing import get_args

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from pycocotools import mask as coco

from app.detection.nms import Candidates
from app.errors import DeadlinePassed, InvalidModelOutput
from app.imaging.transform import ImageTransform
from app.resilience.deadline import Deadline
from app.segmentation.mask import Mask, MaskFormat
from app.segmentation.masks import make_masks

# pycocotools is older than numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")
SIZE = 64, 64
WHOLE = ImageTransform(0, 0, 64, 64, 64, 64)
# A picture of 200 x 100 in the middle of the input, with 16 rows of padding above and below.
WIDE = ImageTransform(0, 16, 64, 32, 200, 100)


def prototypes_of(*discs: tuple[int, int, int]) -> NDArray[np.float32]:
    """Draw discs (x, y, radius) of a quarter of the input's size, one prototype each: positive inside, with a hole if large."""
    planes = np.full((len(discs), 16, 16), -1, np.float32)
    for plane, (x, y, radius) in zip(planes, discs, strict=True):
        cv2.circle(plane, (x, y), radius, 1.0, -1)
        if radius > 3:
            cv2.circle(plane, (x, y), 1, -1.0, -1)
    return planes


def masks_of(
    boxes: list[list[float]],
    prototypes: NDArray[np.float32],
    transform: ImageTransform = WHOLE,
    mask_format: MaskFormat = "polygon",
    coefficients: NDArray[np.float32] | None = None,
) -> list[Mask]:
    count = len(boxes)
    features = np.eye(count, len(prototypes), dtype=np.float32) if coefficients is None else coefficients
    found = Candidates(np.array(boxes, np.float32), np.ones(count, np.float32), np.zeros(count, np.int32), features)
    return make_masks("m", found, prototypes, SIZE, transform, mask_format, Deadline.after(60))


def decoded(mask: Mask) -> NDArray[np.uint8]:
    assert isinstance(mask.encoded, dict)
    pixels: NDArray[np.uint8] = coco.decode(mask.encoded)
    return pixels


def plainly(prototype: NDArray[np.float32], box: list[float], transform: ImageTransform) -> NDArray[np.uint8]:
    """Make a mask at the size of the image, without looking only at the box."""
    whole = (cv2.resize(prototype, SIZE, interpolation=cv2.INTER_LINEAR) > 0).astype(np.uint8)
    y, x = np.indices(whole.shape)
    whole[~((x >= box[0]) & (x < box[2]) & (y >= box[1]) & (y < box[3]))] = 0
    drawn = whole[transform.top :, transform.left :][: transform.height, : transform.width].astype(np.float32)
    return (cv2.resize(drawn, (transform.image_width, transform.image_height)) > 0.5).astype(np.uint8)


@pytest.mark.parametrize("transform", [WHOLE, WIDE, ImageTransform(8, 0, 48, 64, 24, 32)], ids=["same", "larger", "smaller"])
@pytest.mark.parametrize("box", [[9.5, 20.25, 40.5, 47], [-20, -20, 90, 90]])
def test_mask_is_that_of_the_whole_input_cut_to_the_box(box: list[float], transform: ImageTransform) -> None:
    prototypes = prototypes_of((8, 8, 5))

    (mask,) = masks_of([box], prototypes, transform, "rle")

    expected = plainly(prototypes[0], box, transform)
    both, either = decoded(mask) & expected, decoded(mask) | expected
    assert both.sum() / either.sum() > (0.8 if transform.width > transform.image_width else 0.99)  # of halves, either side is right
    rle = coco.encode(np.asfortranarray(decoded(mask)))
    assert mask.encoded == {"size": rle["size"], "counts": rle["counts"].decode()}


def test_holes_are_kept_in_rle_and_filled_in_polygons() -> None:
    (mask,) = masks_of([[0, 0, 64, 64]], prototypes_of((8, 8, 5)), mask_format="rle")
    pixels = decoded(mask)
    filled = cv2.fillPoly(np.zeros((64, 64), np.uint8), [mask.parts[0].astype(np.int32)], 1)

    assert (pixels[33, 33], filled[33, 33]) == (0, 1)
    assert (filled >= pixels).all()
    assert 1 <= filled.sum() - pixels.sum() < 200


def test_polygons_are_inside_the_image() -> None:
    planes = np.maximum(*prototypes_of((3, 8, 2), (12, 8, 2)), dtype=np.float32)[None]
    (mask,) = masks_of([[0, 0, 64, 64]], np.maximum(planes, prototypes_of((8, 1, 2))), WIDE)

    assert [len(part) >= 3 for part in mask.parts] == [True, True]
    assert all(((part >= 0) & (part <= (200, 100))).all() for part in mask.parts)


def test_a_png_is_the_part_of_the_mask_in_the_box() -> None:
    prototypes, box = prototypes_of((8, 8, 5)), [10.0, 20.0, 50.0, 60.0]
    (png,), (rle,) = (masks_of([box], prototypes, WIDE, form) for form in ("png", "rle"))

    assert isinstance(png.encoded, bytes)
    pixels = np.asarray(cv2.imdecode(np.frombuffer(png.encoded, np.uint8), cv2.IMREAD_UNCHANGED))
    (x, y), (height, width) = png.offset, pixels.shape
    whole = np.zeros((100, 200), np.uint8)
    whole[y : y + height, x : x + width] = pixels
    np.testing.assert_array_equal(whole // 255, decoded(rle))
    assert (x, y) == (31, 12)


def test_object_may_have_no_mask() -> None:
    """Neither one without a pixel above zero, nor one in the padding."""
    for mask_format in get_args(MaskFormat):
        masks = masks_of([[0, 0, 64, 64], [0, 0, 64, 8]], np.full((2, 16, 16), -1, np.float32), WIDE, mask_format)
        assert [mask.parts for mask in masks] == [[], []]
        assert mask_format != "rle" or not any(decoded(mask).any() for mask in masks)


@pytest.mark.parametrize(
    ("prototypes", "message"),
    [
        *((np.full((1, 16, 16), value, np.float32), "masks that are not finite") for value in (np.nan, 3e38)),
        *((np.ones(shape, np.float32), "prototypes of shape") for shape in ((2, 16, 16), (1, 16), (1, 0, 16))),
    ],
)
def test_invalid_prototypes_are_rejected(prototypes: NDArray[np.float32], message: str) -> None:
    with pytest.raises(InvalidModelOutput, match=message):
        masks_of([[0, 0, 64, 64]], prototypes, coefficients=np.full((1, 1), 10, np.float32))


def test_masks_of_noise_or_after_the_deadline_are_an_error() -> None:
    """A chequered mask of 128 x 128 prototype pixels has 8,192 contours."""
    noise = np.where(np.indices((128, 128)).sum(axis=0) % 2, 1, -1).astype(np.float32)[None]
    boxes, ones = np.tile(np.array([[0, 0, 512, 512]], np.float32), (300, 1)), np.ones((300, 1), np.float32)
    found = Candidates(boxes, ones[:, 0], np.zeros(300, np.int32), ones)
    for seconds, error, message in ((60, InvalidModelOutput, "more than 100000 vertices"), (0, DeadlinePassed, None)):
        with pytest.raises(error, match=message):
            make_masks("m", found, noise, (512, 512), ImageTransform(0, 0, 512, 512, 512, 512), "rle", Deadline.after(seconds))
