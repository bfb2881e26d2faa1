"""Encoded images on their way to a real Triton, with nothing around the client."""

from pathlib import Path

import pytest

from bench.contestants.forwarding import TritonForwarder
from bench.harness.counters import read_counters
from bench.harness.triton import Triton
from tests.support import eventually, own_arenas, sample_image


@pytest.mark.parametrize("body", [sample_image("coffee.jpg"), bytes(2 << 20)], ids=["in a slot", "too large for a slot"])
async def test_every_body_is_one_inference(fixtures: Triton, body: bytes) -> None:
    """The shared memory is removed when the worker ends, not before."""
    before, arenas = read_counters(fixtures.url, "null_file"), own_arenas()
    forwarder = TritonForwarder(fixtures.settings.triton_address, Path(str(fixtures.settings.control_key_path)))
    for _ in range(3):
        await forwarder.forward(body)
    (arena,) = set(own_arenas()) - set(arenas)
    await forwarder.close()

    # Triton counts an inference after it has sent the answer.
    assert await eventually(lambda: read_counters(fixtures.url, "null_file").since(before).inferences == 3)
    assert not arena.exists()
