"""Detectors and classifiers of every format that users bring, each a real one in Triton: alone, and in calls that images share."""

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from itertools import cycle, islice
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.embedded.launch import command
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.fakes import models
from tests.fakes.other_tasks import LABELS, MEAN, STD, WEIGHTS, logits_of, softmax
from tests.support import NEEDS_BYTES, SCENE, eventually, json, scrape, started, triton_home

DETECTORS = [
    *("six_columns", "half_four_tensors", "normalized_float_classes", "yolo_head", "yolox_head", "stretched_columns", "unbatched"),
    *("extra_string", pytest.param("file_in", marks=NEEDS_BYTES)),
]
REQUESTS = 24
SCORES = {"1": [0.9, 0.8], "2": [0.6, 0.5]}
"""Of the versions of `two_versions`."""

# Of an image whose middle, a square, has another colour than its ends.
MIDDLE, ENDS = (204, 51, 102), (51, 153, 0)
INNER, OUTER = (0.8, 0.2, 0.4), (0.2, 0.6, 0.0)
HALVES = (0.5, 0.4, 0.2)
LOGITS = {
    **dict.fromkeys(("planes_to_logits", "bytes_to_logits", "half_to_half", "probabilities", "cropped"), logits_of(INNER)),
    "stretched": logits_of(HALVES),
    "letterboxed": logits_of((0.25, 0.2, 0.1)),
    # The channels are blue, green and red, and so are the means and deviations.
    "normalized": WEIGHTS
    @ np.array([(value - mean) / std for value, mean, std in zip(INNER[::-1], MEAN, STD, strict=True)], np.float32),
}


