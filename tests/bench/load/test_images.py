"""The images that are sent."""

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from bench.load.images import (
    SAMPLE_FOLDER,
    Sample,
    coco_samples,
    given_samples,
    varied_samples,
)


def test_the_default_images_are_varied_and_known() -> None:
    samples = given_samples(None)
    names = [sample.name for sample in samples]

    assert len(samples) == 24
    assert any("320x" in name for name in names)
    assert "coffee 4000x3000" in names
    assert all(sample.expected and sample.body.startswith(b"\xff\xd8") for sample in samples)
    assert given_samples(None) is samples
    assert varied_samples.__wrapped__() == samples


def test_given_images_are_sent_as_they_are(tmp_path: Path) -> None:
    (cat,) = given_samples(SAMPLE_FOLDER / "chelsea.jpg")

    assert cat == Sample("chelsea.jpg", (SAMPLE_FOLDER / "chelsea.jpg").read_bytes(), frozenset({"cat"}))
    assert [sample.name for sample in given_samples(SAMPLE_FOLDER)] == ["astronaut.jpg", "chelsea.jpg", "coffee.jpg"]
    with pytest.raises(ValueError, match="no image"):
        given_samples(tmp_path)


def test_coco_sized_images_are_not_larger_than_those_of_coco() -> None:
    for samples in (coco_samples(), coco_samples(SAMPLE_FOLDER)):
        assert samples
        for sample in samples:
            assert sample.expected
            with Image.open(BytesIO(sample.body)) as image:
                assert max(image.size) <= 640
