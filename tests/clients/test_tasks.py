"""Masks, keypoints and oriented boxes reach the users of the client and the files of its command."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from app.api.answering import schema
from nereid_client import AsyncClient, Detection, Keypoint, Prepare, Rle
from nereid_client.command import main
from tests.clients.responses import MODEL

SIZE = {"width": 200, "height": 100}
SQUARE = [20.0, 30.0, 80.0, 30.0, 80.0, 90.0, 20.0, 90.0]
CORNERS = [(20.0, 30.0), (80.0, 30.0), (80.0, 90.0), (20.0, 90.0)]
NOSE, TAIL = schema.Keypoint(30.0, 40.0, 0.9, "nose"), schema.Keypoint(70.0, 80.0, 0.2, "tail")


def found(**shape: Any) -> schema.Detection:  # noqa: ANN401
    """An object with a square box."""
    return schema.Detection(x1=20.0, y1=30.0, x2=80.0, y2=90.0, confidence=0.9, class_=1, class_id=1, class_name="red", **shape)


class Gateway(httpx.MockTransport):
    """Answers every request with one object."""

    def __init__(self, detection: schema.Detection) -> None:
        self.asked: list[httpx.Request] = []
        self.detection = detection
        super().__init__(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        objects = {"detections": [msgspec.to_builtins(self.detection)], "image": SIZE}
        several = {"results": [{"image_index": 0, **objects}], "failures": None}
        body = several if request.url.path.endswith("/batch") else objects
        return httpx.Response(200, json={**body, "model": MODEL, "total_time_ms": 1.5, "request_id": "0"})


@pytest.mark.parametrize(
    ("given", "expected"),
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
async def test_each_field_of_the_gateway_is_read(given: dict[str, Any], expected: dict[str, Any]) -> None:
    async with AsyncClient(transport=Gateway(found(**given))) as client:
        one = await client.detect(b"picture", task="segment")
        (other,) = await client.detect_batch([b"picture"], task="segment")

    detection = Detection(20.0, 30.0, 80.0, 90.0, 0.9, 1, "red", **expected)
    assert one.detections == [detection]
    assert not isinstance(other, Exception)
    assert other.detections == [detection]


async def test_the_task_is_the_route() -> None:
    gateway = Gateway(found())
    async with AsyncClient(transport=gateway) as client:
        await client.detect(b"picture", task="segment", masks="none")
        await client.detect_batch([b"picture"], task="obb")

    assert [str(request.url.raw_path, "ascii") for request in gateway.asked] == ["/segment?masks=none&format=json", "/obb/batch"]


async def test_polygons_and_points_of_a_prepared_picture_are_those_of_the_original() -> None:
    """The one that was sent is half as large."""
    file = BytesIO()
    Image.new("RGB", (400, 200)).save(file, "PNG")
    shapes = found(mask=[SQUARE], keypoints=[NOSE], rotation=0.0, corners=CORNERS)
    async with AsyncClient(transport=Gateway(shapes)) as client:
        (detection,) = (await client.detect(file.getvalue(), boxes="pixel", prepare=Prepare(200, 85))).detections
        with pytest.raises(ValueError, match="polygons"):
            await client.detect(file.getvalue(), masks="rle", prepare=Prepare(200, 85))

    assert (detection.x1, detection.y2) == (40.0, 180.0)
    assert detection.mask == [[2 * number for number in SQUARE]]
    assert detection.keypoints == [Keypoint(60.0, 80.0, "nose", 0.9)]
    assert detection.corners == [(2 * x, 2 * y) for x, y in CORNERS]
    assert detection.rotation == 0.0


@pytest.mark.parametrize(
    ("task", "shape", "files"),
    [
        (
            "segment",
            {"mask": [SQUARE, [0.0, 0.0, 8.0, 0.0, 8.0, 6.0]]},
            ({"segmentation": [SQUARE, [0.0, 0.0, 8.0, 0.0, 8.0, 6.0]], "area": 3624.0}, [*SQUARE, 0, 0, 8, 0, 8, 6]),
        ),
        (
            "pose",
            {"keypoints": [NOSE, TAIL]},
            (
                {"keypoints": [30.0, 40.0, 2, 70.0, 80.0, 1], "num_keypoints": 2, "area": 3600.0},
                [50, 60, 60, 60, 30, 40, 0.9, 70, 80, 0.2],
            ),
        ),
        ("obb", {"rotation": 0.0, "corners": CORNERS}, ({"segmentation": [SQUARE], "area": 3600.0}, SQUARE)),
    ],
)
def test_the_command_writes_the_shapes_to_coco_and_yolo(
    task: str, shape: dict[str, Any], files: tuple[dict[str, Any], list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    gateway = Gateway(found(**shape))
    monkeypatch.setattr("nereid_client.command.AsyncClient", lambda *_, **__: AsyncClient(transport=gateway))
    for out in ("found.json", "labels"):
        assert main(["detect", str(tmp_path / "a.jpg"), "--task", task, "--out", str(tmp_path / out)]) == 0
    data = json.loads((tmp_path / "found.json").read_bytes())
    written = [float(number) for number in (tmp_path / "labels" / "a.txt").read_text().split()]

    assert {request.url.path for request in gateway.asked} == {f"/{task}"}
    assert files[0].items() <= data["annotations"][0].items()
    assert data["categories"] == [{"id": 1, "name": "red", **({"keypoints": ["nose", "tail"]} if task == "pose" else {})}]
    assert written == [1, *files[1]]
