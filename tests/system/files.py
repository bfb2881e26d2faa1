"""What tests of models that take encoded files share: their requests, and the comparison with a model that takes pixels."""

from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.triton.client import TritonClient
from app.triton.messages import InferResult, bytes_element_size, write_bytes_element
from tests.reference_detector import QUERY, MatchCounts, boxes
from tests.support import IMAGES, SHARED, json

IMAGE_SETS = pytest.mark.parametrize(
    "images", [sorted(IMAGES.glob("*.jpg")), sorted((SHARED / "images").glob("*.jpg"))], ids=["sample", "coco"]
)


def file_tensor(file: bytes) -> NDArray[np.uint8]:
    tensor = np.empty(bytes_element_size(file), np.uint8)
    write_bytes_element(file, tensor)
    return tensor


async def infer_files(client: TritonClient, spec: ModelSpec, files: Sequence[bytes]) -> list[InferResult]:
    """Run one inference on several files; returns the result of each."""
    answer = await client.infer(spec, list(map(file_tensor, files)), timeout_seconds=30)
    return answer.split(spec, len(files))


async def check_boxes(gateway: httpx.AsyncClient, pixel_model: str, file_model: str, images: Sequence[Path]) -> None:
    """Compare the boxes of two models, by class at IoU 0.9 and confidence 0.25, over all images together."""
    if not images:
        pytest.skip("there are no images in ../shared/images")
    tally = MatchCounts()
    for path in images:
        of_pixels, of_file = [
            boxes(json(await gateway.post(f"/predict/{model}", params=QUERY, content=path.read_bytes())))
            for model in (pixel_model, file_model)
        ]
        tally.add(of_pixels, of_file)
    print(f"{file_model}: {tally}")  # noqa: T201

    assert tally.expected >= len(images) / 2
    assert tally.f1 >= 0.98
