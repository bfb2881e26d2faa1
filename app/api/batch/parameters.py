"""The parameters of a batch."""

from app.api.parameters import DetectParameters
from app.errors import InvalidParameter

OF_ONE_IMAGE = frozenset({"url", "format", "image_id"})
"""Parameters of a request for detections that a batch has no use for."""


class BatchParameters(DetectParameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of a request for detections, as far as they apply to several images."""

    def __post_init__(self) -> None:
        """Check what a type cannot tell.

        Raises:
            UnknownModel, InvalidParameter: As for one image, or there is a value that only one image can have.
        """
        super().__post_init__()
        if self.url is not None:
            raise InvalidParameter('url: a batch has the addresses of its images in "images", a list in JSON')
        if self.format not in {None, "json"}:
            raise InvalidParameter("format: a batch is answered with json, or with lines if Accept is application/x-ndjson")
