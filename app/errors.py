"""Every way a request can fail and what the caller is told.

GatewayError
├── MalformedRequest      400  the body or its envelope cannot be read
├── InvalidParameter      400  a parameter is unknown, given twice or out of range
├── UnknownModel          404  no such model here
├── BodyTooLarge          413  more bytes than allowed
├── PictureTooLarge       413  more pixels than allowed, by the picture's own header
├── UnsupportedMediaType  415  the declared content type is none we read
├── UnsupportedFormat     415  the bytes are no picture format we read
├── BrokenPicture         422  right format, but it cannot be decoded
├── PictureSides          422  sides that no detector can use
├── ClientGone            499  the caller hung up; seen in the log only
├── ModelNonsense         502  the model's answer breaks its own contract
├── UnsupportedLayout     502  a model whose tensors no adapter knows
├── TritonUnavailable     503  Triton is down, draining or full
├── ModelNotReady         503  Triton is up, this model is not
└── DeadlinePassed        504  the answer did not come in time

`detail` is for the caller: it never holds a path, a traceback or another program's text.
"""

from typing import ClassVar


class GatewayError(Exception):
    """A failure with a status, a stable `code` for programs and a `detail` for people."""

    status: ClassVar[int]
    code: ClassVar[str]
    title: ClassVar[str]
    retry_after_seconds: ClassVar[int | None] = None

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class MalformedRequest(GatewayError):
    status, code, title = 400, "malformed_request", "The request cannot be read"


class InvalidParameter(GatewayError):
    status, code, title = 400, "invalid_parameter", "A parameter is not valid"


class UnknownModel(GatewayError):
    status, code, title = 404, "unknown_model", "There is no such model"


class BodyTooLarge(GatewayError):
    status, code, title = 413, "body_too_large", "The request body is too large"


class PictureTooLarge(GatewayError):
    status, code, title = 413, "picture_too_large", "The picture has too many pixels"


class UnsupportedMediaType(GatewayError):
    status, code, title = 415, "unsupported_media_type", "The content type is not supported"


class UnsupportedFormat(GatewayError):
    status, code, title = 415, "unsupported_format", "The picture format is not supported"


class BrokenPicture(GatewayError):
    status, code, title = 422, "broken_picture", "The picture cannot be decoded"


class PictureSides(GatewayError):
    status, code, title = 422, "picture_sides", "The picture's sides are out of range"


class ClientGone(GatewayError):
    status, code, title = 499, "client_gone", "The client went away"


class ModelNonsense(GatewayError):
    status, code, title = 502, "model_nonsense", "The model answered nonsense"


class UnsupportedLayout(GatewayError):
    status, code, title = 502, "unsupported_layout", "The model's tensors are of no known layout"


class TritonUnavailable(GatewayError):
    status, code, title = 503, "triton_unavailable", "The inference server is not available"
    retry_after_seconds = 1


class ModelNotReady(GatewayError):
    status, code, title = 503, "model_not_ready", "The model is not ready"
    retry_after_seconds = 5


class DeadlinePassed(GatewayError):
    status, code, title = 504, "deadline_passed", "The answer did not come in time"
