"""What Roboflow's services say of models and of the objects in an image.

Source: roboflow/inference, inference/core/entities/responses/inference.py; inference_sdk/http/entities.py.
"""

import secrets
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from app.api.answering.native import objects, rounded
from app.model.heads import PoseHead, Task
from app.model.spec import ModelSpec
from app.pipeline.results import Detections

TASK_TYPES: dict[Task, str] = {
    "detection": "object-detection",
    "segmentation": "instance-segmentation",
    "pose": "keypoint-detection",
}
_SCORE_DIGITS = 4


def to_inference(
    found: Detections, id_: str, milliseconds: float, keypoint_confidence: float, picture: bytes | None = None
) -> dict[str, Any]:
    """Convert the detections in an image, by descending confidence; centre and size in pixels of the upright image."""
    predictions = [
        {
            "x": x,
            "y": y,
            "width": width,
            "height": height,
            "confidence": score,
            "class": name,
            "class_id": class_id,
            "detection_id": random_uuid(),
            **shape,
        }
        for ((x, y, width, height), score, class_id, name), shape in zip(
            objects(found, "cxcywh"), _shapes(found, keypoint_confidence), strict=False
        )
    ]
    return {
        "inference_id": id_,
        "time": round(milliseconds / 1e3, 6),
        "image": {"width": found.width, "height": found.height},
        "predictions": predictions,
        **({} if picture is None else {"visualization": picture}),
    }


def _shapes(found: Detections, keypoint_confidence: float) -> Iterator[dict[str, Any]]:
    """In pixels; of a mask, the part with the most vertices, as Roboflow's server does."""
    if found.masks is not None:
        for mask in found.masks:
            yield {"points": [{"x": x, "y": y} for part in sorted(mask.parts, key=len, reverse=True)[:1] for x, y in rounded(part)]}
    elif found.keypoints is not None and isinstance(found.spec.head, PoseHead):
        for own in found.keypoints:
            confidences = rounded(own[:, 2], _SCORE_DIGITS) if own.shape[1] > 2 else repeat(1.0)  # noqa: PLR2004 - x and y
            points = zip(found.spec.head.keypoint_names, rounded(own[:, :2]), confidences, strict=False)
            yield {
                "keypoints": [
                    {"x": x, "y": y, "confidence": confidence, "class_id": id_, "class": name}
                    for id_, (name, (x, y), confidence) in enumerate(points)
                    if confidence >= keypoint_confidence
                ]
            }
    else:
        yield from repeat({})


def to_description(spec: ModelSpec, model_id: str | None = None) -> dict[str, Any]:
    """Describe a model under the client's id for it, by default NAME/VERSION. Clients look up the id before they use it."""
    width, height = spec.input_size
    return {
        "model_id": model_id or f"{spec.name}/{spec.version}",
        "input_height": height,
        "input_width": width,
        "task_type": TASK_TYPES[spec.head.task],
        "batch_size": None,
    }


def random_uuid() -> str:
    """Return a version 4 UUID; `uuid` takes twice as long, and each object needs one."""
    digits = secrets.token_hex(16)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"
