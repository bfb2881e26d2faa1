"""What classifiers, and models of masks, oriented boxes, poses and faces, have found."""

import math
from typing import Any, get_args

import cv2
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pycocotools import mask as coco

from app.classification.outputs import decode_outputs, rank
from app.detection.nms import Candidates
from app.errors import DeadlinePassed, InvalidModelOutput
from app.imaging.transform import ImageTransform
from app.model.heads import ClassificationHead
from app.model.spec import ModelSpec
from app.obb.boxes import enclose, suppress, to_corners, to_rotations
from app.pose.faces import rate_faces
from app.pose.keypoints import read_keypoints
from app.resilience.deadline import Deadline
from app.segmentation.mask import Mask, MaskFormat
from app.segmentation.masks import make_masks
from tests.model.configs import spec_of, table

LOGITS = spec_of(table(3), image=table(32, 32, 3, data_type="TYPE_UINT8"))
PROBABILITIES = msgspec.structs.replace(LOGITS, head=ClassificationHead(classes=3, scores="probabilities"))
UNCOUNTED = msgspec.structs.replace(LOGITS, head=ClassificationHead(classes=-1, scores="logits"))
HALF = msgspec.structs.replace(LOGITS, output_dtypes=(np.dtype("f2"),))


@pytest.mark.parametrize(
    ("spec", "scores", "expected"),
    [
        (LOGITS, [0, math.log(2), math.log(5)], [1 / 8, 2 / 8, 5 / 8]),
        (HALF, [-6e4, 6e4, 6e4], [0, 0.5, 0.5]),  # the softmax depends on differences only
        (PROBABILITIES, [0.5, 0.75, 1.015], [0.5, 0.75, 1]),  # they need not add up to one; rounding above one is cut
        (UNCOUNTED, [1.0] * 5, [0.2] * 5),
    ],
)
def test_scores_become_probabilities(spec: ModelSpec, scores: list[float], expected: list[float]) -> None:
    tensor = np.array([scores], spec.output_dtypes[0])

    assert decode_outputs(spec, {"o": tensor}).tolist() == pytest.approx(expected)
    alone = msgspec.structs.replace(spec, has_batch_dimension=False)
    assert decode_outputs(alone, {"o": tensor[0]}).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spec", "tensor", "message"),
    [
        (LOGITS, np.zeros((1, 3, 1), np.float32), "of shape (3, 1), expected (3,)"),
        (LOGITS, np.zeros((2, 3), np.float32), "of shape (2, 3) for one image"),
        (LOGITS, np.zeros((), np.float32), "of shape () for one image"),
        (LOGITS, np.zeros((1, 3), np.float16), "as float16, expected float32"),
        (UNCOUNTED, np.zeros((1, 0), np.float32), "no scores"),
        (LOGITS, np.array([[0, np.inf, 0]], np.float32), "not finite"),
        (PROBABILITIES, np.array([[0, np.nan, 0]], np.float32), "not finite"),
        (PROBABILITIES, np.array([[0, 0, -0.1]], np.float32), "outside 0 to 1"),
        (PROBABILITIES, np.array([[0, 0, 7.5]], np.float32), "outside 0 to 1, though its config says `scores: probabilities`"),
    ],
)
def test_invalid_scores_are_rejected(spec: ModelSpec, tensor: NDArray[Any], message: str) -> None:
    with pytest.raises(InvalidModelOutput) as caught:
        decode_outputs(spec, {"o": tensor})
    assert message in caught.value.detail


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50), st.integers(1, 60), st.floats(0, 1))
def test_order_of_classes_is_that_of_sorting_all(scores: list[float], top_k: int, confidence: float) -> None:
    ranked = sorted((-score, index) for index, score in enumerate(scores) if score >= np.float32(confidence))

    class_ids, best = rank(np.array(scores, np.float32), top_k=top_k, confidence=confidence)

    assert class_ids.tolist() == [index for _, index in ranked[:top_k]]
    assert best.tolist() == [-score for score, _ in ranked[:top_k]]


def turned(*boxes: tuple[float, ...]) -> Candidates:
    """Make candidates of centre x, centre y, width, height, angle, and class, by descending score."""
    table = np.array(boxes, np.float32)
    half = table[:, 2:4] / 2
    corners = np.concatenate([table[:, :2] - half, table[:, :2] + half], axis=1)
    scores = np.linspace(0.9, 0.5, len(boxes), dtype=np.float32)
    return Candidates(corners, scores, table[:, 5].astype(np.int32), table[:, 4:5])


