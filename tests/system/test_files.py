"""The model that takes encoded files, in the embedded Triton: the answers are those of the network that takes pixels."""

import asyncio
import hashlib
import shutil
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from app.embedded.server import EmbeddedTriton, check_inference
from app.embedded.service import CheckError
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from app.zoo import registry
from app.zoo.pull import pull
from app.zoo.repository import Repository
from tests.support import json, sample_image, triton_home
from tests.system.files import IMAGE_SETS, check_boxes

FILE_MODEL, PIXEL_MODEL = "yolo11n_file", "yolo11n"
CUT_SHORT = sample_image("coffee.jpg")[:5000]
"""A file whose header is right, and whose pixels end early."""


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
    return msgspec.structs.replace(settings, model_repository=str(repository), triton_home=home)


@IMAGE_SETS
async def test_boxes_are_those_of_the_network_that_takes_pixels(gateway: httpx.AsyncClient, images: list[Path]) -> None:
    await check_boxes(gateway, PIXEL_MODEL, FILE_MODEL, images)


async def test_image_that_cannot_be_decoded_is_the_callers_fault(gateway: httpx.AsyncClient) -> None:
    for _ in range(8):
        problems = [json(await gateway.post(f"/predict/{model}", content=CUT_SHORT), 422) for model in (PIXEL_MODEL, FILE_MODEL)]
        for problem in problems:
            del problem["request_id"]
        assert problems[0] == problems[1]
        assert problems[0]["code"] == "invalid_image"

    assert (await gateway.get("/readyz")).status_code == 200


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


def test_serve_notices_that_a_process_of_the_model_has_died(own: Settings, tmp_path: Path) -> None:
    """The checks of `serve` need no image, so they succeed until then."""
    mortal = msgspec.structs.replace(own, triton_home=triton_home(tmp_path))
    server = EmbeddedTriton(mortal)
    server.start()
    try:
        client = BlockingClient(mortal.triton_address)
        check_inference(client, FILE_MODEL, 30)
        children = psutil.Process(server.pid).children(recursive=True)
        processes = [child for child in children if FILE_MODEL in " ".join(child.cmdline())]
        assert processes
        for process in processes:
            process.kill()
        with pytest.raises(CheckError, match="has died") as caught:
            check_inference(client, FILE_MODEL, 30)
    finally:
        server.stop()
        assert caught.value.is_final