@pytest.fixture(params=["shm", "inline"])
async def one_by_one(served: Settings, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application that makes one call at a time, so that much is aggregated."""
    own = msgspec.structs.replace(served, calls_in_flight=1, transport=request.param, decode_threads=4)
    async with started(create_app(own)) as client:
        yield client


@pytest.mark.parametrize("model", DETECTORS)
async def test_each_image_of_a_call_gets_the_boxes_of_its_rectangles(one_by_one: httpx.AsyncClient, model: str) -> None:
    """Only models without a batch dimension are asked one by one. The rectangles lie between pixels of the canvas."""
    shifts = list(islice(cycle((-16, -8, 0, 8, 16)), REQUESTS))
    asking = [one_by_one.post(f"/predict/{model}?boxes=pixel", content=models.scene("BMP", shift=shift)) for shift in shifts]
    responses = await asyncio.gather(*asking)

    for shift, response in zip(shifts, responses, strict=True):
        found = json(response)["detections"]
        assert [one["class_name"] for one in found] == ["red", "blue"]
        for one in found:
            x1, y1, x2, y2 = models.RECTANGLES[one["class_name"]]
            corners = [one[key] for key in ("x1", "y1", "x2", "y2")]
            assert corners == pytest.approx([x1 + shift, y1, x2 + shift, y2], abs=2)
    samples = await scrape(one_by_one)
    assert samples[f'api_inference_batch_size_sum{{model="{model}"}}'] == REQUESTS
    calls = samples[f'api_inference_batch_size_count{{model="{model}"}}']
    assert (calls == REQUESTS) is (model in {"unbatched", "file_in"})


@pytest.mark.parametrize(("colour", "code"), [("black", "inference_failed"), ("lime", "invalid_model_output")])
@pytest.mark.parametrize("calls", [1, 4096], ids=["gateway's batches", "Triton's batches"])
async def test_a_poison_picture_costs_nobody_else(served: Settings, colour: str, code: str, calls: int) -> None:
    """The embedded Triton's ONNX backend runs the requests of a failed batch one by one, too."""
    poison = models.scene("BMP", colour)
    pictures = [poison if index % 6 == 3 else SCENE for index in range(REQUESTS)]
    async with started(create_app(msgspec.structs.replace(served, calls_in_flight=calls))) as client:
        responses = await asyncio.gather(*(client.post("/predict/fragile", content=picture) for picture in pictures))

    for picture, response in zip(pictures, responses, strict=True):
        if picture is poison:
            assert json(response, 502)["code"] == code
        else:
            assert [found["class_name"] for found in json(response)["detections"]] == ["red", "blue"]


@pytest.mark.parametrize("model", ["yolo_head", "yolox_head"])
async def test_a_raw_head_takes_the_overlap_of_the_caller(client: httpx.AsyncClient, model: str) -> None:
    counts = []
    for iou in ("1", "0.99", "0"):
        response = await client.post(f"/predict/{model}?iou={iou}&max_detections=300", content=SCENE)
        counts.append(json(response)["num_detections"])

    assert counts[0] > 100
    assert counts[1:] == [2, 2]


@pytest.mark.parametrize("model", LOGITS)
async def test_each_classifier_gives_the_probabilities_computed_by_hand(client: httpx.AsyncClient, model: str) -> None:
    image, file = Image.new("RGB", (256, 128), ENDS), BytesIO()
    image.paste(MIDDLE, (64, 0, 192, 128))
    image.save(file, "PNG")
    answer = json(await client.post(f"/classify?model={model}", content=file.getvalue()))
    found = {one["class_name"]: one["confidence"] for one in answer["classifications"]}

    assert found == pytest.approx(dict(zip(LABELS, softmax(LOGITS[model]), strict=True)), abs=0.01)
    assert list(found) == sorted(found, key=lambda name: -found[name])


async def test_a_call_never_has_images_for_several_versions(one_by_one: httpx.AsyncClient) -> None:
    """The newest version is one model, with or without its number."""
    queries = list(islice(cycle(["", "?version=1", "?version=2"]), REQUESTS))
    responses = await asyncio.gather(*(one_by_one.post(f"/predict/two_versions{query}", content=SCENE) for query in queries))

    for query, response in zip(queries, responses, strict=True):
        answer = json(response)
        version = query.partition("=")[2] or "2"
        assert answer["model"]["version"] == version
        assert [found["confidence"] for found in answer["detections"]] == SCORES[version]
    samples = await scrape(one_by_one)
    assert any('batch;desc="1"' not in response.headers["server-timing"] for response in responses)
    assert not [name for name in samples if "two_versions:2" in name]


@pytest.fixture
def polling_triton(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Settings for a Triton that looks for changes of its models each second; of `two_versions` it has the first one."""
    repository = tmp_path / "repository"
    shutil.copytree(Path(settings.model_repository) / "two_versions", repository / "two_versions")
    (repository / "two_versions" / "2").rename(tmp_path / "2")
    config = repository / "two_versions" / "config.pbtxt"
    config.write_text(config.read_text().replace("version_policy { all {} }", ""))

    def command_of_it(settings: Settings, links: Path) -> list[str]:
        line = [option.replace("control-mode=explicit", "control-mode=poll") for option in command(settings, links)]
        return [*(option for option in line if "load-model" not in option), "--repository-poll-secs=1"]

    monkeypatch.setattr("app.embedded.server.command", command_of_it)
    (tmp_path / "triton").mkdir()
    home = triton_home(tmp_path / "triton")
    own = msgspec.structs.replace(settings, triton_home=home, model_repository=str(repository), model="two_versions", workers=1)
    server = EmbeddedTriton(own)
    server.start()
    yield own
    server.stop()


async def test_no_answer_mixes_versions_while_a_new_one_is_loaded(polling_triton: Settings, tmp_path: Path) -> None:
    folder = Path(polling_triton.model_repository) / "two_versions"
    answers = Counter[tuple[str, tuple[str, ...], float]]()

    async def ask(client: httpx.AsyncClient) -> None:
        while not any(version == "2" for version, _, _ in answers) or answers.total() < REQUESTS:
            document = json(await client.post("/predict/two_versions", content=SCENE))
            found = document["detections"]
            answers[document["model"]["version"], tuple(one["class_name"] for one in found), found[0]["confidence"]] += 1

    async with started(create_app(polling_triton)) as client:
        asking = asyncio.gather(*(ask(client) for _ in range(4)))
        await eventually(lambda: answers.total() > 0)
        config = folder / "config.pbtxt"
        config.write_text(config.read_text().replace("red", "rouge").replace("blue", "bleu"))
        (tmp_path / "2").rename(folder / "2")
        await asking

    assert answers.keys() == {("1", ("red", "blue"), 0.9), ("2", ("rouge", "bleu"), 0.6)}
