"""The JSON of responses to Roboflow's clients.

Source: roboflow/inference, inference/core/entities/responses/inference.py and server_state.py.
"""

import secrets
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.api.answering.native import to_boxes, to_scores
from app.api.answering.schema import ImageSize
from app.model.spec import ModelSpec
from app.pipeline.call import Detections


class Prediction(msgspec.Struct, frozen=True):
    """One object; centre and size in pixels of the upright image."""

    x: float
    y: float
    width: float
    height: float
    confidence: float
    class_: str = msgspec.field(name="class")
    class_id: int
    detection_id: str


class Inference(msgspec.Struct, frozen=True):
    """The objects in one image, by descending confidence."""

    inference_id: str
    time: float
    """Duration of the request so far, in seconds."""
    image: ImageSize
    predictions: list[Prediction]
    visualization: bytes | UnsetType = UNSET
    """The picture with the objects drawn on it, in base64."""


class ModelDescription(msgspec.Struct, frozen=True):
    """A detector. Clients look up its id before they use it."""

    model_id: str
    input_height: int
    input_width: int
    task_type: Literal["object-detection"] = "object-detection"
    batch_size: None = None


class ModelDescriptions(msgspec.Struct, frozen=True):
    """The available detectors."""

    models: list[ModelDescription]


def to_inference(found: Detections, id_: str, milliseconds: float, picture: bytes | UnsetType = UNSET) -> Inference:
    """Convert the detections in an image."""
    predictions = [
        Prediction(x, y, width, height, score, found.spec.class_name(class_id), class_id, _random_uuid())
        for (x, y, width, height), score, class_id in zip(
            to_boxes(found, "cxcywh"), to_scores(found.scores), found.class_ids.tolist(), strict=True
        )
    ]
    return Inference(id_, round(milliseconds / 1e3, 6), ImageSize(found.width, found.height), predictions, picture)


def to_description(spec: ModelSpec, model_id: str | None = None) -> ModelDescription:
    """Describe a detector under the client's id for it, by default NAME/VERSION."""
    width, height = spec.input_size
    return ModelDescription(model_id or f"{spec.name}/{spec.version}", height, width)


def _random_uuid() -> str:
    """Return a version 4 UUID; `uuid` takes twice as long, and each object needs one."""
    digits = secrets.token_hex(16)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
