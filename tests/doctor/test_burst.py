"""What inferences show: with a real Triton, or one that answers as it is told."""

import asyncio

import grpc
import msgspec
import numpy as np
import pytest

from app.doctor import batching, burst
from app.doctor.burst import Run
from app.doctor.finding import Finding, Severity
from app.model.spec import ModelSpec
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.statistics import ModelStatistics, read_statistics
from tests.doctor.setups import assert_useful, examine
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.support import eventually

Capture = pytest.CaptureFixture[str]
Fake = tuple[FakeTriton, TritonClient]
FILE = "config.pbtxt"
SINGLE, AT_ONCE = 4, 32
"""How many inferences there are one by one, and at once."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bursts have their full size on a busy machine as well."""
    monkeypatch.setattr(burst, "_MOST_SECONDS", 100.0)


async def count_images(settings: Settings) -> int:
    client = TritonClient(settings.triton_address)
    try:
        return (await read_statistics(client, 5))[settings.model, "1"].inferences
    finally:
        await client.close()


async def measure(
    fake_triton: Fake, queue: int = 0, timeout_seconds: float = 60, *, spec: ModelSpec = SPEC, with_burst: bool = True
) -> dict[str, Finding]:
    """Measure a fake, whose queue has this size; returns the findings by their codes."""
    policy = {"default_queue_policy": {"max_queue_size": queue}}
    model = batching.read({"name": "tiny", "dynamic_batching": policy})
    found = burst.measure(fake_triton[1], spec, model, FILE, timeout_seconds, with_burst=with_burst)
    return {finding.code: finding async for finding in found}


@pytest.fixture
def good(fake_triton: Fake) -> Fake:
    """A fake whose answers match its model's config."""
    fake_triton[0].answer = infer_response(output0=np.zeros((2, 6), np.float32))
    return fake_triton


async def test_a_model_that_is_too_slow_for_the_deadline(good: Fake) -> None:
    found = (await measure(good, timeout_seconds=0))["inference"]

    assert found.severity is Severity.FAILURE
    assert "later than the deadline of 0 s" in found.message


@pytest.mark.system
def test_batches_of_a_model_without_batching_stay_at_one(hurting: Settings, capsys: Capture) -> None:
    examined = examine(msgspec.structs.replace(hurting, model="one_by_one"), capsys, with_burst=True)

    assert_useful(examined["batching"], Severity.WARNING, says=["no dynamic_batching", "8"], fix="dynamic_batching {")
    assert_useful(examined["batch_size"], Severity.WARNING, says=["1.0 images", "8 fit"], fix="add dynamic_batching")
    assert "batches of 1.0" in examined["burst"].message


@pytest.mark.system
def test_requests_of_a_burst_are_joined(hurting: Settings, capsys: Capture) -> None:
    """Nothing is to be done about a model whose config lets Triton do that."""
    examined = examine(hurting, capsys, with_burst=True)

    assert f"{AT_ONCE} images at once took" in examined["burst"].message
    assert "batches of 1." not in examined["burst"].message
    assert not examined.all("batch_size")


@pytest.mark.parametrize(("with_burst", "images"), [(True, SINGLE + AT_ONCE), (False, SINGLE)])
def test_triton_gets_no_more_than_is_told(small: Settings, capsys: Capture, images: int, *, with_burst: bool) -> None:
    before = asyncio.run(count_images(small))
    examine(small, capsys, with_burst=with_burst)

    assert asyncio.run(count_images(small)) - before == images


@pytest.mark.parametrize(("queue", "images"), [(0, AT_ONCE), (20, 10), (1000, AT_ONCE), (6, 0)])
async def test_half_of_the_queue_is_left_to_others(good: Fake, queue: int, images: int) -> None:
    found = await measure(good, queue)

    assert len(good[0].requests) == SINGLE + images
    assert found["burst"].severity is Severity.OK
    assert ("left out" in found["burst"].message) is (images == 0)


