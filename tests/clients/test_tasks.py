"""Masks, keypoints and oriented boxes reach users of the client and files of its command; pictures are made smaller before."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import ExifTags, Image, JpegImagePlugin

from app.api.answering import schema
from nereid_client import AsyncClient, Detection, DetectResult, ImageSize, Keypoint, Prepare, Rle
from nereid_client.command import main
from nereid_client.prepare import shrink
from tests.clients.conftest import MODEL
from tests.fakes import models

SQUARE, OTHER = [20.0, 30.0, 80.0, 30.0, 80.0, 90.0, 20.0, 90.0], [0.0, 0.0, 8.0, 0.0, 8.0, 6.0]
CORNERS = [(20.0, 30.0), (80.0, 30.0), (80.0, 90.0), (20.0, 90.0)]
NOSE, TAIL = schema.Keypoint(30.0, 40.0, 0.9, "nose"), schema.Keypoint(70.0, 80.0, 0.2, "tail")

SIZE = (1600, 800)
PREPARE = Prepare(400, 90)
TURNS = {1: None, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 3: Image.Transpose.ROTATE_180}
"""How the pixels of an upright image are stored, by orientation."""


class Gateway(httpx.MockTransport):
    """Answers every request with one object in a square box."""

    def __init__(self, **shape: Any) -> None:  # noqa: ANN401
        self.asked: list[str] = []
        box: dict[str, Any] = {"x1": 20.0, "y1": 30.0, "x2": 80.0, "y2": 90.0}
        found = schema.Detection(**box, confidence=0.9, class_=1, class_id=1, class_name="red", **shape)
        self.objects = {"detections": [msgspec.to_builtins(found)], "image": {"width": 200, "height": 100}}
        super().__init__(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(str(request.url.raw_path, "ascii"))
        several = {"results": [{"image_index": 0, **self.objects}], "failures": None}
        body = several if request.url.path.endswith("/batch") else self.objects
        return httpx.Response(200, json={**body, "model": MODEL, "total_time_ms": 1.5, "request_id": "0"})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"mask": [SQUARE]}, {"mask": [SQUARE]}),
        ({"mask": schema.Rle((100, 200), "abc")}, {"mask": Rle((100, 200), "abc")}),
        ({"mask": b"PNG", "mask_offset": (20, 30)}, {"mask": b"PNG", "mask_offset": (20, 30)}),
        (
            {"keypoints": [NOSE, schema.Keypoint(1.0, 2.0, msgspec.UNSET, "tail")]},
            {"keypoints": [Keypoint(30.0, 40.0, "nose", 0.9), Keypoint(1.0, 2.0, "tail")]},
        ),
        ({"rotation": 0.0, "corners": CORNERS}, {"rotation": 0.0, "corners": CORNERS}),
    ],
)
async def test_shape_is_read_and_the_task_is_the_route(shape: dict[str, Any], expected: dict[str, Any]) -> None:
    gateway = Gateway(**shape)
    async with AsyncClient(transport=gateway) as client:
        one = await client.detect(b"picture", task="segment", masks="none")
        (other,) = await client.detect_batch([b"picture"], task="obb")

    assert not isinstance(other, Exception)
    assert one.detections == other.detections == [Detection(20.0, 30.0, 80.0, 90.0, 0.9, 1, "red", **expected)]
    assert gateway.asked == ["/segment?masks=none&format=json", "/obb/batch"]


async def test_shapes_of_a_prepared_picture_are_those_of_the_original() -> None:
    """The one that was sent is half as large."""
    Image.new("RGB", (400, 200)).save(file := BytesIO(), "PNG")
    gateway = Gateway(mask=[SQUARE], keypoints=[NOSE], rotation=0.0, corners=CORNERS)
    async with AsyncClient(transport=gateway) as client:
        (detection,) = (await client.detect(file.getvalue(), boxes="pixel", prepare=Prepare(200, 85))).detections
        with pytest.raises(ValueError, match="polygons"):
            await client.detect(file.getvalue(), masks="rle", prepare=Prepare(200, 85))

    assert (detection.x1, detection.y2, detection.rotation) == (40.0, 180.0, 0.0)
    assert detection.mask == [[2 * number for number in SQUARE]]
    assert detection.keypoints == [Keypoint(60.0, 80.0, "nose", 0.9)]
    assert detection.corners == [(2 * x, 2 * y) for x, y in CORNERS]


@pytest.mark.parametrize(
    ("task", "shape", "coco", "yolo"),
    [
        ("segment", {"mask": [SQUARE, OTHER]}, {"segmentation": [SQUARE, OTHER], "area": 3624.0}, [*SQUARE, *OTHER]),
        (
            "pose",
            {"keypoints": [NOSE, TAIL]},
            {"keypoints": [30.0, 40.0, 2, 70.0, 80.0, 1], "num_keypoints": 2, "area": 3600.0},
            [50, 60, 60, 60, 30, 40, 0.9, 70, 80, 0.2],
        ),
        ("obb", {"rotation": 0.0, "corners": CORNERS}, {"segmentation": [SQUARE], "area": 3600.0}, SQUARE),
    ],
)
def test_command_writes_the_shapes_to_coco_and_yolo(  # noqa: PLR0913, PLR0917 - the cases
    task: str, shape: dict[str, Any], coco: dict[str, Any], yolo: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    gateway = Gateway(**shape)
    monkeypatch.setattr("nereid_client.command.AsyncClient", lambda *_, **__: AsyncClient(transport=gateway))
    for out in ("found.json", "labels"):
        assert main(["detect", str(tmp_path / "a.jpg"), "--task", task, "--out", str(tmp_path / out)]) == 0
    data = json.loads((tmp_path / "found.json").read_bytes())

    assert {path.partition("?")[0] for path in gateway.asked} == {f"/{task}"}
    assert coco.items() <= data["annotations"][0].items()
    assert data["categories"] == [{"id": 1, "name": "red", **({"keypoints": ["nose", "tail"]} if task == "pose" else {})}]
    assert [float(number) for number in (tmp_path / "labels" / "a.txt").read_text().split()] == [1, *yolo]


@pytest.fixture
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


@pytest.mark.usefixtures("own_pillow")
@pytest.mark.parametrize(("image_format", "orientation"), [("JPEG", 1), ("JPEG", 6), ("PNG", 3), ("WEBP", 6), ("TIFF", 7)])
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


@pytest.mark.usefixtures("own_pillow")
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
