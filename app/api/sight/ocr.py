"""POST /ocr/predict and /ocr/batch: the text in an image, or in several."""

from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from app.api.answering.native import rounded, to_scores
from app.api.answering.schema import ImageSize
from app.api.batch.answer import Documents
from app.api.batch.asking import by_cascade
from app.api.batch.route import by_answers, images_route
from app.api.dependencies import WorkerResources
from app.api.parameters.parse import Fraction, Parameters
from app.api.parameters.tasks import Url
from app.api.sight.image import Answer, image_route
from app.cascade.answers import MIN_TEXT_SCORE, read_lines, to_fractions
from app.cascade.definition import Cascade
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.model.heads import TextDetectionHead
from app.pipeline.results import Detections


class OcrBatchParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for the text in several images."""

    min_det_score: Annotated[Fraction, Meta(description="Minimum score of the place of a line of text.")] = 0.5
    min_rec_score: Annotated[Fraction, Meta(description="Minimum score of a text: the mean of its characters' scores.")] = (
        MIN_TEXT_SCORE
    )
    filter_by_score: Annotated[
        bool,
        Meta(description="`false`: both minimum scores are ignored, and lines in which nothing was read are returned, too."),
    ] = True


class OcrParameters(OcrBatchParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters of a request for the text in one image."""

    url: Url = None


class TextRegion(msgspec.Struct, frozen=True):
    """A line of text."""

    text: str
    box: list[float]
    """Its four corners x y x y ..., clockwise from the top left of the text, in pixels of the upright image."""
    box_normalized: list[float]
    """x1 y1 x2 y2 of the upright box around it, as fractions of the image."""
    det_score: float
    rec_score: float
    """Score of the text, from 0 to 1: the mean of the characters' scores."""


class OcrAnswer(Answer, kw_only=True):
    """The text in an image, in reading order."""

    status: Literal["success"] = "success"
    error: None = None
    texts: list[str]
    regions: list[TextRegion]
    full_text: str
    num_texts: int

    def totals(self) -> dict[str, int]:
        """Return what the image adds to the sums over a batch."""
        return {"total_text_regions": self.num_texts, "images_with_text": int(self.num_texts > 0)}


class OcrDocument(Documents, frozen=True, kw_only=True):
    """The text in several images."""

    results: list[OcrAnswer]
    total_text_regions: int = 0
    images_with_text: int = 0


def read_regions(found: CascadeAnswer, min_score: float | None = MIN_TEXT_SCORE) -> list[TextRegion]:
    """Return the lines of text that the cascade `ocr` has found, as `read_lines` does."""
    where, lines = read_lines(found, min_score)
    boxes = np.concatenate([where.corners.min(axis=1), where.corners.max(axis=1)], axis=1)
    corners, fractions = rounded(where.corners.reshape(-1, 8)), to_fractions(boxes, where.width, where.height)
    scores = to_scores(where.scores)
    return [TextRegion(line.text, corners[index], fractions[index], scores[index], round(line.score, 4)) for index, line in lines]


def box_of(region: TextRegion) -> tuple[float, float, float, float]:
    """Return the upright box x1 y1 x2 y2 around a line, in pixels."""
    across, down = region.box[::2], region.box[1::2]
    return min(across), min(down), max(across), max(down)


def texts_of(regions: list[TextRegion]) -> dict[str, Any]:
    """Return the fields `texts`, `full_text` and `num_texts`, which all answers with text have."""
    texts = [region.text for region in regions]
    return {"texts": texts, "full_text": "\n".join(texts), "num_texts": len(texts)}


def _choose(worker: WorkerResources, wanted: OcrBatchParameters) -> Cascade:
    cascade = named_cascade(worker, "ocr", "lines", "text")
    return cascade.vary(lines={"confidence": wanted.min_det_score}) if wanted.filter_by_score else cascade


def _to_answer(wanted: OcrBatchParameters, found: CascadeAnswer) -> OcrAnswer:
    regions = read_regions(found, wanted.min_rec_score if wanted.filter_by_score else None)
    return OcrAnswer(regions=regions, image=ImageSize(found.width, found.height), truncated=found.truncated, **texts_of(regions))


def _to_objects(wanted: OcrParameters, found: CascadeAnswer) -> Detections:
    read = _to_answer(wanted, found).regions
    corners = np.array([region.box for region in read], np.float32).reshape(-1, 4, 2)
    scores = np.array([region.rec_score for region in read], np.float32)
    return read_lines(found)[0]._replace(corners=corners, scores=scores).as_detections([region.text for region in read])


ROUTES = [
    image_route(
        "/ocr/predict",
        TextDetectionHead.task,
        OcrParameters,
        by_cascade(_choose),
        _to_answer,
        response=OcrAnswer,
        summary="Read the text in an image",
        description="Find lines of text, turn those that are upside down, and read each. Lines are in reading order. "
        "`Accept: image/jpeg` or `image/png` gets the image with the lines and their text drawn on it.",
        to_objects=_to_objects,
    ),
    images_route(
        "/ocr/batch",
        TextDetectionHead.task,
        OcrBatchParameters,
        by_cascade(_choose),
        by_answers(_to_answer, OcrDocument),
        response=OcrDocument,
        summary="Read the text in several images",
    ),
]
