"""Clients of DeepStack."""

from urllib.parse import urlsplit

import httpx
import pytest

from tests.callers.client import run
from tests.support import IMAGES, sample_image


@pytest.mark.client("deepstack-python")
def test_deepstack_python(gateway: str, own: httpx.Client) -> None:
    """Objects of a photo, with names, confidences and boxes of /detect."""
    address = urlsplit(gateway)
    found = run("deepstack-python", "deepstack_python", str(address.hostname), str(address.port), str(IMAGES / "chelsea.jpg"))
    expected = own.post("/detect?boxes=pixel&confidence=0.4", content=sample_image("chelsea.jpg")).json()["detections"]
    assert expected
    assert [(one["label"], one["x_min"]) for one in found] == [(one["class_name"], int(one["x1"])) for one in expected]
