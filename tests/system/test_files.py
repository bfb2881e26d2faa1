"""The model that takes encoded files, in the embedded Triton: the answers are those of the network that takes pixels."""

import asyncio
import hashlib
import shutil
from pathlib import Path

import httpx
import msgspec
import numpy as np
import psutil
import pytest

from app.detection.outputs import decode_outputs
from app.embedded.inference_check import check_inference
from app.embedded.server import EmbeddedTriton
from app.embedded.service import CheckError
from app.errors import InvalidImage
from app.settings.schema import Settings
from app.triton.blocking_client import BlockingClient
from app.triton.client import TritonClient
from app.triton.specs import SpecCache
from app.zoo import registry
from app.zoo.pull import pull
from tests.support import REPOSITORY, json, sample_image, triton_home
from tests.system.files import IMAGE_SETS, check_boxes, infer_files

FILE_MODEL, PIXEL_MODEL = "yolo11n_file", "yolo11n"
CUT_SHORT = sample_image("coffee.jpg")[:5000]
"""A file whose header is right, and whose pixels end early."""


@pytest.fixture(scope="module")
def own(settings: Settings, networks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of a Triton with both models, of which one is pulled as a user pulls it."""
    repository = tmp_path_factory.mktemp("files") / "repository"
    shutil.copytree(REPOSITORY, repository, ignore=shutil.ignore_patterns("model.onnx"))
    shutil.copytree(Path(settings.model_repository, PIXEL_MODEL, "1"), repository / PIXEL_MODEL / "1", dirs_exist_ok=True)
    network = networks[PIXEL_MODEL]
    digest = hashlib.sha256(network.read_bytes()).hexdigest()
    pull(FILE_MODEL, registry.load(repository / "models.toml")[FILE_MODEL], repository, source=network, sha256=digest)
    home = triton_home(tmp_path_factory.mktemp("triton"))
    return msgspec.structs.replace(settings, model_repository=str(repository), triton_home=home)


@IMAGE_SETS
async def test_boxes_are_those_of_the_network_that_takes_pixels(gateway: httpx.AsyncClient, images: list[Path]) -> None:
    """The result does not depend on where the file is decoded."""
    await check_boxes(gateway, PIXEL_MODEL, FILE_MODEL, images)


async def test_answer_names_the_model_and_the_image(gateway: httpx.AsyncClient) -> None:
    answer = json(await gateway.post(f"/predict/{FILE_MODEL}", content=sample_image("chelsea.jpg")))

    assert answer["model"] == {"name": FILE_MODEL, "version": "1", "backend": "triton", "device": "cpu"}
    assert answer["image"] == {"width": 451, "height": 300}
    assert [found["class_name"] for found in answer["detections"]] == ["cat"]


async def test_image_that_cannot_be_decoded_is_the_callers_fault(gateway: httpx.AsyncClient) -> None:
    """The same problem as from a model for which the gateway decodes, and the circuit stays closed."""
    for _ in range(8):
        problems = [json(await gateway.post(f"/predict/{model}", content=CUT_SHORT), 422) for model in (PIXEL_MODEL, FILE_MODEL)]
        for problem in problems:
            del problem["request_id"]
        assert problems[0] == problems[1]
        assert problems[0]["code"] == "invalid_image"

    assert (await gateway.get("/readyz")).status_code == 200


async def test_requests_that_triton_batches_keep_their_own_answers(gateway: httpx.AsyncClient) -> None:
    """Good and broken files at the same time: each caller gets what one alone gets."""
    files = [sample_image("chelsea.jpg"), CUT_SHORT, sample_image("astronaut.jpg")]
    alone = [await gateway.post(f"/predict/{FILE_MODEL}", content=file) for file in files]
    together = await asyncio.gather(*(gateway.post(f"/predict/{FILE_MODEL}", content=file) for file in files * 4))

    assert [answer.status_code for answer in alone] == [200, 422, 200]
    for index, answer in enumerate(together):
        expected = alone[index % len(files)]
        assert answer.status_code == expected.status_code
        if answer.status_code == 200:
            assert json(answer)["detections"] == json(expected)["detections"]


async def test_broken_file_of_a_batch_harms_no_other(own_client: TritonClient) -> None:
    """Every file of a request has its own answer, and its own error."""
    files = [sample_image("chelsea.jpg"), CUT_SHORT, sample_image("astronaut.jpg"), b"text"]
    spec = await SpecCache(own_client).get(FILE_MODEL)
    together = await infer_files(own_client, spec, files)

    assert [result.outputs["decoded"].tolist() for result in together] == [[[1]], [[0]], [[1]], [[0]]]
    for file, result in zip(files, together, strict=True):
        if not result.outputs["decoded"].all():
            with pytest.raises(InvalidImage):
                decode_outputs(spec, result.outputs)
            continue
        (alone,) = await infer_files(own_client, spec, [file])
        found, expected = decode_outputs(spec, result.outputs), decode_outputs(spec, alone.outputs)
        np.testing.assert_allclose(found.boxes, expected.boxes, atol=0.01)
        np.testing.assert_array_equal(found.class_ids, expected.class_ids)


async def test_model_that_was_not_pulled_is_not_found(client: httpx.AsyncClient) -> None:
    """Triton has started without it, and the answer says how to get it."""
    problem = json(await client.post(f"/predict/{FILE_MODEL}", content=sample_image("chelsea.jpg")), 404)

    assert f"./just pull {FILE_MODEL}" in problem["detail"]


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
