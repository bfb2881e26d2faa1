"""What differs from the values of the golden picture, and what does not: FP16 and INT8 may round, a sick GPU may not."""

from hashlib import sha256

import numpy as np

from app.model.golden import Golden, picture

SIGN, BALL = (232.0, 82.0, 420.0, 269.0, 0.97, 11), (420.0, 420.0, 582.0, 583.0, 0.24, 49)
DOOR, GATE = (10.0, 20.0, 60.0, 100.0, 0.8, 0), (300.0, 300.0, 400.0, 360.0, 0.5, 1)
SIZES = tuple(np.random.default_rng(1).uniform(4, 90, 128).tolist())
ROWS = (210.0, 180.0, 300.0, 310.0, 1.0)
EXPECTED = Golden(SIZES, (SIGN, BALL))
NOTHING = Golden(SIZES)


def shifted(pixels: float, score: float = 0.0, scale: float = 1.0) -> Golden:
    boxes = [(*(scale * side + pixels for side in box[:4]), box[4] + score, box[5]) for box in EXPECTED.boxes]
    return Golden(tuple(scale * value for value in SIZES), tuple(boxes))  # type: ignore[arg-type]


def noisy(share: float) -> Golden:
    return Golden(tuple(np.array(SIZES) * np.random.default_rng(2).uniform(1 - share, 1 + share, 128)), EXPECTED.boxes)


def test_answer_of_another_precision_is_right() -> None:
    for answer in (
        EXPECTED,
        shifted(6),  # in INT8
        shifted(0, -0.14),
        noisy(0.3),  # in INT8
        Golden(SIZES, (SIGN,)),  # the other one was unsure
        Golden(SIZES, (*EXPECTED.boxes, (10.0, 10.0, 50.0, 50.0, 0.4, 2))),
        Golden((), EXPECTED.boxes),
    ):
        assert EXPECTED.difference(answer) == ""


def test_answer_of_a_sick_triton_is_wrong() -> None:
    for expected, answer, reason in (
        (EXPECTED, Golden((0.0,) * 128), "other raw values"),
        (EXPECTED, Golden(SIZES, ((*SIGN[:4], 0.6, 11),)), "missing boxes"),
        (EXPECTED, Golden(SIZES, ((*SIGN[:5], 12),)), "missing boxes"),
        (EXPECTED, Golden((float("nan"),) * 128, EXPECTED.boxes), "other raw values"),
        (Golden(SIZES, (SIGN, DOOR)), Golden(SIZES, (SIGN,)), "missing boxes"),
        (NOTHING, shifted(0, scale=1.5), "other raw values"),
        (NOTHING, Golden(SIZES, (DOOR, GATE)), "unexpected boxes"),
        (Golden(ROWS), Golden((0.0,) * 5), "other raw values"),
        (Golden((0.0,) * 63 + (0.9,)), Golden((0.0,) * 64), "other raw values"),
    ):
        assert expected.difference(answer) == reason


def test_noise_and_padded_rows_are_no_measure_and_the_last_values_alone_may_be_known() -> None:
    """One more object changes the mean of padded rows. Of a head whose anchors may differ, only the mean is known."""
    assert Golden((2.0, 2.0, 4.0, 4.0, 0.01)).difference(Golden((0.0,) * 5)) == ""
    assert Golden((1e-4,) * 64).difference(Golden((0.0,) * 64)) == ""
    last = Golden(SIZES[-2:])
    assert (last.difference(NOTHING), last.difference(Golden((0.0,) * 128))) == ("", "other raw values")
    assert last.keep(EXPECTED) == Golden(SIZES[-2:], EXPECTED.boxes)


def test_picture_never_changes() -> None:
    """Descriptions of models have what they find in it."""
    sums = {size: sha256(picture(*size).tobytes()).hexdigest()[:8] for size in ((640, 640), (320, 48), (224, 224))}

    assert sums == {(640, 640): "ec00a8ed", (320, 48): "c6c196d6", (224, 224): "3004ad95"}
    assert picture(320, 48).shape == (48, 320, 3)
