"""The ML backend of Label Studio, asked as Label Studio asks, in front of the gateway's application."""

import asyncio
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from json import dumps
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.api.application import Application
from app.main import create_app
from app.settings.schema import Settings
from nereid_label_studio.program import create_app as create_backend
from nereid_label_studio.program import main
from nereid_label_studio.studio import Studio
from tests.api.conftest import settings_for, write_keys
from tests.api.test_tasks import IMAGE, TEXT, triton_for
from tests.clients.conftest import ThreadTransport
from tests.fakes.http import HOST, LOOPBACK, Host, redirect, response, serving_host
from tests.fakes.triton import serving
from tests.support import SCENE, calling, free_port, json, lifespan_of

ENCODED = b64encode(SCENE).decode()
CONFIG = """<View>
  <Image name="image" value="$image"/>
  <RectangleLabels name="label" toName="image" model_score_threshold="0.25"{others}>
    <Label value="red"/><Label value="Blue" background="#00f"/>
  </RectangleLabels>
</View>"""
PLAIN = CONFIG.format(others="")
CONTROLS = """<View><Image name="i" value="$image"/>
  <PolygonLabels name="outlines" toName="i"><Label value="Cat"/><Label value="Dog"/></PolygonLabels>
  <BrushLabels name="masks" toName="i"><Label value="Cat"/><Label value="Dog"/></BrushLabels></View>"""
POINTS = """<View><Image name="i" value="$image"/>
  <KeyPointLabels name="points" toName="i" model_point_threshold="0.3" model_score_threshold="0.85">
    <Label value="Snout" predicted_values="dog,cat" model_index="0"/><Label value="Tail"/>
    <Label value="Ear" model_index="7"/><Label value="Paw"/></KeyPointLabels>
  <RectangleLabels name="points_bbox" toName="i" model_skip="true"><Label value="dog"/></RectangleLabels></View>"""
TOKEN = "0123456789abcdef"  # noqa: S105 - of nobody


@asynccontextmanager
async def backend(app: Application, studio: str = "", token: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """Run the program in front of a gateway's application; yield its client."""
    inner = httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]
    transport = ThreadTransport(inner, asyncio.get_running_loop())
    with httpx.Client(base_url="http://nereid", transport=transport) as gateway:
        yield calling(create_backend(gateway, Studio(studio, token)))


@pytest.fixture(scope="module")
async def gateway(served: Settings) -> AsyncIterator[Application]:
    async with lifespan_of(app := create_app(msgspec.structs.replace(served, model="six_columns"))):
        yield app


