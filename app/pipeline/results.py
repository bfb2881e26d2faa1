"""The results of models, one type for each kind of task; the version is that of the model that answered."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.model.spec import ModelSpec
from app.obb import boxes as oriented
from app.pose.faces import rate_faces
from app.segmentation.mask import Mask


class Detections(NamedTuple):
    """Detected objects of one image, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the upright image, clipped to it."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    width: int
    height: int
    """Size of the upright image, pixels."""
    spec: ModelSpec
    version: str
    masks: Sequence[Mask] | None = None
    """(n,) for a segmentation with masks."""
    keypoints: NDArray[np.float32] | None = None
    """(n, keypoints, 2 or 3) for a pose: x and y in pixels of the upright image, clipped to it, and the confidence, 0 to 1."""
    corners: NDArray[np.float32] | None = None
    """(n, 4, 2) for oriented boxes: x and y in pixels of the upright image, not clipped, clockwise from a long edge."""
    titles: Sequence[str] | None = None
    """(n,) what is drawn beside each, if not the name of its class."""

    @property
    def rotations(self) -> NDArray[np.float32]:
        """(n,) angles of oriented boxes in radians, from 0 to pi, clockwise from the x axis to the first edge."""
        assert self.corners is not None  # noqa: S101 - of oriented boxes only
        return oriented.to_rotations(self.corners)

    @property
    def qualities(self) -> NDArray[np.float32]:
        """(n,) how suitable faces, which have five keypoints, are for telling whose they are, 0 to 1."""
        assert self.keypoints is not None  # noqa: S101 - of faces only
        return rate_faces(self.keypoints, self.scores)


class Classifications(NamedTuple):
    """Classes of one image, by descending probability."""

    class_ids: NDArray[np.int32]
    """(n,)."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    width: int
    height: int
    spec: ModelSpec
    version: str


class TextRegions(NamedTuple):
    """Lines of text of one image, in reading order."""

    corners: NDArray[np.float32]
    """(n, 4, 2) x y in pixels of the upright image, within it, clockwise from the top left."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    width: int
    height: int
    spec: ModelSpec
    version: str

    def as_detections(self, titles: Sequence[str] | None = None) -> Detections:
        """Return the lines as oriented boxes of one class, with these titles, such as their texts."""
        boxes, ids = oriented.enclose(self.corners), np.zeros(len(self.scores), np.int32)
        spec = self.spec if self.spec.labels else msgspec.structs.replace(self.spec, labels=("text",))
        size = self.width, self.height
        return Detections(boxes, self.scores, ids, *size, spec, self.version, corners=self.corners, titles=titles)


class TextLine(NamedTuple):
    """The text of one line."""

    text: str
    """Empty if there is none."""
    score: float
    """0 to 1: the mean of the characters' scores."""
    spec: ModelSpec
    version: str


class Embedding(NamedTuple):
    """The vector that describes an image."""

    vector: NDArray[np.float32]
    """(dimensions,) of length 1."""
    norm: float
    """Length of the model's own vector."""
    width: int
    height: int
    spec: ModelSpec
    version: str


TaskResult = Detections | Classifications | Embedding
"""The result of any task that has a route of its own."""
StepResult = TaskResult | TextRegions | TextLine
"""The result of any task."""


def count(found: TaskResult) -> int:
    """Return the number of objects, classes or vectors."""
    return 1 if isinstance(found, Embedding) else len(found.scores)
