"""The parameters of requests, of which the gateway has the defaults."""

from typing import Literal, TypedDict

from nereid_client.prepare import Prepare


class ImageParameters(TypedDict, total=False):
    """Parameters of any request. Apart from `prepare`, the gateway has defaults for them, and checks them."""

    timeout_ms: int
    """Deadline in the gateway, milliseconds."""
    truncated: Literal["refuse", "allow"]
    """What becomes of a damaged JPEG."""
    prepare: Prepare | None
    """Makes large images smaller before they are sent; boxes, polygons and points still refer to the original."""


class Parameters(ImageParameters, total=False):
    """Parameters of a request that one model answers."""

    model: str
    version: str
    confidence: float
    """Minimum confidence, 0 to 1."""


class DetectParameters(Parameters, total=False):
    """Parameters of a request for detections."""

    classes: str | list[str]
    """Names or ids of the classes to return: separated by commas, or one by one."""
    max_detections: int
    iou: float
    """Overlap above which only the better of two boxes of a class is returned, 0 to 1."""
    agnostic: bool
    """Whether boxes of different classes are compared, too."""
    boxes: Literal["normalized", "pixel"]
    """Unit of boxes, polygons and points."""
    task: Literal["detect", "segment", "pose", "obb"]
    """What is found beside boxes: nothing, masks, keypoints or oriented boxes; by default nothing."""
    masks: Literal["polygon", "rle", "png", "none"]
    """Form of the masks of the task `segment`; with `prepare`, neither `rle` nor `png`."""


class ClassifyParameters(Parameters, total=False):
    """Parameters of a request for classes."""

    top_k: int


class OcrParameters(ImageParameters, total=False):
    """Parameters of a request for text."""

    min_det_score: float
    """Minimum score of a line, 0 to 1."""
    min_rec_score: float
    """Minimum score of the text of a line, 0 to 1."""
    filter_by_score: bool
    """Whether lines below `min_rec_score` are left out."""


class FaceParameters(ImageParameters, total=False):
    """Parameters of a request for faces."""

    confidence: float
    """Minimum score of a face, 0 to 1."""


class VerifyParameters(FaceParameters, total=False):
    """Parameters of a comparison of faces."""

    threshold: float
    """The similarity of a match, 0 to 1."""


class EmbedParameters(ImageParameters, total=False):
    """Parameters of a request for vectors."""

    model: str
    version: str


class AnalyzeParameters(Parameters, total=False):
    """Parameters of an analysis; `model`, `version` and `confidence` are those of objects."""

    face_confidence: float
    """Minimum score of a face, 0 to 1."""
    include_embedding: bool
    """Whether the image and each object are described by vectors."""
    include_face_embeddings: bool
    enable_ocr: bool
    """Whether text is read."""


class IngestParameters(ImageParameters, total=False):
    """Parameters of a request that adds an image to the index."""

    image_id: str
    image_path: str
    skip_duplicates: bool
    """Whether an image whose content is there already is left out."""
    detect_near_duplicates: bool
    near_duplicate_threshold: float
    """The cosine from which two images are nearly the same."""
    enable_detection: bool
    enable_faces: bool
    enable_clip: bool
    """Whether image and objects are described by vectors."""
    enable_ocr: bool


class SearchParameters(TypedDict, total=False):
    """Parameters of a search."""

    top_k: int
    min_score: float
    timeout_ms: int
