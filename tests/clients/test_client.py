"""The Python client: typed results of every task, batches, many images, smaller copies and errors, with both classes."""

import asyncio
from io import BytesIO
from json import loads
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import ExifTags, Image, JpegImagePlugin

from app.api.answering import schema
from nereid_client import (
    AsyncClient,
    Client,
    Detection,
    DetectResult,
    ImageSize,
    InvalidKey,
    Keypoint,
    Prepare,
    Problem,
    Rle,
    UnexpectedResponse,
    Unreachable,
    pictures_in,
)
from nereid_client.command import main
from nereid_client.prepare import shrink
from tests.clients.conftest import TINY, detected
from tests.fakes import models
from tests.fakes.other_tasks import LABELS
from tests.imaging.samples import encode
from tests.reference_detector import SCORE, Box, MatchCounts
from tests.support import SCENE, SHARED, json

MODEL = "six_columns"
SCENES = [models.scene("BMP", shift=shift) for shift in (-16, 0, 16)]
BROKEN = b"this is not an image"
ADDRESS = "https://images.example.org/cat.jpg"


async def test_result_is_that_of_the_gateway(
    synchronous: Client, asynchronous: AsyncClient, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    (path := tmp_path / "scene.bmp").write_bytes(SCENE)
    raw = json(await client.post("/detect", params={"model": MODEL, "boxes": "pixel"}, content=SCENE))
    one = await asynchronous.detect(path, draw=True, model=MODEL, boxes="pixel")
    other = await asyncio.to_thread(synchronous.detect, SCENE, model=MODEL, classes=["blue"])
    class_of = await asynchronous.classify(SCENE, model="planes_to_logits", top_k=2)
    classes = await asyncio.to_thread(synchronous.classify, SCENE, model="planes_to_logits")

    for found in (one, other):
        assert (found.image, found.model.name, len(found.request_id)) == (ImageSize(200, 100), MODEL, 16)
        assert {"read", "decode", "infer", "post", "total"} <= set(found.timings)
    fields = ("class_name", "x1", "y1", "x2", "y2", "confidence")
    assert [[getattr(found, name) for name in fields] for found in one.detections] == [
        [found[name] for name in fields] for found in raw["detections"]
    ]
    assert one.visualization
    assert one.visualization.startswith(b"\xff\xd8\xff")  # JPEG
    assert [found.class_name for found in other.detections] == ["blue"]
    assert class_of.classifications == classes.classifications[:2]
    assert {found.class_name for found in classes.classifications} == set(LABELS)


async def test_batch_keeps_its_order(synchronous: Client, asynchronous: AsyncClient) -> None:
    images = [*SCENES, BROKEN, *[SCENES[0]] * 62]
    one = await asynchronous.detect_batch(images, model=MODEL, boxes="pixel", timeout_ms=20000)
    other = await asyncio.to_thread(synchronous.detect_batch, images[:4], model=MODEL, boxes="pixel")
    alone = [(await asynchronous.detect(image, model=MODEL, boxes="pixel")).detections for image in SCENES]

    for results in (one, other):
        assert [found.detections for found in results[:3] if isinstance(found, DetectResult)] == alone
        assert isinstance(failed := results[3], Problem)
        assert (failed.status, failed.code) == (415, "unsupported_format")
    assert len(one) == 66
    assert all(isinstance(found, DetectResult) and found.detections == alone[0] for found in one[4:])


async def test_pictures_of_a_folder_are_sent_several_at_a_time(
    synchronous: Client, asynchronous: AsyncClient, tmp_path: Path
) -> None:
    (tmp_path / "deeper").mkdir()
    for name, content in (("deeper/0.BMP", SCENES[0]), ("1.bmp", SCENES[1]), ("broken.png", BROKEN), ("readme.txt", b"no picture")):
        (tmp_path / name).write_bytes(content)
    paths = [*pictures_in(tmp_path), gone := tmp_path / "gone.png"]
    one = {path: found async for path, found in asynchronous.detect_each(paths, in_flight=3, model=MODEL)}
    other = await asyncio.to_thread(lambda: dict(synchronous.detect_each(paths, in_flight=3, model=MODEL)))

    assert [*other] == paths
    for results in (one, other):
        assert isinstance(results.pop(gone), FileNotFoundError)
        assert isinstance(failed := results.pop(tmp_path / "broken.png"), Problem)
        assert failed.code == "unsupported_format"
        assert {path.name for path, found in results.items() if isinstance(found, DetectResult)} == {"0.BMP", "1.bmp"}


async def test_errors_carry_what_the_gateway_says(synchronous: Client, asynchronous: AsyncClient) -> None:
    with pytest.raises(Problem) as caught:
        await asynchronous.detect(SCENE, model="nothing")
    assert (caught.value.status, caught.value.code) == (404, "unknown_model")
    assert caught.value.request_id
    assert str(caught.value) == f"404 unknown_model: {caught.value.detail} (request {caught.value.request_id})"
    with pytest.raises(Problem, match="400 invalid_parameter: confidence"):
        await asyncio.to_thread(synchronous.detect, SCENE, confidence=2)
    with pytest.raises(Problem, match="url_input_disabled"):
        await asynchronous.detect(ADDRESS)
    (failed,) = await asynchronous.detect_batch([ADDRESS])
    assert isinstance(failed, Problem)
    assert failed.code == "url_input_disabled"


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (httpx.Response(502, html="<h1>Bad Gateway</h1>", headers={"X-Request-ID": "7"}), Problem, r"^502: .* \(request 7\)$"),
        (httpx.Response(200, html="<h1>Welcome</h1>"), UnexpectedResponse, "^http://gateway/ does not respond as"),
        (httpx.Response(200, json={"detections": []}), UnexpectedResponse, "missing required field"),
        (detected(("red", -1, 0.9, (0, 0, 1, 1))), UnexpectedResponse, "Expected `int`"),
        (httpx.ReadTimeout("timed out"), Unreachable, "^http://gateway/ does not respond: timed out$"),
    ],
)
def test_answer_of_another_server_is_an_error_without_the_password(
    response: httpx.Response | Exception, error: type[Exception], message: str
) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    url = "http://user:secret@gateway"
    with Client(url, transport=httpx.MockTransport(answer)) as client, pytest.raises(error, match=message):
        client.detect(SCENE)


