"""Triton's statistics of its models."""

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.embedded.server import EmbeddedTriton
from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.statistics import read_statistics
from tests.fakes.triton import FakeTriton


def add_version(fake: FakeTriton, name: str, version: str, *counters: int) -> None:
    """Set the counters that a fake returns for a version, in the order of `ModelStatistics`."""
    added = fake.statistics.model_stats.add(name=name, version=version, inference_count=counters[0], execution_count=counters[1])
    added.inference_stats.queue.MergeFrom(messages.StatisticDuration(count=counters[2], ns=counters[3]))
    added.inference_stats.compute_infer.MergeFrom(messages.StatisticDuration(count=counters[4], ns=counters[5]))


async def test_real_triton_counts_images_and_batches(settings: Settings, triton: EmbeddedTriton) -> None:
    assert triton.poll() is None
    model = "decoded_head"  # which no other test asks
    client = TritonClient(settings.triton_address)
    spec = from_triton_config(*await client.read_config(model))
    before = await read_statistics(client, 5)
    for images in (3, 1, 1):
        await client.infer(spec, list(np.zeros((images, *spec.image_shape), np.float32)), timeout_seconds=30)
    after = await read_statistics(client, 5)
    while after[model, "1"].inferences < before[model, "1"].inferences + 5:  # Triton counts after it has answered
        after = await read_statistics(client, 5)
    await client.close()
    done = after[model, "1"].since(before[model, "1"])

    assert (done.inferences, done.executions, done.queue_count, done.compute_infer_count) == (5, 3, 3, 3)
    assert done.batch_size == pytest.approx(5 / 3)
    assert min(done.queue_ns, done.compute_infer_ns) > 0
    assert after["extra_string", "1"] == before["extra_string", "1"]
