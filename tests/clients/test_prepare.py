"""Images that the client makes smaller before it sends them: boxes are those of the original."""

from io import BytesIO
from typing import Any

import pytest
from PIL import ExifTags, Image, JpegImagePlugin

from nereid_client import AsyncClient, DetectResult, ImageSize, Prepare
from nereid_client.prepare import shrink
from tests.fakes import models

SIZE = (1600, 800)
PREPARE = Prepare(400, 90)
TURNS = {1: None, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 3: Image.Transpose.ROTATE_180}
"""How the pixels of an upright image are stored, by orientation."""


@pytest.fixture(autouse=True)
def own_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow as in a process without the gateway, which lets it skip the EXIF blocks of JPEG and reads them itself."""
    for marker in range(0xFFE0, 0xFFF0):
        monkeypatch.setitem(JpegImagePlugin.MARKER, marker, ("APP", "", JpegImagePlugin.APP))


def large_scene(image_format: str, orientation: int = 1) -> bytes:
    """Draw the two rectangles on 1600 x 800 pixels, stored in an orientation."""
    with Image.open(BytesIO(models.scene("PNG"))) as small:
        scene = small.resize(SIZE, Image.Resampling.NEAREST)
    if (turn := TURNS[orientation]) is not None:
        scene = scene.transpose(turn)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation], exif[ExifTags.Base.Artist] = orientation, "somebody"
    file = BytesIO()
    scene.save(file, image_format, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image_format", "orientation"), [("JPEG", 1), ("JPEG", 6), ("JPEG", 3), ("PNG", 6), ("WEBP", 6), ("TIFF", 7)]
)
async def test_boxes_are_those_of_the_upright_original(asynchronous: AsyncClient, image_format: str, orientation: int) -> None:
    image = large_scene(image_format, orientation)
    for boxes, model_pixel in (("pixel", 13), ("normalized", 0.01)):
        options: dict[str, Any] = {"model": "six_columns", "boxes": boxes}
        expected = await asynchronous.detect(image, **options)
        (batched,) = await asynchronous.detect_batch([image], prepare=PREPARE, **options)
        for found in (await asynchronous.detect(image, prepare=PREPARE, **options), batched):
            assert isinstance(found, DetectResult)
            assert found.image == expected.image == ImageSize(*SIZE)
            for one, other in zip(found.detections, expected.detections, strict=True):
                assert one.class_name == other.class_name
                corners = (other.x1, other.y1, other.x2, other.y2)
                assert (one.x1, one.y1, one.x2, one.y2) == pytest.approx(corners, abs=model_pixel)


def test_copy_is_smaller_and_has_no_metadata_but_its_orientation() -> None:
    """Other files are sent as they are: the gateway says what is wrong with them."""
    image = large_scene("JPEG", 3)
    shrunk = shrink(image, PREPARE)

    assert shrunk
    assert len(shrunk.data) < len(image) / 4
    with Image.open(BytesIO(shrunk.data)) as copy:
        assert copy.size == (400, 200)
        assert dict(copy.getexif()) == {ExifTags.Base.Orientation: 3}
    for other in (models.scene("PNG"), b"no image", image[:2000]):
        assert shrink(other, PREPARE) is None
