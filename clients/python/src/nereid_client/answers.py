"""What is found by several models: text, faces, vectors, and the parts of an analysis.

Boxes are x1, y1, x2, y2, fractions of the upright image. Corners and landmarks are x, y, x, y, ...
"""

from typing import Any, Self

import msgspec
from msgspec import field

from nereid_client.errors import ProblemDocument
from nereid_client.results import Answer, DetectResult, ImageAnswer, ImageSize, ModelUsed, Result

Box = tuple[float, float, float, float]
Corners = list[float]
"""Eight numbers, pixels: of a line of text, clockwise from the top left of the text."""


class TextRegion(msgspec.Struct, frozen=True):
    """A line of text."""

    text: str
    box: Corners
    box_normalized: Box
    det_score: float
    """That it is text, 0 to 1."""
    rec_score: float
    """That it is this text, 0 to 1."""


class OcrResult(ImageAnswer, frozen=True, kw_only=True):
    """The text in an image, in reading order."""

    texts: list[str]
    regions: list[TextRegion]
    full_text: str
    truncated: bool = False
    """Whether there are more lines than the gateway reads."""

    def of_original(self, original: ImageSize, *, in_pixels: bool) -> Self:
        """Return the result in an image of another size."""
        del in_pixels  # corners always are
        corners = [_scaled(region.box, self.image, original) for region in self.regions]
        regions = [msgspec.structs.replace(region, box=box) for region, box in zip(self.regions, corners, strict=True)]
        return msgspec.structs.replace(self, image=original, regions=regions)


class Face(msgspec.Struct, frozen=True):
    """A face."""

    box: Box
    landmarks: tuple[float, ...]
    """The eyes, the nose and the corners of the mouth, fractions of the image."""
    score: float
    """That it is a face, 0 to 1."""
    quality: float | None = None
    """How well the face can be described, 0 to 1."""
    embedding: list[float] | None = None
    """In an analysis: the vector that tells whose it is, of length 1; None if it was not asked for."""


class FacesResult(ImageAnswer, frozen=True, kw_only=True):
    """The faces in an image, by descending score."""

    faces: list[Face]
    embeddings: list[list[float] | None] = field(default_factory=list)
    """Vectors that tell whose the faces are, of length 1, if they were asked for; None for a face that cannot be described."""
    truncated: bool = False
    """Whether there are more faces than the gateway describes."""


class FaceUsed(msgspec.Struct, frozen=True):
    """Which face of an image was compared."""

    num_faces: int
    face_used: int
    """Its index among them."""


class VerifyResult(Answer, frozen=True, kw_only=True):
    """Whether two images show the same person."""

    match: bool
    similarity: float
    """From 0 to 1."""
    threshold: float
    """The similarity of a match."""
    image1: FaceUsed
    image2: FaceUsed


class Vector(msgspec.Struct, frozen=True):
    """The vector that describes an image of a batch. Only vectors of the same model can be compared."""

    embedding: list[float]
    """Of length 1."""
    embedding_norm: float
    """Length of the model's own vector."""
    model: ModelUsed


class EmbedResult(Result, frozen=True, kw_only=True):
    """The vector that describes an image. Only vectors of the same model can be compared."""

    embedding: list[float]
    """Of length 1."""
    embedding_norm: float
    """Length of the model's own vector."""


class BoxEmbedding(msgspec.Struct, frozen=True):
    """The vector that describes what is in a box, of length 1."""

    box: Box
    embedding: list[float]


class EmbedBoxesResult(ImageAnswer, frozen=True, kw_only=True):
    """The vectors that describe parts of an image, in the order of the request."""

    boxes: list[BoxEmbedding]
    model: ModelUsed | None
    """None without boxes."""


