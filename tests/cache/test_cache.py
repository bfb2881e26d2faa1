"""A hit is what an inference would have answered, and is only found for the same network, image, caller and settings."""

import asyncio
from typing import Any

import msgspec
import pytest
from PIL import Image

from app.errors import DeadlinePassed, GatewayFull, ImageTooLarge
from app.imaging.header import PixelLimits
from app.model.heads import SegmentationHead
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from tests.cache.conftest import Caching, open_caching
from tests.fakes import models
from tests.imaging.samples import encode
from tests.support import SCENE, OpenTable, eventually

OTHER = models.scene("BMP", "gray")


LARGE = encode(Image.new("RGB", (800, 600)), "BMP")
"""An image whose file is hashed in a thread."""


async def test_images_are_told_apart(caching: Caching) -> None:
    """Also those that differ by zeros at their end, with which a hash may fill its last block."""
    images = [SCENE, SCENE + b"\0", SCENE + b"\0\0", OTHER, LARGE]

    assert [await caching.result(data) for data in images * 2] == ["miss"] * 5 + ["hit"] * 5


CAMERA, DOOR = {"caller": Caller("camera")}, {"caller": Caller("door")}


@pytest.mark.parametrize(
    ("is_shared", "calls", "results"),
    [
        (False, [CAMERA, DOOR, CAMERA, DOOR], ["miss", "miss", "hit", "hit"]),
        (True, [CAMERA, DOOR], ["miss", "hit"]),
        (False, [{"uses_cache": False}, {}, {"uses_cache": False}], ["", "miss", ""]),
        (False, [{"allows_truncated": True}, {}, {"allows_truncated": True}], ["miss", "miss", "hit"]),
    ],
)
async def test_result_answers_the_same_question_of_the_same_caller(
    caching: Caching, calls: list[dict[str, Any]], results: list[str], *, is_shared: bool
) -> None:
    caching.open(is_shared=is_shared)

    assert [await caching.result(**call) for call in calls] == results


async def test_image_that_lower_limits_reject_is_rejected_on_a_hit_too(caching: Caching) -> None:
    await caching.ask()
    limits = PixelLimits(10, 10)
    caching.world.pipeline._workspace = caching.world.pipeline._workspace._replace(limits=limits)  # noqa: SLF001
    caching.open(limits)

    with pytest.raises(ImageTooLarge):
        await caching.ask()


async def test_other_network_or_preprocessing_never_gets_the_result_of_the_old_one(caching: Caching) -> None:
    """A network that was reloaded in place has another fingerprint under the same version."""
    await caching.ask()
    for network, results in ((b"another network", ["miss", "hit"]), (b"a network", ["hit"]), (b"", ["", ""])):
        caching.networks["1"] = network
        await caching.fingerprints.refresh()
        assert [await caching.result() for _ in results] == results
    caching.networks["1"] = b"a network"
    await caching.fingerprints.refresh()
    caching.world.fake.config = caching.world.fake.config | {"parameters": {"pad": {"string_value": "0"}}}
    caching.world.server.specs.forget("tiny")

    assert [await caching.result() for _ in range(2)] == ["miss", "hit"]


async def test_result_is_not_stored_if_the_network_has_changed_meanwhile(caching: Caching) -> None:
    """It may be that of either network."""
    caching.world.hold()
    asking = asyncio.create_task(caching.ask())
    await eventually(lambda: caching.world.fake.running == 1)
    caching.networks["1"] = b"another network"
    caching.world.let_answer()
    assert (await asking)[0] == "miss"
    caching.networks["1"] = b"a network"

    assert await caching.result() == "miss"


async def test_result_of_another_version_is_not_stored(caching: Caching) -> None:
    """The worker has not known yet that Triton runs another one."""
    caching.world.fake.model_versions = ["2"]
    assert (await caching.ask())[1].version == "2"
    caching.world.fake.model_versions = ["1"]
    caching.world.server.specs.forget("tiny")

    result, found = await caching.ask()
    assert (result, found.version) == ("miss", "1")