@pytest.mark.parametrize(("limit", "value", "images"), [("_MOST_SECONDS", 0.0, 0), ("_MOST_BYTES", 5 * SPEC.image_bytes, 5)])
async def test_a_burst_is_limited(good: Fake, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, images: int) -> None:
    """A slow model would keep Triton busy for too long, and all images are in memory at the same time."""
    monkeypatch.setattr(burst, limit, value)
    found = await measure(good)

    assert len(good[0].requests) == SINGLE + images
    assert ("left out" in found["burst"].message) is (images == 0)


async def test_a_burst_that_is_rejected(good: Fake) -> None:
    good[0].next_refusals = [None] * SINGLE + [(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")] * 3
    found = await measure(good)

    assert_useful(found["burst"], Severity.WARNING, says=["3 of them failed", "Exceeds maximum queue size"], fix="max_queue_size")


@pytest.mark.parametrize(
    ("message", "code", "says", "fix"),
    [
        ("out of memory\nAt:\n  model.py", "inference", ["tiny fails", "out of memory"], "log"),
        (
            "Stub process 'tiny_0_0' is not healthy.",
            "model_process",
            ["tiny is ready", "'tiny_0_0' is not healthy"],
            "start Triton",
        ),
    ],
)
async def test_a_model_that_does_not_run(good: Fake, message: str, code: str, says: list[str], fix: str) -> None:
    good[0].refusal = grpc.StatusCode.INTERNAL, message
    found = await measure(good)

    assert_useful(found[code], Severity.FAILURE, says=says, fix=fix)
    assert len(good[0].requests) == 1


async def test_outputs_that_contradict_the_config(fake_triton: Fake) -> None:
    fake_triton[0].answer = infer_response(output0=np.zeros((2, 5), np.float32))
    found = await measure(fake_triton)

    assert_useful(found["inference"], Severity.FAILURE, says=["(2, 5)"], fix="log")


async def test_a_triton_that_hangs_is_left_alone(good: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inferences are not cancelled, which could crash it, while others may still be answered."""
    fake, _ = good
    fake.may_answer.clear()
    monkeypatch.setattr(burst, "_PATIENCE_SECONDS", 0.1)
    found = await measure(good)

    assert_useful(found["inference"], Severity.FAILURE, says=["no answer for 0.1 s"], fix="log")
    assert (fake.running, fake.cancelled) == (1, 0)
    fake.may_answer.set()
    assert await eventually(lambda: fake.running == 0)
    assert fake.cancelled == 0


async def test_a_triton_that_does_not_tell_its_statistics(good: Fake) -> None:
    found = await measure(good)

    assert_useful(found["statistics"], Severity.WARNING, says=["statistics"], fix="restrict")
    assert "a second" in found["burst"].message
    assert "batches" not in found["burst"].message


MILLISECOND = 10**6
QUEUED = ModelStatistics(32, 32, 32, 32 * 50 * MILLISECOND, 32, 32 * 10 * MILLISECOND)


@pytest.mark.parametrize(
    ("counted", "largest", "is_bad"),
    [
        (QUEUED, 8, True),
        (ModelStatistics(32, 20, 32, 32 * 50 * MILLISECOND, 32, 32 * 10 * MILLISECOND), 8, False),
        (ModelStatistics(32, 32, 32, 32 * 1 * MILLISECOND, 32, 32 * 10 * MILLISECOND), 8, False),
        (QUEUED, 1, False),
        (ModelStatistics(40, 10, 20, 0, 20, 0), 1, False),
    ],
    ids=["single images", "batches", "no queue", "a model for single images", "images of others"],
)
def test_batches_hurt_if_they_are_single_images_and_requests_queue(counted: ModelStatistics, largest: int, *, is_bad: bool) -> None:
    """A free instance takes a single image, which is right. Triton also counts the images of other clients."""
    model = batching.read({"name": "m", "max_batch_size": largest, "dynamic_batching": {}})
    findings = {finding.code: finding for finding in burst.judge(Run(32, 1.0, [], [], counted), model, FILE)}

    assert set(findings) == ({"burst", "batch_size"} if is_bad else {"burst"})
    assert ("beside 8 of others" in findings["burst"].message) is (counted.inferences == 40)
    if is_bad:
        assert_useful(findings["batch_size"], Severity.WARNING, says=["1.0 images", "50 ms", "10 ms"], fix="instance_group")