class PredictResult(DetectResult, frozen=True, kw_only=True):
    """The objects that a model, or the first step of a cascade, has found in an image, and what the later steps say."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """For each object what the later steps say of it, by their names."""
    image_steps: dict[str, Any] = field(default_factory=dict)
    """What the later steps say of the whole image, by their names."""
    errors: dict[str, ProblemDocument] = field(default_factory=dict)
    """Why steps have failed, by their names."""
    truncated: bool = False
    """Whether there are more objects than the later steps were asked about."""


class AnalyzedObject(msgspec.Struct, frozen=True):
    """An object in an analysis."""

    box: Box
    confidence: float
    class_id: int
    class_name: str
    embedding: list[float] | None = None
    """The vector that describes it; None if it was not asked for."""


class AnalyzedText(msgspec.Struct, frozen=True):
    """The text in an analysis; each list has one item for each line."""

    texts: list[str]
    boxes: list[Corners]
    boxes_normalized: list[Box]
    det_scores: list[float]
    rec_scores: list[float]
    full_text: str


class Analysis(ImageAnswer, frozen=True, kw_only=True):
    """All that is found in an image. A part that was not asked for, or has failed, is empty."""

    status: str
    """`success`, or `partial` if parts have failed."""
    detections: list[AnalyzedObject] = field(default_factory=list)
    faces: list[Face] = field(default_factory=list)
    global_embedding: list[float] | None = None
    embedding_norm: float | None = None
    ocr: AnalyzedText | None = None
    errors: dict[str, ProblemDocument] = field(default_factory=dict)
    """Why parts have failed, by their names."""
    truncated: bool = False
    """Whether there are more faces, lines or objects than the gateway looks at."""

    def of_original(self, original: ImageSize, *, in_pixels: bool) -> Self:
        """Return the analysis of an image of another size."""
        del in_pixels  # corners always are
        if self.ocr is None:
            return msgspec.structs.replace(self, image=original)
        boxes = [_scaled(box, self.image, original) for box in self.ocr.boxes]
        return msgspec.structs.replace(self, image=original, ocr=msgspec.structs.replace(self.ocr, boxes=boxes))


class NearDuplicate(msgspec.Struct, frozen=True):
    """What became of an image that is nearly the same as one that was there."""

    group_id: str | None = None
    similarity: float | None = None
    matched_image: str | None = None


class IngestResult(Answer, frozen=True, kw_only=True):
    """What was added to the index for an image."""

    status: str
    """`success`; or `duplicate`, if an image with the same content was there, so that nothing was added."""
    image_id: str
    num_detections: int = 0
    num_faces: int = 0
    indexed: dict[str, int | bool] | None = None
    """How many entries it has in each index: `global`, `vehicles`, `people`, `faces`, `ocr`; None for a duplicate."""
    errors: list[str] | None = None
    """Why parts were left out."""
    near_duplicate: NearDuplicate | None = None
    existing_image_id: str | None = None
    """Of the image with the same content."""
    existing_image_path: str | None = None
    is_completed: bool = False
    """Whether the image was there without some of its parts, which it has got now."""
    updated: list[str] = field(default_factory=list)
    """What a known image has got another one of: `path`, `metadata`."""


class Hit(msgspec.Struct, frozen=True):
    """An image that a search has found, or a face in it."""

    image_id: str
    image_path: str | None
    score: float
    """How near it is: up to 1."""
    metadata: dict[str, Any] = field(default_factory=dict)
    face_id: str | None = None
    box: Box | None = None
    """Of the face."""
    confidence: float | None = None
    """That it is a face, 0 to 1."""
    person_name: str | None = None
    """Under which the face was registered."""
    matched_text: str | None = None
    """The line of text that fits best."""
    full_text: str | None = None


class SearchResult(Answer, frozen=True, kw_only=True):
    """What a search has found, the best first."""

    results: list[Hit]
    search_time_ms: float
    """Of the database alone."""


class DeleteResult(msgspec.Struct, frozen=True):
    """What was deleted with an image."""

    deleted_from: list[str]
    """The indexes."""
    total_deleted: int


def _scaled(corners: Corners, sent: ImageSize, original: ImageSize) -> Corners:
    scale = original.width / sent.width, original.height / sent.height
    return [round(at * scale[index % 2], 2) for index, at in enumerate(corners)]
