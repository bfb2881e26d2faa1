"""Questions whose answers need an extra that is not installed, and others, which do not."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from app.host import extras
from tests.api.test_tasks import COMPOSED, FEATURES, IMAGE, gateway
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import ROOT, SCENE, captured_log, json

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


@pytest.mark.parametrize("path", ["/ocr/predict", "/analyze"])
async def test_text_without_its_extra_is_not_offered(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setitem(sys.modules, "pyclipper", None)
    extras.warn_once.cache_clear()
    log = captured_log(monkeypatch, extras)
    expected = "finding text needs what is not installed: pyclipper; pip install 'nereid-gateway[ocr]'"
    for _ in range(2):
        response = await client.post(path, content=SCENE)
        if path == "/analyze":
            answer = json(response)
            assert answer["errors"]["ocr"] == {"code": "not_offered", "detail": expected}
            assert "global_embedding" not in answer["errors"]
        else:
            problem = json(response, status=404)
            assert (problem["code"], problem["detail"]) == ("not_offered", expected)

    (call,) = log
    assert (call.method_name, call.kwargs["fix"]) == ("warning", "pip install 'nereid-gateway[ocr]'")


async def test_masks_as_rle_without_their_extra_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    async with gateway("segment", COMPOSED | FEATURES["segment"]) as (fake, client):
        asked = len(fake.requests)
        for query in ("masks=rle", "format=coco-results"):
            problem = json(await client.post(f"/segment?{query}", content=IMAGE), status=404)
            assert (problem["code"], "pip install 'nereid-gateway[masks]'" in problem["detail"]) == ("not_offered", True)
        assert len(fake.requests) == asked
        for query in ("masks=polygon", "masks=png", "masks=none"):
            assert json(await client.post(f"/segment?{query}", content=IMAGE))["num_detections"]
