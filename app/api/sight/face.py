"""Faces as JSON."""

import msgspec
from msgspec import UNSET, UnsetType

from app.api.answering.native import to_scores
from app.api.sight.image import to_fractions
from app.errors import UnsupportedModel
from app.pipeline.results import Detections, StepResult

_LANDMARKS = 5


class Face(msgspec.Struct):
    """A face."""

    box: list[float]
    """x1 y1 x2 y2 as fractions of the upright image."""
    landmarks: list[float]
    """x y of both eyes, the nose and the corners of the mouth, as fractions of the image; the left ones are first."""
    score: float
    """Of the detector, from 0 to 1."""
    quality: float
    """How suitable the face is for telling whose it is, from 0 to 1: how certain, large and frontal it is."""
    embedding: list[float] | UnsetType | None = UNSET
    """In `/analyze`: the vector that tells whose it is, of length 1; null if it is not wanted, or there is none."""


def to_faces(found: StepResult) -> list[Face]:
    """Convert faces to their JSON objects, by descending score; raise UnsupportedModel if they do not have five landmarks."""
    if not isinstance(found, Detections) or found.keypoints is None or found.keypoints.shape[1] != _LANDMARKS:
        raise UnsupportedModel(f"{found.spec.name} does not find the {_LANDMARKS} landmarks of a face")
    points = found.keypoints
    boxes, landmarks = (to_fractions(each, found.width, found.height) for each in (found.boxes, points[..., :2]))
    qualities = to_scores(found.qualities)
    return list(map(Face, boxes, landmarks, to_scores(found.scores), qualities))
