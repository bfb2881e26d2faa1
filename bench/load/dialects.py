"""Requests of each dialect, each paired with a request for the same image in the gateway's own interface.

To add a dialect, write a function and add it to `PAIRS`.
"""

import base64
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

CONFIDENCE = 0.4
"""Minimum confidence in every request."""

_IOU = 0.3


class Request(NamedTuple):
    """A POST request."""

    path: str
    headers: dict[str, str]
    body: bytes


class Pair(NamedTuple):
    """Two equivalent requests."""

    own: Request
    """Request in the gateway's own interface, with the same kind of body."""
    other: Request
    """Request in the dialect."""


def deepstack(image: bytes, _model: str) -> Pair:
    """DeepStack and CodeProject.AI."""
    return Pair(_own_form(image), _form("/v1/vision/detection", {"image": image}, {"min_confidence": CONFIDENCE}))


def roboflow(image: bytes, model: str) -> Pair:
    """Roboflow's self-hosted server. Its clients name a version, and it always suppresses overlapping boxes."""
    members = {"model_id": f"{model}/1", "image": {"type": "base64", "value": _text(image)}}
    options = {"confidence": CONFIDENCE, "iou_threshold": _IOU}
    return Pair(_own_json(image, model=model, version=1, iou=_IOU), _json("/infer/object_detection", {**members, **options}))


def ultralytics(image: bytes, _model: str) -> Pair:
    """Ultralytics' platform."""
    return Pair(_own_form(image), _form("/predict", {"file": image}, {"conf": CONFIDENCE}))


def nim(image: bytes, _model: str) -> Pair:
    """NVIDIA NIM for object detection."""
    members = {"input": [{"type": "image_url", "url": f"data:image/jpeg;base64,{_text(image)}"}], "threshold": CONFIDENCE}
    return Pair(_own_json(image), _json("/v1/infer", members))


PAIRS: dict[str, Callable[[bytes, str], Pair]] = {
    "deepstack": deepstack,
    "roboflow": roboflow,
    "ultralytics": ultralytics,
    "nim": nim,
}
"""Functions by dialect that make the requests from an encoded image and the name of the default model."""


def _own_form(image: bytes) -> Request:
    return _form("/detect", {"image": image}, {"confidence": CONFIDENCE})


def _own_json(image: bytes, **members: Any) -> Request:  # noqa: ANN401
    return _json("/detect", {"image": _text(image), "confidence": CONFIDENCE, **members})


def _form(path: str, files: dict[str, bytes], fields: dict[str, Any]) -> Request:
    return _to_request(httpx.Request("POST", f"http://127.0.0.1{path}", files=files, data=fields))


def _json(path: str, members: dict[str, Any]) -> Request:
    return _to_request(httpx.Request("POST", f"http://127.0.0.1{path}", json=members))


def _to_request(made: httpx.Request) -> Request:
    body = made.read()
    return Request(made.url.path, {name: value for name, value in made.headers.items() if name != "host"}, body)


def _text(image: bytes) -> str:
    return base64.b64encode(image).decode("ascii")