async def test_masks_are_not_cached(caching: Caching) -> None:
    spec, call = await caching.spec(), CallContext(Deadline.after(1), Timing(), "id")
    head = SegmentationHead(output_format=spec.head.output_format, has_normalized_boxes=False, iou=1, max_iou=1)  # type: ignore[union-attr]

    assert caching.cache.takes(spec, call)
    assert not caching.cache.takes(msgspec.structs.replace(spec, head=head), call)


async def test_hit_needs_no_permit() -> None:
    async with open_caching(max_requests=1) as caching:
        await caching.ask()
        caching.world.hold()
        asking = asyncio.create_task(caching.ask(OTHER))
        await eventually(lambda: caching.world.fake.running == 1)
        with pytest.raises(GatewayFull):
            await caching.ask(LARGE)

        assert await caching.result() == "hit"
        caching.world.let_answer()
        await asking


async def test_answer_is_right_whatever_the_store_returns(caching: Caching, monkeypatch: pytest.MonkeyPatch) -> None:
    values: list[bytes] = []
    answer = b""

    async def get(_: bytes) -> bytes:
        return answer

    async def put(_: bytes, value: bytes) -> None:
        values.append(value)

    monkeypatch.setattr(caching.store, "get", get)
    monkeypatch.setattr(caching.store, "put", put)
    await caching.ask(OTHER)
    for answer in (b"", b"garbage", bytes(100), values[0], values[0][:-1]):  # noqa: B007 - `get` returns it
        assert await caching.result() == "miss"


async def test_identical_images_under_way_share_an_inference(caching: Caching) -> None:
    caching.world.hold()
    asking = [asyncio.create_task(caching.ask(confidence=confidence)) for confidence in (0.1, 0.5, 0.1)]
    await eventually(lambda: caching.world.fake.running == 1)
    caching.world.let_answer()
    answers = await asyncio.gather(*asking)

    assert [result for result, _ in answers] == ["miss", "shared", "shared"]
    assert [len(found.scores) for _, found in answers] == [2, 1, 2]
    assert len(caching.world.fake.requests) == 1


async def test_the_deadline_and_the_departure_of_the_first_are_not_the_others(caching: Caching) -> None:
    caching.world.hold()
    leaving = asyncio.create_task(caching.ask())
    late = asyncio.create_task(caching.ask(seconds=5))
    waiting = asyncio.create_task(caching.ask())
    await eventually(lambda: caching.world.fake.running == 1)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await eventually(lambda: len(caching.world.fake.requests) == 2)  # of the next one
    await caching.world.time.skip(6)
    with pytest.raises(DeadlinePassed):
        await late
    await eventually(lambda: len(caching.world.fake.requests) == 3)
    caching.world.let_answer()

    assert (await waiting)[0] == "miss"


async def test_request_for_a_version_never_shares_the_answer_of_a_newer_one(caching: Caching) -> None:
    """A request without a version may get it: the worker has not known yet that Triton has loaded one."""
    caching.world.hold()
    asking = [asyncio.create_task(caching.ask(version=version)) for version in (None, None, 1)]
    await eventually(lambda: caching.world.fake.running == 2)
    caching.world.fake.model_versions = ["1", "2"]
    caching.world.let_answer()
    answers = await asyncio.gather(*asking)

    assert [(result, found.version) for result, found in answers] == [("miss", "2"), ("shared", "2"), ("miss", "1")]


async def test_hits_and_what_they_save_are_counted(open_table: OpenTable) -> None:
    metrics = Metrics(open_table(), "0")
    async with open_caching(metrics) as caching:
        for data in (SCENE, SCENE, OTHER):
            await caching.ask(data)
    samples = {(sample.name, *sample.labels.values()): sample.value for family in metrics.collect() for sample in family.samples}

    assert samples["api_cache_requests_total", "miss"] == 2
    assert samples["api_cache_requests_total", "hit"] == 1
    assert samples["api_cache_saved_seconds_sum",] > 0
    assert samples["api_cache_bytes",] > 0
