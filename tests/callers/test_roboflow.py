"""The client of Roboflow."""

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.harness.ports import find_free
from bench.harness.processes import running
from tests.callers.client import run
from tests.callers.conftest import KEY, LINES, PAGE
from tests.processes import PATIENCE_SECONDS
from tests.support import IMAGES, sample_image

NAME = "inference-sdk"
PICTURE = "coffee.jpg"
PATH = str(IMAGES / PICTURE)

pytestmark = pytest.mark.client(NAME)


def detect(own: httpx.Client, **changes: str | float) -> list[dict[str, Any]]:
    """Return what the gateway itself finds with the default parameters of Roboflow; bbox is the centre and the size."""
    parameters: dict[str, str | float] = {"confidence": 0.4, "iou": 0.3, "boxes": "cxcywh", **changes}
    found: list[dict[str, Any]] = own.post("/detect", params=parameters, content=sample_image(PICTURE)).json()["detections"]
    return found


def boxes(answer: dict[str, Any]) -> list[list[Any]]:
    return [[one[name] for name in ("class", "confidence", "x", "y", "width", "height")] for one in answer["predictions"]]


def own_boxes(found: list[dict[str, Any]]) -> list[list[Any]]:
    return [[one["class_name"], one["confidence"], *one["bbox"]] for one in found]


def test_pictures(gateway: str, own: httpx.Client, tmp_path: Path) -> None:
    """`infer` and `infer_async` of a path, a URL, an array, a Pillow image and lists, with v1 and v0; read by `supervision`."""
    (port,) = find_free(1)
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(IMAGES)]
    with running(command, {}, port, f"/{PICTURE}", tmp_path / "http.log"):
        printed = run(NAME, "roboflow_calls", "infer", gateway, PATH, f"http://127.0.0.1:{port}/{PICTURE}")
    found, expected = printed["found"], own_boxes(detect(own))

    assert len(expected) > 1
    for answer in (*(found[name] for name in ("path", "url", "async", "v0", "v0 async")), *printed["each"], *printed["batch"]):
        assert boxes(answer) == expected
    assert len(printed["each"]) == len(printed["batch"]) == 2
    for name in ("array", "image", "smaller"):  # encoded again, by the client
        assert [one["class"] for one in found[name]["predictions"]] == [name for name, *_ in expected]
        for one, (_, _, *box) in zip(found[name]["predictions"], expected, strict=True):
            assert [one[side] for side in ("x", "y", "width", "height")] == pytest.approx(box, abs=20)
    corners, scores, names = printed["supervision"]
    assert names == [name for name, *_ in expected]
    assert scores == pytest.approx([score for _, score, *_ in expected])
    for (x1, y1, x2, y2), (_, _, *box) in zip(corners, expected, strict=True):
        assert [(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1] == pytest.approx(box, abs=0.01)


def test_configuration(gateway: str, own: httpx.Client) -> None:
    """`InferenceConfiguration`: thresholds, `class_filter`, `max_detections`, pictures and, with v0, `format`."""
    printed = run(NAME, "roboflow_calls", "configure", gateway, PATH)
    given = {"confidence": 0.3, "iou": 0.4, "max_detections": 2}
    usual = own_boxes(detect(own, **given))
    expected = dict.fromkeys(("usual", "picture", "json", "image_and_json"), usual)
    expected["filter"] = own_boxes(detect(own, **given, classes="cup"))
    expected["best"] = own_boxes(detect(own, **{**given, "confidence": 0.4}, agnostic=True))
    expected["dragons"] = []

    assert len(usual) == 2
    assert len(expected["filter"]) == 1
    assert printed["found"].pop("image") == {}
    assert {name: boxes(answer) for name, answer in printed["found"].items()} == expected
    assert printed["sizes"] == [[400, 600, 3]] * 3


def test_models_and_errors(gateway: str, own: httpx.Client) -> None:
    """Models listed, loaded and selected; the status and message of `HTTPCallErrorError`."""
    printed = run(NAME, "roboflow_calls", "models", gateway, PATH)
    model = {"task_type": "object-detection", "batch_size": None, "input_height": 640, "input_width": 640}

    assert printed["listed"] == printed["added"]["yolo11n/1"] == [{"model_id": "yolo11n/1", **model}]
    assert printed["added"]["yolo11n"] == [{"model_id": "yolo11n", **model}]
    missing = own.post("/predict/dragon", content=sample_image(PICTURE)).json()
    assert printed["errors"].pop("model") == [404, missing["detail"]]
    statuses = {name: status for name, (status, _) in printed["errors"].items()}
    assert statuses == {"version": 404, "image": 415, "unload": 404, "confidence": 400, "async": 400}
    assert "yolo11n has no version 7" in printed["errors"]["version"][1]
    assert printed["errors"]["confidence"][1] == "confidence: expected a number from 0 to 1"


def test_keys_and_retries(own: httpx.Client, locked: str, tmp_path: Path) -> None:
    """A key in each `api_key_transport`, and a wrong one; three tries while Triton is away (503)."""
    port, nobody = find_free(2)
    settings = {"NEREID_PORT": str(port), "NEREID_TRITON_ENDPOINTS": f"127.0.0.1:{nobody}", "NEREID_WORKERS": "1"}
    with running([sys.executable, "-m", "app", "api"], settings, port, "/livez", tmp_path / "alone.log") as alone:
        printed = run(NAME, "roboflow_calls", "keys", locked, PATH, alone.url, KEY)
        metrics = httpx.get(f"{alone.url}/metrics", timeout=PATIENCE_SECONDS).text

    assert [boxes(answer) for answer in printed["found"]] == [own_boxes(detect(own))] * 6
    (unauthorized, wrong), (unavailable, message) = printed["errors"]
    assert (unauthorized, unavailable) == (401, 503)
    assert "key" in wrong
    assert "Triton" in message
    assert 'api_requests_total{endpoint="/roboflow/{model}/{version}",status="503"} 3.0' in metrics


def test_text(sight_url: str, sight: httpx.Client, tmp_path: Path) -> None:
    """`ocr_image` with pp_ocr: a page, a list, and asynchronous; with doctr, its default: the error names what is missing."""
    (tmp_path / "page.png").write_bytes(PAGE)
    printed = run(NAME, "roboflow_calls", "text", sight_url, str(tmp_path / "page.png"), PATH)
    own = sight.post("/ocr/predict", content=PAGE).json()

    assert own["texts"] == LINES
    assert printed["plain"].pop("time") > 0
    assert printed["plain"] == {"result": own["full_text"], "image": None, "predictions": None, "parent_id": None}
    page, photo = printed["list"]
    assert (photo["result"], photo["predictions"], photo["image"]) == ("", [], {"width": 600, "height": 400})
    for answer in (page, printed["async"]):
        assert (answer["result"], answer["image"]) == (own["full_text"], {"width": 640, "height": 240})
        for one, region in zip(answer["predictions"], own["regions"], strict=True):
            assert (one["class"], one["confidence"]) == (region["text"], region["rec_score"])
            x, y = region["box"][::2], region["box"][1::2]
            corners = one["x"] - one["width"] / 2, one["y"] - one["height"] / 2, one["x"] + one["width"] / 2
            assert corners == pytest.approx((min(x), min(y), max(x)), abs=0.02)
    status, message = printed["doctr"]
    assert status == 404
    assert "no doctr" in message
