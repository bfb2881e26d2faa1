"""Client of Nereid, an HTTP gateway for object detection."""

from nereid_client.answers import (
    Analysis,
    AnalyzedObject,
    AnalyzedText,
    BoxEmbedding,
    EmbedBoxesResult,
    EmbedResult,
    Face,
    FacesResult,
    FaceUsed,
    OcrResult,
    PredictResult,
    TextRegion,
    Vector,
    VerifyResult,
)
from nereid_client.client import AsyncClient, Client
from nereid_client.errors import InvalidKey, NereidError, Problem, UnexpectedResponse, Unreachable
from nereid_client.pictures import Image, pictures_in
from nereid_client.prepare import Prepare
from nereid_client.results import Classification, ClassifyResult, Detection, DetectResult, ImageSize, Keypoint, ModelUsed, Rle
from nereid_client.retries import Retries

__all__ = [
    "Analysis",
    "AnalyzedObject",
    "AnalyzedText",
    "AsyncClient",
    "BoxEmbedding",
    "Classification",
    "ClassifyResult",
    "Client",
    "DetectResult",
    "Detection",
    "EmbedBoxesResult",
    "EmbedResult",
    "Face",
    "FaceUsed",
    "FacesResult",
    "Image",
    "ImageSize",
    "InvalidKey",
    "Keypoint",
    "ModelUsed",
    "NereidError",
    "OcrResult",
    "PredictResult",
    "Prepare",
    "Problem",
    "Retries",
    "Rle",
    "TextRegion",
    "UnexpectedResponse",
    "Unreachable",
    "Vector",
    "VerifyResult",
    "pictures_in",
]
