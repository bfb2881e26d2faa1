"""Networks as others have reported them: each finds what is in a picture, or `add` tells why not."""

import json
from pathlib import Path

import httpx
import pytest

from tests.processes import run_nereid, wait_for
from tests.reference_detector import iou
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import SHARED
from tests.system.test_model_versions import service

CASES = SHARED / "cases" / "models"
BOXES = {"red": (100, 150, 300, 400), "green": (400, 400, 600, 550), "blue": (500, 100, 700, 250)}
"""Corners in pixels of CASES/picture.png."""
RIGHT = {"b01", "b03", "x08", "r03", "e09", "e10", "b08", "z01", "z14", "r45"}
"""The cases that must not be refused."""


@pytest.mark.timeout(900)  # 24 commands, and as many loads
@pytest.mark.skipif(not CASES.is_dir(), reason="../shared has no networks that others have reported")
def test_reported_networks_are_right_or_told(tmp_path: Path) -> None:
    wrong = {}
    picture, files = (CASES / "picture.png").read_bytes(), {path.name for path in CASES.iterdir()}
    with service(tmp_path, instances=1) as serving:
        for case in json.loads((CASES / "cases.json").read_bytes()):
            name = Path(case["file"]).stem
            options = [CASES / option if option in files else option for option in case["args"]]
            done = run_nereid("add", CASES / case["file"], "--name", name, *options, **serving.settings)
            if done.returncode:
                if name[:3] in RIGHT or not done.stderr.startswith("nereid: "):
                    wrong[name] = done.stderr
                continue
            url = f"{serving.url}/predict/{name}?boxes=pixel"
            wait_for(lambda url=url: httpx.post(url, content=picture, timeout=30).is_success)  # type: ignore[misc]
            detections = httpx.post(url, content=picture, timeout=30).json()["detections"]
            expected = {label: BOXES[colour] for label, colour in zip(case["classes"], BOXES, strict=False)}
            boxes = {one["class_name"]: [one[side] for side in ("x1", "y1", "x2", "y2")] for one in detections}
            seen = {label for label, box in boxes.items() if iou(box, expected.get(label, (0, 0, 0, 0))) > 0.97}
            is_told = not detections and "it finds nothing in the photos" in done.stderr
            if not is_told and (seen != expected.keys() or len(detections) != len(expected)):
                wrong[name] = f"{detections}; {done.stderr}"

    assert wrong == {}
