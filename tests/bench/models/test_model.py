"""The fixture models, in a real Triton."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from app.model.spec import InputFormat, ModelSpec, from_triton_config
from app.triton.client import TritonClient
from app.triton.messages import bytes_element_size, write_bytes_element
from bench.harness.counters import Counters, read_counters
from bench.harness.processes import ROOT
from bench.harness.triton import Triton
from bench.report.measurements import TritonUse
from tests.support import eventually

FIXTURES = sorted(path.parent.name for path in (ROOT / "bench" / "models").glob("*/config.pbtxt"))


def blank(spec: ModelSpec) -> NDArray[np.generic]:
    if spec.input_format is not InputFormat.FILE:
        return np.zeros(spec.image_shape, spec.dtype)
    content = b"not looked at"
    tensor = np.empty(bytes_element_size(content), np.uint8)
    write_bytes_element(content, tensor)
    return tensor


def read_log(triton: Triton) -> str:
    return Path(triton.settings.triton_home, "triton.log").read_text(encoding="utf-8")


async def read_spec(client: TritonClient, name: str) -> ModelSpec:
    return from_triton_config(*await client.read_config(name))


async def use_since(before: Counters, triton: Triton, name: str, inferences: int) -> TritonUse:
    """Return what a model has done once so many inferences are counted: Triton counts them after it has sent the answers."""
    await eventually(lambda: read_counters(triton.address, name).since(before).inferences == inferences)
    return read_counters(triton.address, name).since(before)


@pytest.mark.parametrize("name", FIXTURES)
async def test_a_fixture_is_understood_and_finds_what_its_config_says(fixture_client: TritonClient, name: str) -> None:
    """Nereid reads the config of every fixture; the answers of all but one have no rows."""
    spec = await read_spec(fixture_client, name)
    answer = await fixture_client.infer(spec, [blank(spec)], timeout_seconds=10)

    assert spec.input_size == ((320, 320) if name.startswith("wait") else (640, 640))
    assert answer.outputs[spec.output_names[0]].tolist() == [[30 if name == "sim_gpu_masks" else 0]]
    assert answer.outputs[spec.output_names[1]].shape == (1, 300, 4)


async def test_the_simulated_gpu_answers_many_requests_in_one_batch(fixtures: Triton, fixture_client: TritonClient) -> None:
    """Requests at the same time share the wait; without batching each waits for itself."""
    used = {}
    for name in ("sim_gpu_file", "sim_gpu_batch1_file"):
        spec = await read_spec(fixture_client, name)
        before = read_counters(fixtures.address, name)
        await asyncio.gather(*(fixture_client.infer(spec, [blank(spec)], timeout_seconds=10) for _ in range(64)))
        used[name] = await use_since(before, fixtures, name, 64)

    assert used["sim_gpu_batch1_file"].batches == {"1": 64}
    assert used["sim_gpu_file"].executions <= 32


async def test_a_fixture_writes_nothing_into_the_log_of_triton(fixtures: Triton, fixture_client: TritonClient) -> None:
    """Whatever its process wrote for each inference would be part of what is measured."""
    spec = await read_spec(fixture_client, "null")
    await fixture_client.infer(spec, [blank(spec)], timeout_seconds=10)

    assert "Traceback" not in read_log(fixtures)
