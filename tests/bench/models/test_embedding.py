"""The simulated model of vectors, in a real Triton."""

import zlib
from pathlib import Path

import numpy as np
import pytest

from app.model.heads import EmbeddingHead
from app.model.spec import from_triton_config
from app.triton.client import TritonClient
from bench.harness.triton import embedded_triton
from bench.models.clusters import CLUSTERS, make_vector
from bench.models.repository import write_embedding


async def test_the_vector_of_the_model_is_that_of_the_pixels(tmp_path: Path) -> None:
    """So that a test which knows the pixels knows the vector."""
    write_embedding(tmp_path, 1)
    with embedded_triton(tmp_path, "embedding") as triton:
        client = TritonClient(triton.address)
        spec = from_triton_config(*await client.read_config("embedding"))
        images = [np.full(spec.image_shape, value, np.uint8) for value in (3, 200)]
        answer = await client.infer(spec, images, timeout_seconds=10)
        await client.close()

    assert spec.expect_head(EmbeddingHead).dimensions == 512
    expected = [make_vector(zlib.crc32(image.tobytes())) for image in images]
    assert answer.outputs["vector"] == pytest.approx(np.stack(expected), abs=1e-6)


def test_vectors_are_in_clusters() -> None:
    one, same, other = (make_vector(number) for number in (5, 5 + CLUSTERS, 6))

    assert one @ same == pytest.approx(0.6, abs=0.1)
    assert one @ other == pytest.approx(0, abs=0.2)
