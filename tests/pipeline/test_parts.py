"""Filling the input tensor from a part of a decoded image: its memory, and what a large one becomes."""

import numpy as np
import pytest

from app.imaging.patch import Patch
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline import preprocess
from app.pipeline.call import CallContext
from app.pipeline.preprocess import fill_from_patch
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget
from app.telemetry.timing import Timing
from app.triton.transport import Transport
from tests.fakes.triton import CONFIG
from tests.support import TABLE, workspace

CALL = CallContext(Deadline.after(60), Timing(), "abc", ANYBODY)


def spec(resize: str) -> ModelSpec:
    config = {
        **CONFIG,
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}],
        "parameters": {"resize": {"string_value": resize}},
    }
    return from_triton_config(config, "1")


@pytest.mark.parametrize(("resize", "is_copied"), [("letterbox", False), ("center_crop", True)])
def test_the_copies_of_a_part_count_as_memory_of_images(monkeypatch: pytest.MonkeyPatch, resize: str, *, is_copied: bool) -> None:
    space = workspace(Transport("inline"))._replace(memory=MemoryBudget(TABLE, "parts", 1))
    image, counted = np.zeros((400, 500, 3), np.uint8), list[int]()
    monkeypatch.setattr(preprocess, "write_pixels", lambda *_: counted.append(space.memory.used_bytes))
    corners = np.array([[0, 0], [400, 0], [400, 300], [0, 300]], np.float32)
    for part in (Patch(image, box=(0, 0, 400, 300)), Patch(image, corners=corners)):
        with Lease() as lease:
            fill_from_patch(part, spec(resize), space, CALL, lease)

    assert [used >= 400 * 300 * 3 for used in counted] == [is_copied, True]
    assert space.memory.used_bytes == 0


def test_a_large_part_is_cropped_from_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = np.mgrid[:2400, :3200]
    image = np.stack([rows // 10, columns // 13, (rows + columns) // 23], axis=-1).astype(np.uint8)
    part, space, used = Patch(image, box=(10, 20, 3190, 2390)), workspace(Transport("inline")), list[int]()
    space = space._replace(memory=MemoryBudget(TABLE, "parts", 2**30))
    monkeypatch.setattr(preprocess, "write_pixels", lambda *_: used.append(space.memory.used_bytes))

    def fill() -> np.ndarray:
        with Lease() as lease:
            return fill_from_patch(part, spec("center_crop"), space, CALL, lease)[0].tensor.copy()

    small = fill()
    monkeypatch.setattr(preprocess, "shrink", lambda pixels, _: np.ascontiguousarray(pixels))
    whole = fill()
    assert np.abs(small.astype(int) - whole).max() <= 1
    assert used[0] < used[1] / 16