@pytest.fixture
async def server(gateway: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with backend(gateway) as client:
        yield client


def request(*images: object, config: str = PLAIN, key: str = "image") -> dict[str, Any]:
    tasks = [{"id": number, "data": {key: image}, "meta": {}, "predictions": []} for number, image in enumerate(images)]
    return {"tasks": tasks, "project": "12.1699", "label_config": config, "params": {"context": None}}


async def results(server: httpx.AsyncClient, *images: object, **others: str) -> list[dict[str, Any]]:
    predictions: list[dict[str, Any]] = json(await server.post("/predict", json=request(*images, **others)))["results"]
    return predictions


@asynccontextmanager
async def with_task(task: str) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    fake = triton_for(task)
    async with serving(fake):
        app = create_app(settings_for(fake.url, task_models="segmentation=parts,pose=people"))
        async with lifespan_of(app), backend(app) as client:
            yield client, calling(app)


async def regions(server: httpx.AsyncClient, config: str, model: str) -> dict[str, list[dict[str, Any]]]:
    """Return the regions by control, which must be those of a model."""
    (prediction,) = await results(server, TEXT, config=config)
    said = json(await server.post("/setup", json={"schema": config}))["model_version"]
    assert prediction["model_version"] == said == f"{model}:1"
    by_control: dict[str, list[dict[str, Any]]] = {}
    for region in prediction["result"]:
        size = region["original_width"], region["original_height"]
        assert (region["to_name"], size, region["image_rotation"]) == ("i", (64, 32), 0)
        by_control.setdefault(region["from_name"], []).append(region)
    return by_control


async def test_model_of_a_project_is_that_of_its_predictions(server: httpx.AsyncClient) -> None:
    for schema in (None, "", "<View></View>", PLAIN):
        assert json(await server.post("/setup", json={"project": "1", "schema": schema})) == {"model_version": "six_columns:1"}
    for name, status in (("yolo_head.pt", 200), ("yolov8m.pt", 404), ("../../etc", 404), ("probabilities", 400)):
        config = CONFIG.format(others=f' model_path="{name}"')
        version = await server.post("/setup", json={"schema": config})
        answer = await server.post("/predict", json=request(ENCODED, config=config))

        assert version.status_code == answer.status_code == status
        if status == 200:
            assert answer.json()["results"][0]["model_version"] == version.json()["model_version"] == "yolo_head:1"
    versions = json(await server.get("/versions"))["versions"]
    assert {"six_columns:1", "yolo_head:1"} <= set(versions)
    assert "probabilities:1" not in versions
    assert json(await server.get("/health")) == {"status": "UP", "model_class": "Nereid"}
    assert (await server.post("/webhook", json={"action": "ANNOTATION_CREATED"})).status_code == 201


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ('<Label value="Car" predicted_values="truck, red ,bus"/><Label value="BLUE"/>', ["BLUE", "Car"]),
        ('<Label value="red" alias="rot" predicted_values="truck"/>', ["rot"]),
        ('<Label value="Red" predicted_values="blue"/><Label value="Blue" predicted_values="red"/>', ["Blue", "Red"]),
        ('<View><Header value="x"/><Label value="Blue"/></View>', ["Blue"]),
        ('<Label value="person"/>', []),
    ],
)
async def test_labels_find_classes_by_predicted_values_or_names(
    server: httpx.AsyncClient, labels: str, expected: list[str]
) -> None:
    control = f'<RectangleLabels name="r" toName="i">{labels}</RectangleLabels>'
    (prediction,) = await results(server, ENCODED, config=f'<View><Image name="i" value="$image"/>{control}</View>')

    assert sorted(region["value"]["rectanglelabels"][0] for region in prediction["result"]) == expected
    assert (prediction["score"] == 0) == (not expected)


async def test_task_has_a_result_or_an_error(server: httpx.AsyncClient) -> None:
    """Of too many, only the first has: Label Studio then asks for each alone."""
    images = [ENCODED, "", f"data:image/bmp;base64,{ENCODED}", 7, "/data/1.jpg", "s3://bucket/a.jpg", "http://[", f" {ENCODED}"]
    predictions = await results(server, *images)

    assert ["result" in each for each in predictions] == [True, False, True, False, False, False, False, True]
    assert all(each["error"] for each in predictions if "result" not in each)
    assert "LABEL_STUDIO_URL" in predictions[4]["error"]
    (unnamed,) = await results(server, ENCODED, key="$undefined$")
    assert unnamed["result"]
    assert len(await results(server, ENCODED, *[""] * 64)) == 1


async def test_bad_configuration_or_tasks_are_400(server: httpx.AsyncClient) -> None:
    entity, outside = '<!DOCTYPE x [<!ENTITY e "x">]><View>&e;</View>', '<!DOCTYPE x SYSTEM "file:///etc/passwd"><View/>'
    too_many = PLAIN.replace("</View>", '<RectangleLabels name="a" toName="image"/>' * 16 + "</View>")
    configs = ["", "<View>", "<View></View>", "\x00", "\udc00", "<View>" * 9000, "<View/>" + " " * (1 << 16)]
    configs += [entity, outside, too_many]
    changes = {'"0.25"': '"2"', "<RectangleLabels": '<RectangleLabels model_point_threshold="nan"', "$image": "image"}
    changes |= {"RectangleLabels": "EllipseLabels", 'toName="image"': ""}
    configs += [PLAIN.replace(old, new) for old, new in changes.items()]
    tasks: list[object] = [[], [7], [{}], [{"data": 1}], [{"data": {}}], {}, "x", [{"data": {"image": []}}]]
    wrong = [*(request(ENCODED, config=config) for config in configs), *({**request(), "tasks": each} for each in tasks)]
    for body in wrong:
        answer = await server.post("/predict", content=dumps(body), headers={"Content-Type": "application/json"})
        assert json(answer, 400)["detail"]


