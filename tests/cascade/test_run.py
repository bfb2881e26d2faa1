"""Cascades in a real Triton: what is cropped for later steps, what they answer, and what stays when others fail."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image

from app.cascade import catalog
from app.cascade import run as run_module
from app.cascade.catalog import CascadesError
from app.embedded.server import EmbeddedTriton
from app.errors import GatewayError, GatewayFull, InvalidImage, InvalidModelOutput, InvalidParameter, UnknownModel, UnsupportedModel
from app.main import open_resources
from app.pipeline.results import Classifications, Detections, Embedding
from app.settings.schema import Settings
from app.telemetry.timing import Timing
from tests.cascade.conftest import Runner
from tests.fakes import models
from tests.support import NEEDS_BYTES, SCENE

THINGS = {"model": "six_columns"}
COLOURS = {"model": "bytes_to_logits", "of": "things"}
VECTORS = {"model": "embedding", "of": "things"}
RED, BLUE = models.RECTANGLES.values()


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def names(results: Any) -> list[str]:  # noqa: ANN401
    assert all(isinstance(result, Classifications) for result in results)
    return [result.spec.class_name(int(result.class_ids[0])) for result in results]


def quarters(result: Any) -> Any:  # noqa: ANN401
    """Return the mean colours (3, 2, 2) of the quarters of what the embedding model saw, 0 to 1."""
    assert isinstance(result, Embedding)
    return (result.vector * result.norm).reshape(3, 2, 2)


async def test_later_step_is_about_the_objects_of_an_earlier_one(worker: Runner) -> None:
    found = await worker.run({"things": THINGS, "colours": COLOURS, "whole": {"model": "embedding"}})
    things, colours, whole = found.steps.values()
    (boxes,) = things.results
    assert isinstance(boxes, Detections)
    assert_allclose(boxes.boxes, [RED, BLUE], atol=1.6)
    assert (names(colours.results), colours.objects) == (["red", "blue"], [0, 1])
    assert (len(whole.results), whole.objects) == (1, ())
    assert (found.width, found.height, found.truncated) == (*models.SIZE, False)
    assert found.require("colours") is colours


async def test_without_objects_later_steps_answer_nothing(worker: Runner) -> None:
    found = await worker.run({"things": THINGS, "colours": COLOURS, "inside": {**COLOURS, "model": "six_columns"}}, png(blank()))
    assert [(len(step.results), len(step.objects), step.error) for step in found.steps.values()] == [
        (1, 0, None),
        *2 * [(0, 0, None)],
    ]


def blank() -> np.ndarray[Any, Any]:
    return np.full((100, 200, 3), 255, np.uint8)


async def test_best_objects_of_some_classes_are_cropped(worker: Runner) -> None:
    one, blue = {"max_crops": 1}, {"classes": ["blue"]}
    for limits, objects, truncated in ((one, [0], True), (blue | one, [1], False), ({"classes": ["blue", "0"]}, [0, 1], False)):
        found = await worker.run({"things": THINGS, "colours": {**COLOURS, **limits}})
        assert (found.steps["colours"].objects, found.truncated) == (objects, truncated)


async def test_steps_together_crop_a_limited_number_of_parts(worker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part counts once, however many steps are about it."""
    monkeypatch.setattr(run_module, "MAX_CROPS", 3)
    steps = {"things": THINGS, "colours": COLOURS, "again": {**COLOURS, "model": "direction"}}
    assert not (await worker.run(steps)).truncated
    found = await worker.run({**steps, "wider": {**COLOURS, "margin": 0.1, "turned_by": "again"}})
    assert (found.steps["wider"].objects, found.truncated) == ([0], True)


async def test_crops_of_one_step_are_used_by_another_with_another_order(worker: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "MAX_CROPS", 1)
    turned = {**VECTORS, "turned_by": "colours"}
    for colour in ("blue", "red"):
        steps = {"colours": {**COLOURS, "classes": [colour]}, "best": turned, "largest": {**turned, "order": "size"}}
        found = await worker.run({"things": THINGS, **steps})
        assert found.truncated
        assert [found.require(name).objects for name in ("best", "largest")] == 2 * [found.require("colours").objects]


async def test_box_is_enlarged_by_a_margin_within_the_image(worker: Runner) -> None:
    pixels = blank()
    pixels[:50, :100] = 255, 0, 0
    found = await worker.run({"things": THINGS, "vectors": {**VECTORS, "margin": 1}}, png(pixels))
    (vector,) = found.steps["vectors"].results
    # The red part is the top left quarter of the crop, 200 x 100: there are no pixels beyond the other sides.
    assert_allclose(quarters(vector)[1], [[0, 1], [1, 1]], atol=0.05)