LEVEL, UPRIGHT = [[30, 40], [70, 40], [70, 60], [30, 60]], [[60, 30], [60, 70], [40, 70], [40, 30]]


@pytest.mark.parametrize(
    ("size_and_angle", "corners", "rotation"),
    [
        ((40, 20, 0), LEVEL, 0),
        ((20, 40, 0), UPRIGHT, np.pi / 2),
        ((40, 20, np.pi), LEVEL, 0),
        ((40, 20, -np.pi / 2), UPRIGHT, np.pi / 2),
    ],
)
def test_corners_of_an_oriented_box_run_clockwise_from_a_long_edge(
    size_and_angle: tuple[float, ...], corners: list[list[float]], rotation: float
) -> None:
    """Clockwise on the screen, where y points down."""
    found = to_corners(turned((50, 50, *size_and_angle, 0)))

    np.testing.assert_allclose(found, [corners], atol=1e-4)
    difference = abs(float(to_rotations(found)[0]) - rotation)
    assert min(difference, np.pi - difference) < 1e-6
    np.testing.assert_allclose(enclose(found)[0], [*np.min(corners, axis=0), *np.max(corners, axis=0)], atol=1e-4)


def test_oriented_boxes_fall_to_better_ones_of_their_class_even_if_these_fall_too() -> None:
    row = [(50 + 14 * index, 50.0, 40.0, 20.0, 0.0, 0.0) for index in range(3)]
    assert suppress(turned(*row), np.zeros(3, np.int32), 0.5).tolist() == [0]
    assert suppress(turned(row[0], row[2]), np.zeros(2, np.int32), 0.5).tolist() == [0, 1]

    cross = turned((50, 50, 60, 6, np.pi / 4, 0), (50, 50, 60, 6, -np.pi / 4, 0))  # their upright boxes are the same
    assert suppress(cross, cross.class_ids, 0.5).tolist() == [0, 1]
    same = turned((50, 50, 40, 20, 0.3, 0), (50, 50, 40, 20, 0.3, 1))
    assert [suppress(same, ids, 0.5).tolist() for ids in (same.class_ids, None)] == [[0, 1], [0]]
    with np.errstate(over="ignore", invalid="ignore"):
        odd = turned((5, 5, 0, 0, 0, 0), (5, 5, 0, 0, 0, 0), (0, 0, 3e38, 3e38, 1, 0), (9, 9, -4, 2, 0, 0))
        assert 0 in suppress(odd, odd.class_ids, 0.5)


def test_keypoints_are_mapped_to_the_image_and_clipped() -> None:
    """A picture of 200 x 100 lies in the middle of an input of 64 x 64; the second point is in the padding above it."""
    wide = ImageTransform(0, 16, 64, 32, 200, 100)
    features = np.array([[32, 32, 0.5, 16, 2, 1.0004], [64, 48, 0, 70, 70, 0.25]], np.float32)

    assert read_keypoints(features, 2, wide).tolist() == [[[100, 50, 0.5], [50, 0, 1]], [[200, 100, 0], [200, 100, 0.25]]]
    assert read_keypoints(np.array([[32, 32, 16, 2]], np.float32), 2, wide).tolist() == [[[100, 50], [50, 0]]]


@pytest.mark.parametrize(
    ("eyes", "nose", "quality"),
    [
        pytest.param(106, 0.5, 0.8, id="large, frontal"),
        pytest.param(26.5, 0.5, 0.4, id="half of the detail"),
        pytest.param(106, 0.25, 0.4, id="turned"),
        pytest.param(106, 1.3, 0.0, id="profile"),
        pytest.param(0, 0.5, 0.0, id="both eyes in one place"),
    ],
)
def test_quality_of_a_face_falls_with_detail_and_turn(eyes: float, nose: float, quality: float) -> None:
    """The nose is at a fraction between the eyes. A tilted head is as good."""
    points = np.array([[[10, 20], [10 + eyes, 20], [10 + nose * eyes, 30], [10, 50], [10 + eyes, 50]]], np.float32)
    scores = np.array([0.8], np.float32)
    for seen in (points, points @ np.array([[0.8, 0.6], [-0.6, 0.8]], np.float32)):
        assert rate_faces(seen, scores) == pytest.approx([quality], abs=1e-5)


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