@pytest.fixture
async def studio() -> AsyncIterator[Host]:
    async with serving_host(scheme="http") as host:
        yield host


async def test_images_are_fetched_from_label_studio_alone_with_the_token(gateway: Application, studio: Host) -> None:
    """Any other address is for the gateway to fetch, which gets no token, also where Label Studio redirects to it."""
    url = studio.url("/data/upload/1/a%20b.bmp", LOOPBACK)
    studio.answers |= {
        "/data/upload/1/a%20b.bmp": response(SCENE),
        "/data/local-files/?d=a.bmp": response(SCENE),
        "/moved": redirect("/data/local-files/?d=a.bmp"),
        "/away": redirect(studio.url("/elsewhere", "localhost")),
        "/loop": redirect("/loop"),
    }
    fetched = ["/data/upload/1/a b.bmp", "/data/local-files/?d=a.bmp", url, "/moved", ENCODED]
    refused = ["/away", "/loop", "//files.example.org/x", studio.url("/x", HOST), f"http://{LOOPBACK}/x", "/data/missing"]
    async with backend(gateway, studio.url("/", LOOPBACK), TOKEN) as server:
        predictions = await results(server, *fetched, *refused)
        missing = await server.post("/predict", json=request("/data/missing"))

    assert ["result" in each for each in predictions] == [True] * len(fetched) + [False] * len(refused)
    assert "/elsewhere" not in {path for path, _ in studio.requests}
    assert {headers["authorization"] for _, headers in studio.requests} == {f"Token {TOKEN}"}
    assert (missing.status_code, missing.json()["detail"]) == (424, "Label Studio answered with status 404")


async def test_images_of_label_studio_have_limits_of_size_and_time(
    gateway: Application, studio: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio.answers["/a.bmp"] = response(SCENE)
    for limit, status in (("_MAX_BYTES", 413), ("_MAX_SECONDS", 424)):
        with monkeypatch.context() as patch:
            patch.setattr(f"nereid_label_studio.studio.{limit}", -1)
            async with backend(gateway, studio.url("", LOOPBACK)) as server:
                json(await server.post("/predict", json=request("/a.bmp")), status)
    async with backend(gateway, f"http://{LOOPBACK}:{free_port()}") as server:
        assert json(await server.post("/predict", json=request("/a.bmp")), 424)["detail"] == "Label Studio does not answer"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NEREID_URL", "nereid:4603"), ("LABEL_STUDIO_URL", "file:///etc"), ("LABEL_STUDIO_API_KEY", "secret\n")],
)
def test_variable_that_is_not_valid_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    monkeypatch.setattr("sys.argv", ["nereid-label-studio"])
    with pytest.raises(SystemExit):
        main()
    complaint = capsys.readouterr().err
    assert f"{variable}: expected" in complaint
    assert "secret" not in complaint


async def test_key_of_the_gateway_is_user_and_password(served: Settings, studio: Host, tmp_path: Path) -> None:
    studio.answers["/a.bmp"] = response(SCENE)
    keys = write_keys(tmp_path, ("annotators", "secret-of-the-annotators", "detect"))
    settings = msgspec.structs.replace(served, model="six_columns", api_keys_file=keys)
    async with lifespan_of(app := create_app(settings)), backend(app, studio.url("", LOOPBACK)) as server:
        lines = b64encode(b"annotators:secret\r\nHost: x")
        for credentials in (b"Basic eDp5", b"Basic ?", b"Basic", b"Basic " + lines, b"Bearer eDp5", None):
            headers = {} if credentials is None else {b"Authorization": credentials}
            for path, body in (("/predict", request("/a.bmp")), ("/setup", {})):
                assert (await server.post(path, json=body, headers=headers)).status_code == 401
        assert not studio.requests
        answer = await server.post("/predict", json=request("/a.bmp"), auth=("annotators", "secret-of-the-annotators"))

    assert json(answer)["results"][0]["result"]