async def test_objects_are_aligned_by_their_landmarks(worker: Runner) -> None:
    """The landmarks of the small model are as far apart in its input as in a square object."""
    found = await worker.run(
        {"faces": {"model": "faces_detection"}, "vectors": {"model": "faces_description", "of": "faces", "crop": "landmarks"}}
    )
    red, blue = found.steps["vectors"].results
    assert_allclose(quarters(red).mean(axis=(1, 2)), [1, 0, 0], atol=0.1)
    # The other one is higher than wide in no place: equal scales leave white above and below.
    assert quarters(blue)[2].mean() > 0.95
    assert (quarters(blue)[0] > 0).all()


async def test_oriented_boxes_are_straightened(worker: Runner) -> None:
    step = {"of": "things", "crop": "corners"}
    found = await worker.run(
        {
            "things": {"model": "oriented"},
            "colours": {"model": "bytes_to_logits", **step},
            "vectors": {"model": "embedding", **step},
        }
    )
    assert names(found.steps["colours"].results) == ["red", "blue"]
    assert_allclose(quarters(found.steps["vectors"].results[1]).mean(axis=(1, 2)), [0, 0, 1], atol=0.1)


async def test_objects_that_are_certainly_upside_down_are_turned(worker: Runner) -> None:
    """The small classifier takes blue things for upside down."""
    pixels = blank()
    pixels[20:80, 20:80] = 255, 0, 0
    pixels[20:80, 120:180] = 0, 0, 255
    pixels[20:50, 50:80], pixels[20:50, 150:180] = (200, 0, 0), (0, 0, 200)
    found = await worker.run(
        {"things": THINGS, "direction": {"model": "direction", "of": "things"}, "vectors": {**VECTORS, "turned_by": "direction"}},
        png(pixels),
    )
    assert names(found.steps["direction"].results) == ["0", "180"]
    red, blue = found.steps["vectors"].results
    assert np.unravel_index(quarters(red)[0].argmin(), (2, 2)) == (0, 1)
    assert np.unravel_index(quarters(blue)[2].argmin(), (2, 2)) == (1, 0)


async def test_objects_in_objects_lie_in_the_image(worker: Runner) -> None:
    inner = {"model": "six_columns", "of": "things", "margin": 0.2}
    steps = {"things": THINGS, "inner": inner, "faces": {**inner, "model": "faces_detection", "classes": ["red"]}}
    found = await worker.run({**steps, "colours": {"model": "bytes_to_logits", "of": "inner"}})
    red, blue = found.steps["inner"].results
    (face,) = found.steps["faces"].results
    for result, box in ((red, RED), (blue, BLUE), (face, RED)):
        assert isinstance(result, Detections)
        assert_allclose(result.boxes, [box], atol=2)
        assert (result.width, result.height) == models.SIZE
    assert isinstance(face, Detections)
    assert face.keypoints is not None
    assert_allclose(face.keypoints[0, :, :2], models.FACE * 60 + RED[:2], atol=2)
    assert (names(found.steps["colours"].results), found.steps["colours"].objects) == (["red", "blue"], [0, 1])


@pytest.mark.parametrize(
    ("steps", "kind", "detail"),
    [
        ({"last": {"model": "missing"}}, UnknownModel, "no such model"),
        ({"last": {"model": "lying"}}, InvalidModelOutput, "lying"),
        ({"last": {**COLOURS, "model": "lying"}}, InvalidModelOutput, "lying"),
        ({"last": {**COLOURS, "classes": ["bleu"]}}, InvalidParameter, "blue"),
        ({"last": {**COLOURS, "crop": "corners"}}, UnsupportedModel, "six_columns finds no corners"),
        ({"last": {**VECTORS, "crop": "landmarks"}}, UnsupportedModel, "six_columns finds no landmarks"),
        ({"first": COLOURS, "last": {**COLOURS, "of": "first"}}, UnsupportedModel, "finds no objects"),
        (
            {"first": {"model": "faces_detection"}, "last": {**VECTORS, "of": "first", "crop": "landmarks"}},
            UnsupportedModel,
            "embedding is aligned by 0 landmarks, faces_detection finds 5",
        ),
        ({"first": VECTORS, "last": {**COLOURS, "turned_by": "first"}}, UnsupportedModel, "no classifier"),
        (
            {"first": {**COLOURS, "model": "direction"}, "last": {**THINGS, "of": "things", "turned_by": "first"}},
            UnsupportedModel,
            "finds objects",
        ),
    ],
)
async def test_step_that_fails_leaves_the_answers_of_others(
    worker: Runner, steps: dict[str, Any], kind: type[GatewayError], detail: str
) -> None:
    found = await worker.run({"things": THINGS, **steps, "after": {"model": "embedding", "of": "last"}, "colours": COLOURS})
    assert found.steps["last"].error is found.steps["after"].error
    with pytest.raises(kind, match=detail):
        found.require("last")
    assert names(found.require("colours").results) == ["red", "blue"]


