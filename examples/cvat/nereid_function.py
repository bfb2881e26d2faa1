"""Annotate a CVAT task with what Nereid finds. Runs on any machine that can reach both; CVAT itself need not reach Nereid.

cvat-cli task auto-annotate TASK_ID --function-file nereid_function.py -p url=str:http://localhost:4603 --allow-unmatched-labels

Parameters: `url`; `model`, by default the gateway's. The environment variable NEREID_KEY contains the API key, if any.
"""

import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import cvat_sdk.auto_annotation as cvataa
import urllib3
from cvat_sdk import models
from PIL import Image

_LABEL_TYPES = {"detection": "rectangle", "obb": "rectangle", "segmentation": "polygon", "pose": "skeleton"}
"""Types of labels by the task of the model."""
# If the gateway is busy: at once, and after 2 and 4 s. A proxy's Retry-After could be hours.
_RETRIES = urllib3.Retry(
    3,
    allowed_methods=None,
    status_forcelist=[HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE],
    backoff_factor=1,
    respect_retry_after_header=False,
    raise_on_status=False,
)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:  # no JSON, or other members
        raise cvataa.BadFunctionError(f"the answer is not that of Nereid, or not of the same model: {error!r}") from error


class _Nereid:
    def __init__(self, url: str, model: str) -> None:
        self._url = url.rstrip("/")
        self._model = model or self._ask("GET", "/models")["default"]
        route = self._ask("GET", "/routes").get(self._model)  # a name that stands for a model
        name = route["to"].partition(":")[0] if route else self._model
        described = self._ask("GET", f"/models/{quote(name, safe='')}")
        if described["task"] not in _LABEL_TYPES:
            reason = described["detail"] or f"its task is {described['task']}"
            raise cvataa.BadFunctionError(f"{self._model} finds no objects: {reason}")
        # Of several classes of one name, only the first is a label: CVAT needs unique names.
        self._labels = _number(described["classes"])
        self._points = _number(described["keypoints"])
        kind = _LABEL_TYPES[described["task"]]
        self.spec = cvataa.DetectionFunctionSpec(labels=[self._to_label(name, id_, kind) for name, id_ in self._labels.items()])

    def detect(self, context: cvataa.DetectionFunctionContext, image: Image.Image) -> list[models.LabeledShapeRequest]:
        """Return the objects in an image."""
        file = io.BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=95)
        threshold = 0.5 if context.conf_threshold is None else context.conf_threshold
        path = f"/predict/{quote(self._model, safe='')}?boxes=pixel&max_detections=300&confidence={threshold}"
        with _reading():
            answer = self._ask("POST", path, body=file.getvalue(), headers={"Content-Type": "image/jpeg"})
            return [shape for group, found in enumerate(answer["detections"], 1) for shape in self._shapes(found, group, threshold)]

    def _to_label(self, name: str, id_: int, kind: str) -> models.PatchedLabelRequest:
        if kind == "skeleton":
            return cvataa.skeleton_label_spec(name, id_, [cvataa.keypoint_spec(*point) for point in self._points.items()])
        return cvataa.label_spec(name, id_, type=kind)

    def _shapes(self, found: dict[str, Any], group: int, threshold: float) -> Iterator[models.LabeledShapeRequest]:
        """Yield the shapes of an object: a polygon for each part of its mask, or one shape; none if no keypoint is visible."""
        id_ = self._labels[found["class_name"]]
        if "mask" in found:
            grouped = {"group": group} if len(found["mask"]) > 1 else {}
            for part in found["mask"]:
                yield cvataa.shape(id_, type="polygon", points=part, **grouped)
        elif "keypoints" in found:
            visible = [point.get("confidence", 1) >= threshold for point in found["keypoints"]]
            if any(visible):
                yield cvataa.skeleton(
                    id_,
                    [
                        cvataa.keypoint(self._points[point["name"]], [point["x"], point["y"]], outside=not is_visible)
                        for point, is_visible in zip(found["keypoints"], visible, strict=True)
                    ],
                )
        elif "corners" in found:  # CVAT turns a rectangle about its centre, clockwise
            first, second, third, _ = corners = found["corners"]
            x, y = (sum(values) / 4 for values in zip(*corners, strict=True))
            width, height = math.dist(first, second), math.dist(second, third)
            box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
            yield cvataa.shape(id_, type="rectangle", points=box, rotation=math.degrees(found["rotation"]))
        else:
            yield cvataa.shape(id_, type="rectangle", points=[found[name] for name in ("x1", "y1", "x2", "y2")])

    def _ask(self, method: str, path: str, **request: Any) -> Any:  # noqa: ANN401 - any JSON
        key = os.environ.get("NEREID_KEY", "").strip()  # an error would show one with a line break
        headers = ({"X-API-Key": key} if key else {}) | request.pop("headers", {})
        # No redirect, which could take the key elsewhere.
        options = {"timeout": 30, "retries": _RETRIES, "redirect": False}
        try:
            response = urllib3.request(method, self._url + path, headers=headers, **options, **request)
        except urllib3.exceptions.HTTPError as error:
            raise cvataa.BadFunctionError(f"Nereid does not answer: {error}") from error
        if response.status != HTTPStatus.OK:
            raise cvataa.BadFunctionError(f"Nereid answers {response.status} to {path}: {response.data.decode(errors='replace')}")
        return response.json()


def _number(names: list[str]) -> dict[str, int]:
    """Return the index of each name, of several equal ones of the first."""
    return {name: names.index(name) for name in names}


def create(url: str = "http://localhost:4603", model: str = "") -> _Nereid:
    """Make the function; its labels are the classes of the model."""
    with _reading():
        return _Nereid(url, model)