def test_key_is_sent_with_each_request_or_refused_without_being_told() -> None:
    seen: list[httpx.Headers] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers)
        return detected()

    with Client(key="camera.secret", headers={"X-Request-ID": "mine"}, transport=httpx.MockTransport(answer)) as client:
        client.detect(SCENE)
    for ending in ("\n", " ", "é"):
        with pytest.raises(InvalidKey, match="the API key has characters that no key has") as raised:
            Client(key=f"camera.secret{ending}")
        assert "secret" not in str(raised.value)

    assert (seen[0]["authorization"], seen[0]["x-request-id"]) == ("Bearer camera.secret", "mine")


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
        return httpx.Response(200, json={**body, "model": TINY, "total_time_ms": 1.5, "request_id": "0"})


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
    image = encode(Image.new("RGB", (400, 200)), "PNG")
    gateway = Gateway(mask=[SQUARE], keypoints=[NOSE], rotation=0.0, corners=CORNERS)
    async with AsyncClient(transport=gateway) as client:
        (detection,) = (await client.detect(image, boxes="pixel", prepare=Prepare(200, 85))).detections
        with pytest.raises(ValueError, match="polygons"):
            await client.detect(image, masks="rle", prepare=Prepare(200, 85))

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
    data = loads((tmp_path / "found.json").read_bytes())

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
    return encode(scene, image_format, exif=exif)


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


def photo(picture: bytes) -> bytes:
    """Enlarge a picture as phones take them."""
    with Image.open(BytesIO(picture)) as small:
        scale = 4000 / max(small.size)
        large = small.convert("RGB").resize((round(small.width * scale), round(small.height * scale)), Image.Resampling.BICUBIC)
    large.save(file := BytesIO(), "JPEG", quality=92)
    return file.getvalue()


@pytest.mark.system
@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(("prepare", "least"), [(Prepare(1280, 85), 0.9), (Prepare(640, 85), 0.77)], ids=str)
async def test_prepared_pictures_keep_their_boxes(asynchronous: AsyncClient, prepare: Prepare, least: float) -> None:
    """Matched by class at confidence 0.25, over all pictures together; the F1 at IoU 0.9 counts, that at 0.5 is told as well."""

    async def boxes(image: bytes, prepare: Prepare | None) -> list[Box]:
        found = await asynchronous.detect(image, prepare=prepare, model="yolo11n", confidence=SCORE, boxes="pixel")
        return [Box(one.class_id, one.confidence, (one.x1, one.y1, one.x2, one.y2)) for one in found.detections]

    photos = [photo(path.read_bytes()) for path in sorted((SHARED / "images").glob("*.jpg"))]
    if not photos:
        pytest.skip("there are no images in ../shared/images")
    tally, loose = MatchCounts(0.9), MatchCounts(0.5)
    for image in photos:
        whole, small = await boxes(image, None), await boxes(image, prepare)
        for counts in (tally, loose):
            counts.add(whole, small)
    print(f"prepared {prepare}: {tally}; at IoU 0.5 F1 {loose.f1:.4f}")  # noqa: T201

    assert tally.expected >= len(photos) / 2
    assert tally.f1 >= least
