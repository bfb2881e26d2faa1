"""Annotate a CVAT task with what Nereid finds. Runs on any machine that can reach both; CVAT itself need not reach Nereid.

cvat-cli task auto-annotate TASK_ID --function-file nereid_function.py -p url=str:http://localhost:4603 --allow-unmatched-labels

Parameters: `url`; `model`, by default the gateway's. The environment variable NEREID_KEY contains the API key, if any.
The gateway's dialect `cvat` must be on, as it is by default.
"""

import io
import json
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
        function = self._ask("GET", f"/api/functions/{quote(self._model, safe='')}")
        labels = json.loads(function["metadata"]["annotations"]["spec"])
        self._labels = {label["name"]: label for label in labels}
        self.spec = cvataa.DetectionFunctionSpec(labels=[_to_label(label) for label in labels])

    def detect(self, context: cvataa.DetectionFunctionContext, image: Image.Image) -> list[models.LabeledShapeRequest]:
        """Return the objects in an image."""
        file = io.BytesIO()
        image.convert("RGB").save(file, "JPEG", quality=95)
        query = "" if context.conf_threshold is None else f"?threshold={context.conf_threshold}"
        headers = {"Content-Type": "image/jpeg", "X-Nuclio-Function-Name": self._model}
        with _reading():
            found = self._ask("POST", f"/api/function_invocations{query}", body=file.getvalue(), headers=headers)
            return [self._to_shape(one) for one in found]

    def _to_shape(self, found: dict[str, Any]) -> models.LabeledShapeRequest:
        label = self._labels[found["label"]]
        if found["type"] == "skeleton":
            ids = {point["name"]: point["id"] for point in label["sublabels"]}
            elements = [cvataa.keypoint(ids[one["label"]], one["points"], outside=one["outside"]) for one in found["elements"]]
            return cvataa.skeleton(label["id"], elements)
        others = {name: found[key] for name, key in (("group", "group_id"), ("rotation", "rotation")) if key in found}
        return cvataa.shape(label["id"], type=found["type"], points=found["points"], **others)

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


def _to_label(label: dict[str, Any]) -> models.PatchedLabelRequest:
    if label["type"] == "skeleton":
        points = [cvataa.keypoint_spec(point["name"], point["id"]) for point in label["sublabels"]]
        return cvataa.skeleton_label_spec(label["name"], label["id"], points)
    return cvataa.label_spec(label["name"], label["id"], type=label["type"])


def create(url: str = "http://localhost:4603", model: str = "") -> _Nereid:
    """Make the function; its labels are the classes of the model."""
    with _reading():
        return _Nereid(url, model)
