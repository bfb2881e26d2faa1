"""Errors of requests, in order of their HTTP status.

`detail` is sent to the caller: it never contains a path, a traceback or another program's message.
"""

from collections.abc import Sequence
from typing import ClassVar


class GatewayError(Exception):
    """An error with a status, a stable machine-readable `code` and a human-readable `detail`."""

    status: ClassVar[int]
    code: ClassVar[str]
    title: ClassVar[str]
    retry_after_seconds: int | None = None
    repeats_request: bool = False
    """Whether `detail` quotes the request and must not be logged."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class MalformedRequest(GatewayError):
    status, code, title = 400, "malformed_request", "The request is malformed"

    def __init__(self, detail: str, *, repeats_request: bool = False) -> None:
        super().__init__(detail)
        self.repeats_request = repeats_request


class InvalidParameter(GatewayError):
    status, code, title = 400, "invalid_parameter", "A parameter is not valid"
    repeats_request = True


class WrongTask(GatewayError):
    status, code, title = 400, "wrong_task", "The model was made for another task"


class NoFace(GatewayError):
    status, code, title = 400, "no_face", "There is no face in the image"


class UrlInputDisabled(GatewayError):
    status, code, title = 400, "url_input_disabled", "Images are not fetched by their address"


class UrlNotAllowed(GatewayError):
    status, code, title = 400, "url_not_allowed", "The image's address is not allowed"


class Unauthorized(GatewayError):
    status, code, title = 401, "unauthorized", "A valid API key is needed"


class Forbidden(GatewayError):
    status, code, title = 403, "forbidden", "The API key does not allow this"


class UnknownModel(GatewayError):
    status, code, title = 404, "unknown_model", "There is no such model"
    models: Sequence[str] = ()
    """Those that are ready, if that is known."""


class UnknownVersion(GatewayError):
    status, code, title = 404, "unknown_version", "There is no such version of the model"


class UnknownRecord(GatewayError):
    status, code, title = 404, "unknown_record", "Search has no such record"


class NotOffered(GatewayError):
    status, code, title = 404, "not_offered", "The gateway does not offer this"


class NotAcceptable(GatewayError):
    status, code, title = 406, "not_acceptable", "The result has no format of an accepted type"


class BodyTimeout(GatewayError):
    status, code, title = 408, "body_timeout", "The request body did not arrive in time"


class Superseded(GatewayError):
    status, code, title = 409, "superseded", "There is a newer image of the stream"


class BodyTooLarge(GatewayError):
    status, code, title = 413, "body_too_large", "The request body is too large"


class ImageTooLarge(GatewayError):
    status, code, title = 413, "image_too_large", "The image has too many pixels"


class UnsupportedMediaType(GatewayError):
    status, code, title = 415, "unsupported_media_type", "The content type is not supported"
    repeats_request = True


class UnsupportedFormat(GatewayError):
    status, code, title = 415, "unsupported_format", "The image format is not supported"


class InvalidImage(GatewayError):
    status, code, title = 422, "invalid_image", "The image cannot be decoded"


class InvalidImageDimensions(GatewayError):
    status, code, title = 422, "invalid_image_dimensions", "The image's width, height or aspect ratio is out of range"


class ModelRefused(GatewayError):
    status, code, title = 422, "model_refused", "The model cannot be added or changed"


class ImageNotFetched(GatewayError):
    status, code, title = 424, "image_not_fetched", "The image could not be fetched"


class GatewayFull(GatewayError):
    status, code, title = 429, "gateway_full", "The gateway is full"
    retry_after_seconds = 1

    def __init__(self, detail: str, reason: str = "requests", retry_after_seconds: int = 1) -> None:
        super().__init__(detail)
        self.reason = reason
        """The exhausted resource: `requests`, `uploads`, `memory`, `decoding` or `models`."""
        self.retry_after_seconds = retry_after_seconds


class ClientGone(GatewayError):
    status, code, title = 499, "client_gone", "The client disconnected"


class ModelsNotManaged(GatewayError):
    status, code, title = 501, "models_not_managed", "Models cannot be added here"


class InferenceFailed(GatewayError):
    status, code, title = 502, "inference_failed", "The model could not be run"


class InvalidModelOutput(GatewayError):
    status, code, title = 502, "invalid_model_output", "The model returned an invalid output"


class UnsupportedModel(GatewayError):
    status, code, title = 502, "unsupported_model", "The model's inputs or outputs are not supported"

    def __init__(self, detail: str, *, answers_nothing: bool = False) -> None:
        super().__init__(detail)
        self.answers_nothing = answers_nothing
        """Whether the config says that Triton answers no call with a single image."""


class TritonUnavailable(GatewayError):
    status, code, title = 503, "triton_unavailable", "The inference server is not available"
    retry_after_seconds = 1


class CircuitOpen(GatewayError):
    status, code, title = 503, "circuit_open", "The model has failed repeatedly"
    retry_after_seconds = 1


class ModelNotReady(GatewayError):
    status, code, title = 503, "model_not_ready", "The model is not ready"
    retry_after_seconds = 5


class SearchUnavailable(GatewayError):
    status, code, title = 503, "search_unavailable", "Search is not available"
    retry_after_seconds = 1


class IndexRefused(GatewayError):
    status, code, title = 503, "index_refused", "No new index of vectors can be made"
    retry_after_seconds = 60


class DeadlinePassed(GatewayError):
    status, code, title = 504, "deadline_passed", "The request took too long"
