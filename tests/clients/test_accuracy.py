"""What smaller copies cost: the boxes of prepared pictures against those of the pictures themselves."""

from io import BytesIO

import pytest
from PIL import Image

from nereid_client import AsyncClient, Detection, Prepare
from tests.reference_detector import SCORE, Box, MatchCounts, matches
from tests.support import SHARED

pytestmark = [pytest.mark.system, pytest.mark.usefixtures("networks")]
PHOTO_SIDE = 4000
"""Longest side to which pictures are enlarged, as phones take them."""


def photo(picture: bytes) -> bytes:
    with Image.open(BytesIO(picture)) as small:
        scale = PHOTO_SIDE / max(small.size)
        size = round(small.width * scale), round(small.height * scale)
        large = small.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    file = BytesIO()
    large.save(file, "JPEG", quality=92)
    return file.getvalue()


def boxes(detections: list[Detection]) -> list[Box]:
    return [Box(found.class_id, found.confidence, (found.x1, found.y1, found.x2, found.y2)) for found in detections]


LEFT, RIGHT = (0.0, 0.0, 10.0, 10.0), (5.0, 0.0, 15.0, 10.0)
BOX = Box(1, 0.9, LEFT)


@pytest.mark.parametrize(
    ("found", "count"),
    [([BOX, Box(1, 0.8, LEFT)], 1), ([Box(2, 0.9, LEFT)], 0), ([Box(1, 0.9, RIGHT)], 0)],
)
def test_box_matches_at_most_one_of_its_class_and_place(found: list[Box], count: int) -> None:
    assert matches([BOX], found, 0.9) == matches(found, [BOX], 0.9) == count


@pytest.mark.parametrize(("prepare", "least"), [(Prepare(1280, 85), 0.9), (Prepare(640, 85), 0.77)], ids=str)
async def test_prepared_pictures_keep_their_boxes(asynchronous: AsyncClient, prepare: Prepare, least: float) -> None:
    """Matched by class at confidence 0.25, over all pictures together; the F1 at IoU 0.9 counts, that at 0.5 is told as well."""
    photos = [photo(path.read_bytes()) for path in sorted((SHARED / "images").glob("*.jpg"))]
    if not photos:
        pytest.skip("there are no images in ../shared/images")
    tally, loose = MatchCounts(0.9), MatchCounts(0.5)
    for image in photos:
        whole = await asynchronous.detect(image, model="yolo11n", confidence=SCORE, boxes="pixel")
        small = await asynchronous.detect(image, prepare=prepare, model="yolo11n", confidence=SCORE, boxes="pixel")
        for counts in (tally, loose):
            counts.add(boxes(whole.detections), boxes(small.detections))
    print(f"prepared {prepare}: {tally}; at IoU 0.5 F1 {loose.f1:.4f}")  # noqa: T201

    assert tally.expected >= len(photos) / 2
    assert tally.f1 >= least
