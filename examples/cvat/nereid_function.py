"""Annotate a CVAT task with rectangles from Nereid. Runs on any machine that can reach both; CVAT itself need not reach Nereid.

cvat-cli task auto-annotate TASK_ID --function-file nereid_function.py -p url=str:http://localhost:4603 --allow-unmatched-labels

Parameters: `url`; `model`, by default the gateway's. The environment variable NEREID_KEY contains the API key, if any.
"""

import io
import json
import os
import urllib.parse
import urllib.request
from typing import Any

import cvat_sdk.auto_annotation as cvataa
from cvat_sdk import models
from PIL import Image


class _Nereid:
    def __init__(self, url: str, model: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"X-API-Key": os.environ["NEREID_KEY"]} if "NEREID_KEY" in os.environ else {}
        known = self._ask("/models")
        self._model = model or known["default"]
        classes = next(one["classes"] for one in known["models"] if one["name"] == self._model)
        self._ids = {name: number for number, name in enumerate(classes)}
        labels = [cvataa.label_spec(name, number, type="rectangle") for name, number in self._ids.items()]
        self.spec = cvataa.DetectionFunctionSpec(labels=labels)

    def detect(self, context: cvataa.DetectionFunctionContext, image: Image.Image) -> list[models.LabeledShapeRequest]:
        """Return the objects in an image."""
        file = io.BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=95)
        confidence = 0.5 if context.conf_threshold is None else context.conf_threshold
        query = {"model": self._model, "boxes": "pixel", "confidence": confidence, "max_detections": 300}
        found = self._ask(f"/detect?{urllib.parse.urlencode(query)}", file.getvalue())["detections"]
        return [cvataa.rectangle(self._ids[one["class_name"]], [one["x1"], one["y1"], one["x2"], one["y2"]]) for one in found]

    def _ask(self, path: str, body: bytes | None = None) -> Any:  # noqa: ANN401 - any JSON
        headers = {**self._headers, "Content-Type": "image/jpeg"}
        request = urllib.request.Request(self._url + path, body, headers)  # noqa: S310 - the user's own URL
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
            return json.load(response)


def create(url: str = "http://localhost:4603", model: str = "") -> _Nereid:
    """Make the function; its labels are the classes of the model."""
    return _Nereid(url, model)
