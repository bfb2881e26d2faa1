"""What inferences show: with a real Triton, or one that answers as it is told."""

import asyncio

import grpc
import numpy as np
import pytest

from app.doctor import batching, inference
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.statistics import read_statistics
from tests.doctor.setups import assert_useful, examine
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.support import eventually

Capture = pytest.CaptureFixture[str]
Fake = tuple[FakeTriton, TritonClient]
FILE = "config.pbtxt"


async def count_images(settings: Settings) -> int:
    client = TritonClient(settings.triton_address)
    try:
        return (await read_statistics(client, 5))[settings.model, "1"].inferences
    finally:
        await client.close()


async def measure(fake_triton: Fake, timeout_seconds: float = 60) -> dict[str, Finding]:
    """Measure a fake; returns the findings by their codes."""
    model = batching.read({"name": "tiny", "dynamic_batching": {}})
    found = inference.measure(fake_triton[1], SPEC, model, FILE, timeout_seconds)
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


def test_triton_gets_no_more_than_is_told(small: Settings, capsys: Capture) -> None:
    before = asyncio.run(count_images(small))
    examine(small, capsys)

    assert asyncio.run(count_images(small)) - before == 4


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
    monkeypatch.setattr(inference, "_PATIENCE_SECONDS", 0.1)
    found = await measure(good)

    assert_useful(found["inference"], Severity.FAILURE, says=["no answer for 0.1 s"], fix="log")
    assert (fake.running, fake.cancelled) == (1, 0)
    fake.may_answer.set()
    await eventually(lambda: fake.running == 0)
    assert fake.cancelled == 0


async def test_a_triton_that_does_not_tell_its_statistics(good: Fake) -> None:
    found = await measure(good)

    assert_useful(found["statistics"], Severity.WARNING, says=["statistics"], fix="restrict")
