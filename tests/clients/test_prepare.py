"""Images that the client makes smaller before it sends them: boxes are those of the original."""

from io import BytesIO

import pytest
from PIL import ExifTags, Image, JpegImagePlugin

from nereid_client import AsyncClient, DetectResult, ImageSize, Prepare
from nereid_client.prepare import shrink
from tests.fakes import models

SIZE = (1600, 800)
PREPARE = Prepare(400, 90)
TURNS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
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
    exif[ExifTags.Base.Orientation] = orientation
    file = BytesIO()
    scene.save(file, image_format, exif=exif)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image_format", "orientation"), [*(("JPEG", turn) for turn in TURNS), ("PNG", 6), ("WEBP", 8), ("TIFF", 5)]
)
async def test_boxes_are_those_of_the_upright_original(asynchronous: AsyncClient, image_format: str, orientation: int) -> None:
    image = large_scene(image_format, orientation)
    expected = await asynchronous.detect(image, model="six_columns", boxes="pixel")
    alone = await asynchronous.detect(image, prepare=PREPARE, model="six_columns", boxes="pixel")
    (batched,) = await asynchronous.detect_batch([image], prepare=PREPARE, model="six_columns", boxes="pixel")

    assert expected.image == ImageSize(*SIZE)
    for found in (alone, batched):
        assert isinstance(found, DetectResult)
        assert found.image == expected.image
        for one, other in zip(found.detections, expected.detections, strict=True):
            assert one.class_name == other.class_name
            assert (one.x1, one.y1, one.x2, one.y2) == pytest.approx(
                (other.x1, other.y1, other.x2, other.y2), abs=13
            )  # a model's pixel


async def test_fractions_stay_fractions(asynchronous: AsyncClient) -> None:
    image = large_scene("JPEG", 6)
    expected = await asynchronous.detect(image, model="six_columns")
    found = await asynchronous.detect(image, prepare=PREPARE, model="six_columns")

    assert found.image == ImageSize(*SIZE)
    assert [one.x1 for one in found.detections] == pytest.approx([one.x1 for one in expected.detections], abs=0.01)


def test_a_copy_is_smaller_and_has_no_metadata_but_its_orientation() -> None:
    with Image.open(BytesIO(large_scene("JPEG"))) as image:
        exif = image.getexif()
        exif[ExifTags.Base.Artist] = "somebody"
        exif[ExifTags.Base.Orientation] = 3
        file = BytesIO()
        image.save(file, "JPEG", exif=exif)
    shrunk = shrink(file.getvalue(), PREPARE)

    assert shrunk
    assert len(shrunk.data) < len(file.getvalue()) / 4
    with Image.open(BytesIO(shrunk.data)) as copy:
        assert copy.size == (400, 200)
        assert dict(copy.getexif()) == {ExifTags.Base.Orientation: 3}


@pytest.mark.parametrize(
    "image", [models.scene("PNG"), b"no image", large_scene("JPEG")[:2000]], ids=["small", "none", "truncated"]
)
def test_other_files_are_sent_as_they_are(image: bytes) -> None:
    """The gateway says what is wrong with them."""
    assert shrink(image, PREPARE) is None
