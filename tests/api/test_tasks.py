"""Hostile outputs of models that find more than boxes; and questions whose answers need an extra that is not installed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest

from app.errors import GatewayFull
from app.host import extras
from app.main import create_app
from app.resilience.fairness import Caller
from app.resilience.memory import MemoryBudget, Reservation
from tests.api.conftest import settings_for
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.support import ROOT, SCENE, json, started

Outputs = dict[str, np.ndarray]

IMAGE = cv2.imencode(".png", np.full((32, 64, 3), 255, np.uint8))[1].tobytes()
ROWS, ANCHORS = 5, 21
COMPOSED: Outputs = {
    "num_dets": np.array([ROWS], np.int32),
    "det_boxes": np.tile(np.array([2, 10, 30, 22], np.float32), (ROWS, 1)),
    "det_scores": np.full(ROWS, 0.9, np.float32),
    "det_classes": np.zeros(ROWS, np.int32),
}
PROTOTYPES: Outputs = {"prototypes": np.ones((2, 8, 8), np.float16)}
FEATURES: dict[str, Outputs] = {
    "segment": {"det_masks": np.ones((ROWS, 2), np.float32), **PROTOTYPES},
    "pose": {"det_keypoints": np.full((ROWS, 2, 3), 0.5, np.float32)},
    "obb": {"det_angles": np.full(ROWS, 0.5, np.float32)},
}
FEATURE_ROWS = {"segment": 2, "pose": 6, "obb": 1}
QUESTIONS = ("max_detections=300", "format=image", "format=coco-results")
MASKS = ("masks=rle&max_detections=300", "masks=png", "masks=none")


def hostile(outputs: Outputs) -> dict[str, Outputs]:
    """Return variants of the outputs of a model, by description; the first one are the outputs themselves."""
    found: dict[str, Outputs] = {"unchanged": outputs, "nothing": {}}
    for name in outputs.keys() - {"det_scores", "det_classes"}:  # as in detectors
        tensor = outputs[name]
        changed: dict[str, np.ndarray] = {
            "UINT8": tensor.astype(np.uint8),
            "empty": tensor[..., :0],
            "no rows": tensor[:0],
            "one row less": tensor[1:],
            "one column less": tensor[..., :-1],
            "flat": tensor.ravel(),
            "one number": tensor.ravel()[0],
            "another dimension": tensor[None],
        }
        values = (-1, 0, 1, ROWS + 1, 2**31 - 1) if tensor.dtype == np.int32 else (np.nan, np.inf, 0, -1, 6e4, 9e8, 3e38, -3e38)
        for value in values:
            with np.errstate(over="ignore"):  # in FP16
                changed[f"{value}"] = np.full_like(tensor, value)
            changed[f"{value} at an end"] = np.concatenate([tensor[:-1], changed[f"{value}"][-1:]])
            changed[f"{value} at the end of rows"] = np.concatenate([tensor[..., :-1], changed[f"{value}"][..., -1:]], axis=-1)
        found |= {f"{name}: {change}": outputs | {name: one} for change, one in changed.items()}
    if "num_dets" in outputs:
        for repeats in (0, 60):
            rows = {name: np.concatenate([each[:0], *[each] * repeats]) for name, each in outputs.items() if len(each) == ROWS}
            found[f"{repeats * ROWS} rows"] = outputs | rows | {"num_dets": np.array([repeats * ROWS], np.int32)}
    return found


@pytest.mark.parametrize("task", FEATURES)
@pytest.mark.parametrize("is_raw", [False, True], ids=["composed", "raw"])
async def test_hostile_outputs_are_answered_or_the_fault_of_the_model(task: str, *, is_raw: bool) -> None:
    """All dimensions of the outputs that may be dynamic are, so that Triton would send such tensors."""
    outputs = COMPOSED | FEATURES[task]
    if is_raw:
        head = np.full((5 + FEATURE_ROWS[task], ANCHORS), 0.5, np.float32)
        head[:4] = 16
        outputs = {"head": head} | (PROTOTYPES if task == "segment" else {})
    unexpected: dict[tuple[str, str], tuple[int, str]] = {}
    async with gateway(task, outputs) as (fake, client):
        for change, changed in hostile(outputs).items():
            fake.answer = infer_response(**changed)
            for question in (*QUESTIONS, *(MASKS if task == "segment" else ())):
                response = await client.post(f"/{task}?model=tiny&confidence=0&{question}", content=IMAGE)
                if response.status_code == 502 and change != "unchanged":
                    break  # as for the other questions, which read the same outputs
                if response.status_code != 200 or b":null" in response.content:
                    unexpected[change, question] = response.status_code, response.text[:200]

    assert unexpected == {}


@asynccontextmanager
async def gateway(task: str, outputs: Outputs) -> AsyncIterator[tuple[FakeTriton, httpx.AsyncClient]]:
    """A Triton whose only model has these outputs, and a client of an application that uses it."""
    types = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32"}
    metadata = {"task": task, "kpt_shape": [2, 3], "names": {0: "cat"}}
    fake = FakeTriton()
    fake.config = CONFIG | {
        "output": [
            {
                "name": name,
                "data_type": types[tensor.dtype.name],
                "dims": [-1 if size in {ROWS, ANCHORS, 8} else size for size in tensor.shape],
            }
            for name, tensor in outputs.items()
        ],
        "parameters": {"metadata": {"string_value": repr(metadata)}},
    }
    fake.answer = infer_response(**outputs)
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:
        yield fake, client


PROGRAM = """
import asyncio, sys
sys.modules.update(dict.fromkeys({modules}))
from app.main import create_app
from tests.support import SCENE, started

