"""Client of Nereid, an HTTP gateway for object detection."""

from nereid_client.client import AsyncClient, Client
from nereid_client.errors import InvalidKey, NereidError, Problem, UnexpectedResponse, Unreachable
from nereid_client.pictures import Image, pictures_in
from nereid_client.prepare import Prepare
from nereid_client.results import Classification, ClassifyResult, Detection, DetectResult, ImageSize, Keypoint, ModelUsed, Rle
from nereid_client.retries import Retries

__all__ = [
    "AsyncClient",
    "Classification",
    "ClassifyResult",
    "Client",
    "DetectResult",
    "Detection",
    "Image",
    "ImageSize",
    "InvalidKey",
    "Keypoint",
    "ModelUsed",
    "NereidError",
    "Prepare",
    "Problem",
    "Retries",
    "Rle",
    "UnexpectedResponse",
    "Unreachable",
    "pictures_in",
]