async def test_masks_are_polygons_and_brush_masks() -> None:
    async with with_task("segment") as (server, gateway):
        by_control = await regions(server, CONTROLS, "parts")
        polygon = json(await gateway.post("/segment?boxes=pixel", content=IMAGE))["detections"][0]["mask"]
        png = json(await gateway.post("/segment?masks=png", content=IMAGE))["detections"][0]
    (brush,) = by_control["masks"]
    mask = np.zeros((32, 64), np.uint8)
    x, y = png["mask_offset"]
    piece = np.asarray(Image.open(BytesIO(b64decode(png["mask"]))).convert("L"))
    mask[y : y + piece.shape[0], x : x + piece.shape[1]] = piece

    for region, part in zip(by_control["outlines"], polygon, strict=True):
        assert (region["type"], region["score"], region["value"]["closed"]) == ("polygonlabels", 0.9, True)
        assert region["value"]["polygonlabels"] == ["Dog"]
        np.testing.assert_allclose(region["value"]["points"], np.array(part).reshape(-1, 2) / [64, 32] * 100, atol=0.05)
    assert (brush["type"], brush["value"]["format"], brush["value"]["brushlabels"]) == ("brushlabels", "rle", ["Dog"])
    assert mask.any()
    np.testing.assert_array_equal(decode(brush["value"]["rle"]).reshape(32, 64, 4), np.repeat(mask[..., None], 4, axis=2))


async def test_keypoints_belong_to_a_box_if_the_project_has_one_for_them() -> None:
    async with with_task("pose") as (server, _):
        by_control = await regions(server, POINTS, "people")
        alone = await regions(server, POINTS.replace("points_bbox", "others").replace("0.3", "0"), "people")
    async with with_task("points") as (server, _):
        unsure = await regions(server, POINTS, "people")
    (point,), (box,) = by_control["points"], by_control["points_bbox"]

    assert point["value"] == {"x": 18.75, "y": 37.5, "width": 1.5625, "keypointlabels": ["Snout"]}
    assert (point["type"], point["score"], point["parentID"]) == ("keypointlabels", 0.9, box["id"])
    assert box["value"] == {"x": 12.5, "y": 25, "width": 25, "height": 50, "rotation": 0, "rectanglelabels": ["dog"]}
    assert (box["type"], box["score"], box["hidden"]) == ("rectanglelabels", 0.9, True)
    assert [region["value"]["keypointlabels"] for region in alone["points"]] == [["Snout"], ["Tail"]]
    assert [region["score"] for region in alone["points"]] == [0.9, 0.25]
    assert not any("parentID" in region for region in alone["points"])
    assert [region["score"] for region in unsure["points"]] == [0.9, 0.9]


async def test_oriented_boxes_are_turned_around_their_first_corner() -> None:
    labels = '<Label value="cat"/><Label value="dog"/>'
    control = f'<RectangleLabels name="r" toName="i" model_path="tiny">{labels}</RectangleLabels>'
    async with with_task("obb") as (server, _):
        by_control = await regions(server, f'<View><Image name="i" value="$image"/>{control}</View>', "tiny")

    first, second = (region["value"] for region in by_control["r"])
    assert [region["score"] for region in by_control["r"]] == [0.9, 0.8]
    assert first == {"x": 12.5, "y": 25, "width": 25, "height": 25, "rotation": 0, "rectanglelabels": ["dog"]}
    assert second == {"x": 68.75, "y": 0, "width": 25, "height": 25, "rotation": 90, "rectanglelabels": ["cat"]}


def decode(rle: list[int]) -> NDArray[np.uint8]:
    bits = "".join(f"{byte:08b}" for byte in rle)
    at = 0

    def read(count: int) -> int:
        nonlocal at
        at += count
        return int(bits[at - count : at], 2)

    values, word = read(32), read(5) + 1
    sizes = [read(4) + 1 for _ in range(4)]
    decoded: list[int] = []
    while len(decoded) < values:
        is_run, count = read(1), read(sizes[read(2)]) + 1
        decoded += [read(word)] * count if is_run else [read(word) for _ in range(count)]
    return np.array(decoded, np.uint8)