async def detect():
    async with started(create_app()) as client:
        print((await client.post("/detect", content=SCENE)).json()["num_detections"])

asyncio.run(detect())
"""


async def test_masks_of_a_batch_take_memory_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Reservation):
        def add(self, nbytes: int, *, is_refused: bool = True) -> None:
            raise GatewayFull(f"no room for {nbytes} bytes", "memory" if is_refused else "")

    def reserve(budget: MemoryBudget, caller: Caller, purpose: str = "") -> Reservation:
        return (Full if purpose == "the results of this batch" else Reservation)(purpose, caller, budget)

    async with gateway("segment", COMPOSED | FEATURES["segment"]) as (_, client):
        files = [("images", IMAGE)] * 3
        answered = await client.post("/segment/batch?model=tiny", files=files)
        alone = await client.post("/segment?model=tiny", content=IMAGE)
        monkeypatch.setattr(MemoryBudget, "reserve", reserve)
        refused = await client.post("/segment/batch?model=tiny", files=files)

    assert [result["detections"] for result in answered.json()["results"]] == [alone.json()["detections"]] * 3
    assert [failure["problem"]["code"] for failure in refused.json()["failures"]] == ["gateway_full"] * 3


async def test_gateway_without_any_extra_detects(tmp_path: Path) -> None:
    modules = {module.partition(".")[0] for names in extras.MODULES.values() for module in names}
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.array([[1, 2, 20, 30, 0.9, 0], [0] * 6], np.float32))
    async with serving(fake):
        given = {"TRITON_ENDPOINTS": fake.url, "MODEL": "tiny", "MODEL_REPOSITORY": str(tmp_path), "LOG_LEVEL": "error"}
        environment = os.environ | {f"NEREID_{name}": value for name, value in given.items()}
        command = [sys.executable, "-c", PROGRAM.format(modules=modules)]
        ran = await asyncio.to_thread(
            subprocess.run, command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )

    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "1\n", "")


async def test_text_without_its_extra_is_not_offered(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyclipper", None)
    expected = "finding text needs what is not installed: pyclipper; pip install 'nereid-gateway[ocr]'"
    problem = json(await client.post("/ocr/predict", content=SCENE), status=404)
    answer = json(await client.post("/analyze", content=SCENE))

    assert (problem["code"], problem["detail"]) == ("not_offered", expected)
    assert answer["errors"]["ocr"] == {"code": "not_offered", "detail": expected}