async def test_cascade_of_which_nothing_is_left_fails(worker: Runner) -> None:
    with pytest.raises(UnknownModel):
        await worker.run({"things": {"model": "missing"}, "colours": COLOURS, "lying": {"model": "lying"}})
    with pytest.raises(InvalidImage):
        await worker.run({"things": THINGS}, SCENE[:60])


@NEEDS_BYTES
async def test_model_that_takes_files_can_be_asked_about_the_whole_image_only(worker: Runner) -> None:
    found = await worker.run({"things": {"model": "file_in"}, "colours": COLOURS, "inner": {**COLOURS, "model": "file_in"}})
    assert names(found.steps["colours"].results) == ["red", "blue"]
    with pytest.raises(UnsupportedModel, match="file_in takes encoded files"):
        found.require("inner")


async def test_step_names_a_version(worker: Runner) -> None:
    first, inner = {"model": "two_versions:1"}, {"model": "two_versions:1", "of": "things", "margin": 0.2}
    found = await worker.run({"things": first, "newest": {"model": "two_versions"}, "inner": inner})
    results = [result for step in found.steps.values() for result in step.results]
    assert [result.version for result in results] == ["1", "2", "1", "1"]


@pytest.fixture
async def routed(settings: Settings, triton: EmbeddedTriton, tmp_path: Path) -> AsyncIterator[Runner]:
    """A worker with routes, of which one has a canary, and one a shadow."""
    assert triton.poll() is None
    file = tmp_path / "routes.toml"
    canary = 'canary = { to = "two_versions:2", share = 0.5 }'
    shadow = 'shadow = { to = "six_columns", share = 1 }'
    tables = [
        f'[boxes]\nto = "two_versions:1"\n{shadow}',
        f'[shared]\nto = "two_versions:1"\n{canary}',
        '[nowhere]\nto = "missing"',
    ]
    file.write_text("\n".join(tables))
    own = msgspec.structs.replace(settings, model="six_columns", routes_file=str(file))
    async with open_resources(own) as (_, pipeline, metrics):
        yield Runner(pipeline, metrics)


async def test_step_may_name_a_route_that_answers_about_all_parts_by_the_same_model(routed: Runner) -> None:
    """Otherwise the canary would get every second one. A shadow gets files only: parts of images cannot be kept for it."""
    steps = {"things": {"model": "boxes"}, "colours": COLOURS, "lost": {"model": "nowhere"}}
    inner = {"model": "shared", "of": "things", "margin": 0.2}
    own = {"own": {**inner, "model": "boxes"}, "inner": inner, "again": {**inner, "margin": 0.3}}
    found = await routed.run({**steps, **own})
    assert [result.version for name in ("things", "own") for result in found.steps[name].results] == ["1"] * 3
    assert names(found.steps["colours"].results) == ["red", "blue"]
    versions = [result.version for name in ("inner", "again") for result in found.require(name).results]
    assert (len(versions), len({*versions})) == (4, 1)
    with pytest.raises(UnknownModel):
        found.require("lost")


async def test_each_step_is_timed(worker: Runner) -> None:
    timing = Timing()
    await worker.run({"things": THINGS, "colours": COLOURS, "read": {"model": "embedding"}}, name="timed", timing=timing)
    assert list(timing.stages) == ["model", "queue", "decode", "infer"]
    spans = {name: (begin, end) for name, begin, end in timing.intervals()[4:]}
    assert spans == timing.steps
    assert spans["colours"][0] >= spans["things"][1] > spans["read"][0]
    samples = [
        (sample.labels["step"], sample.value)
        for family in worker.metrics.collect()
        for sample in family.samples
        if sample.name == "nereid_cascade_step_seconds_count" and sample.labels["cascade"] == "timed"
    ]
    assert sorted(samples) == [("colours", 1), ("read", 1), ("things", 1)]


async def test_crossed_cascades_never_wait_for_each_other(settings: Settings, triton: EmbeddedTriton) -> None:
    assert triton.poll() is None
    pair = "six_columns", "stretched_columns"
    crossed = [
        {"first": {"model": one}, "second": {"model": other, "of": "first", "margin": 0.2}} for one, other in (pair, pair[::-1])
    ]
    own = msgspec.structs.replace(settings, model="six_columns", max_requests=2)
    async with open_resources(own) as (_, pipeline, metrics):
        worker = Runner(pipeline, metrics)

        async def ask(number: int) -> int:
            while True:
                try:
                    found = await worker.run(crossed[number % 2], is_batch=number % 4 < 2)
                    return len(found.require("second").results)
                except GatewayFull:
                    await asyncio.sleep(0.02)

        assert await asyncio.gather(*map(ask, range(200))) == [2] * 200


def test_disk_that_fails_is_an_error_of_the_file(tmp_path: Path) -> None:
    """Otherwise it would end the task that follows the file, and no change would be seen any more."""
    with pytest.raises(CascadesError, match="name too long"):
        catalog.read(tmp_path / ("x" * 300) / catalog.FILE)
    assert catalog.read(tmp_path / catalog.FILE) == {}
