"""The model that takes encoded files, in the embedded Triton: the answers are those of the network that takes pixels."""

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from app.embedded.server import check_inference
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from app.zoo import registry
from app.zoo.pull import pull
from app.zoo.repository import Repository
from tests.reference_detector import QUERY, MatchCounts, boxes
from tests.support import IMAGES, SHARED, json, sample_image, triton_home

FILE_MODEL, PIXEL_MODEL = "yolo11n_file", "yolo11n"
CUT_SHORT = sample_image("coffee.jpg")[:5000]
"""A file whose header is right, and whose pixels end early."""
IMAGE_SETS = pytest.mark.parametrize(
    "images", [sorted(IMAGES.glob("*.jpg")), sorted((SHARED / "images").glob("*.jpg"))], ids=["sample", "coco"]
)


@pytest.fixture(scope="module")
def own(settings: Settings, networks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of a Triton with both models, of which one is pulled as a user pulls it."""
    repository = tmp_path_factory.mktemp("files") / "repository"
    shutil.copytree(Path(settings.model_repository, PIXEL_MODEL), repository / PIXEL_MODEL)
    network = networks[PIXEL_MODEL]
    digest = hashlib.sha256(network.read_bytes()).hexdigest()
    pull(
        FILE_MODEL,
        registry.load()[FILE_MODEL],
        Repository(repository),
        str,
        source=network,
        sha256=digest,
    )
    home = triton_home(tmp_path_factory.mktemp("triton"))
    return msgspec.structs.replace(settings, model_repository=str(repository), triton_home=home, shapes="square")


async def check_boxes(gateway: httpx.AsyncClient, pixel_model: str, file_model: str, images: Sequence[Path]) -> None:
    """Compare the boxes of two models, by class at IoU 0.9 and confidence 0.25, over all images together."""
    if not images:
        pytest.skip("there are no images in ../shared/images")
    tally = MatchCounts()
    for path in images:
        of_pixels, of_file = [
            boxes(json(await gateway.post(f"/predict/{model}", params=QUERY, content=path.read_bytes())))
            for model in (pixel_model, file_model)
        ]
        tally.add(of_pixels, of_file)
    print(f"{file_model}: {tally}")  # noqa: T201

    assert tally.expected >= len(images) / 2
    assert tally.f1 >= 0.98


@IMAGE_SETS
async def test_boxes_are_those_of_the_network_that_takes_pixels(gateway: httpx.AsyncClient, images: list[Path]) -> None:
    await check_boxes(gateway, PIXEL_MODEL, FILE_MODEL, images)


async def test_image_that_cannot_be_decoded_is_the_callers_fault(gateway: httpx.AsyncClient, own: Settings) -> None:
    for _ in range(8):
        problems = [json(await gateway.post(f"/predict/{model}", content=CUT_SHORT), 422) for model in (PIXEL_MODEL, FILE_MODEL)]
        for problem in problems:
            del problem["request_id"]
        assert problems[0] == problems[1]
        assert problems[0]["code"] == "invalid_image"

    assert (await gateway.get("/readyz")).status_code == 200
    await asyncio.to_thread(check_inference, BlockingClient(own.triton_address), FILE_MODEL, 30)  # by `serve`, with an empty file


async def test_requests_that_triton_batches_keep_their_own_answers(gateway: httpx.AsyncClient) -> None:
    async def predict(file: bytes) -> httpx.Response:
        answer = await gateway.post(f"/predict/{FILE_MODEL}", content=file)
        if answer.status_code != 429:  # the limit of a slow machine
            return answer
        await asyncio.sleep(0.1)
        return await predict(file)

    files = [sample_image("chelsea.jpg"), CUT_SHORT, sample_image("astronaut.jpg")]
    alone = [await predict(file) for file in files]
    together = await asyncio.gather(*map(predict, files * 4))

    assert [answer.status_code for answer in alone] == [200, 422, 200]
    for index, answer in enumerate(together):
        expected = alone[index % len(files)]
        assert answer.status_code == expected.status_code
        if answer.status_code == 200:
            assert json(answer)["detections"] == json(expected)["detections"]
