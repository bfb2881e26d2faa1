"""Parse Label Studio's requests: the images of tasks, and the controls of the project.

Source: `MLApi._prep_prediction_req` in label_studio/ml/api_connector.py.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from app.api.batch.body import MAX_IMAGES, ImageList, items_of
from app.api.dialects.label_studio import labeling_config
from app.api.dialects.label_studio.labeling_config import Control
from app.api.receiving import json_body
from app.api.receiving.json_body import JSON_ERRORS, decode_base64
from app.errors import MalformedRequest, UrlNotAllowed
from app.pipeline.batch_request import Image
from app.remote.address import TrustedOrigin, is_address

_UNNAMED = "$undefined$"
"""Key of data that was imported into Label Studio without a name."""
_JPEG = "/9j/"
"""Prefix of a JPEG in base64, which must not be taken for a path."""
_EXAMPLE = '{"tasks": [{"data": {"image": "https://..."}}], "label_config": "<View>...</View>"}'


class Tasks(NamedTuple):
    """The images of the tasks, and the controls to fill in."""

    images: list[Image]
    """The images, at least one."""
    controls: Sequence[Control]
    """The controls, at least one; all are for the same `Image`."""


class _Prediction(msgspec.Struct, frozen=True):
    tasks: ImageList
    label_config: str


class _Setup(msgspec.Struct, frozen=True):
    label_config: str | None = msgspec.field(default=None, name="schema")


def read_tasks(data: bytes, content_type: str, origin: TrustedOrigin | None) -> Tasks:
    """Parse a request for predictions. If there are too many tasks, only the first one is read.

    Args:
        data: The body.
        content_type: Its `Content-Type` header.
        origin: The origin of Label Studio; None if it is not configured.

    Raises:
        UnsupportedMediaType: The body is not JSON.
        MalformedRequest: The body has the wrong structure, no tasks, or no control for rectangles on images.
    """
    prediction = json_body.decode(data, content_type, _Prediction, _EXAMPLE)
    tasks = items_of(prediction.tasks)
    if not tasks:
        raise MalformedRequest(f"there are no tasks; expected {_EXAMPLE}")
    controls = labeling_config.read(prediction.label_config)
    if not controls:
        raise MalformedRequest("the labeling configuration has no RectangleLabels for an Image with a value such as $image")
    kind = _task_type(controls[0].key)
    return Tasks([_to_image(task, kind, origin) for task in (tasks if len(tasks) <= MAX_IMAGES else tasks[:1])], controls)


def read_setup(data: bytes, content_type: str) -> Sequence[Control]:
    """Parse a setup request; return the controls of the project, which may be empty.

    Raises:
        UnsupportedMediaType: The body is not JSON.
        MalformedRequest: The body has the wrong structure.
    """
    config = json_body.decode(data, content_type, _Setup, '{"schema": "<View>...</View>"}').label_config
    return labeling_config.read(config) if config else ()


@lru_cache(maxsize=64)
def _task_type(key: str) -> type[Any]:
    """Make the type of a task with its image at a key. It is a Struct, which ignores any number of other keys."""
    names = {"image": key, "unnamed": _UNNAMED}
    fields = [(field, str | None, None) for field in names if field == "image" or key != _UNNAMED]
    try:
        data = msgspec.defstruct("_Data", fields, rename=names)
    except ValueError as error:  # not a valid JSON name
        raise MalformedRequest("the Image of the labeling configuration has a value that is not supported") from error
    return msgspec.defstruct("_Task", [("data", data)])


def _to_image(task: msgspec.Raw, kind: type[Any], origin: TrustedOrigin | None) -> Image:
    """Return the decoded image or its URL. Return, not raise, the error if there is neither."""
    try:
        values = msgspec.structs.astuple(msgspec.json.decode(task, type=kind).data)
    except JSON_ERRORS:
        values = ()
    text = next(filter(None, values), "").strip()
    if not text:
        return MalformedRequest("the task has no image where the labeling configuration says")
    if is_address(text) or (text.startswith("/") and not text.startswith(_JPEG)):
        return _to_address(text, origin)
    try:
        return decode_base64(text) or MalformedRequest("the image is empty")
    except MalformedRequest:
        return MalformedRequest("the image is neither an address nor base64")


def _to_address(text: str, origin: TrustedOrigin | None) -> Image:
    """Return the URL of an image in Label Studio, or any other text unchanged: it is checked later like any URL."""
    if origin is not None:
        try:
            return origin.parse(text) or text
        except UrlNotAllowed as error:
            return error
    if text.startswith("/"):
        return UrlNotAllowed("the image is in Label Studio, and NEREID_LABEL_STUDIO_URL does not say where")
    return text
