"""Parse the bodies of Roboflow's clients."""

import msgspec

from app.api.batch.body import ParsedBatch, split_images
from app.api.parameters.parse import Pairs, Parameters
from app.api.receiving.body import ParsedBody, describe_member, kind_of, parse_multipart
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED, media_type
from app.api.receiving.json_body import JSON_ERRORS, decode_base64, view_document
from app.errors import InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.pipeline.batch_request import Image

_MAX_FILTER_BYTES = 1 << 16
_EXAMPLE = '{"model_id": "yolo11n/1", "image": {"type": "base64", "value": "..."}}'
_Scalar = bool | int | float | str | None


class _Document(msgspec.Struct):
    """The JSON object of a request; other members are ignored."""

    image: msgspec.Raw = msgspec.Raw()
    class_filter: msgspec.Raw = msgspec.Raw()
    visualize_predictions: bool | None = None
    api_key: _Scalar = None
    model_id: _Scalar = None
    confidence: _Scalar = None
    iou_threshold: _Scalar = None
    class_agnostic_nms: _Scalar = None
    max_detections: _Scalar = None


class _Image(msgspec.Struct):
    type: str
    value: str


class InferenceBody:
    """Parser of the body of one request to `/infer/object_detection`."""

    def __init__(self) -> None:
        self.is_list = False
        """Whether the images are a list; the response is then also a list."""
        self.drawn: list[bytes] = []
        """The images to draw detections on; empty unless the request asks for pictures."""
        self._draws = False

    def parse(self, data: bytes, content_type: str, _: type[Parameters]) -> ParsedBatch:
        """Parse the body; a body without a type is an image.

        Raises:
            UnsupportedMediaType: The declared type is not supported.
            MalformedRequest: The body is not well formed, or contains no image or too many.
            InvalidParameter: The request asks for pictures, and one of several images is a URL.
        """
        if not content_type:
            return self._finish([data], [])
        if media_type(content_type) not in {JSON, URLENCODED}:
            raise UnsupportedMediaType(f"expected application/json with an object such as {_EXAMPLE}")
        document, pairs = parse_members(data)
        self._draws = bool(document.visualize_predictions)
        self.is_list = kind_of(document.image) == "a list"
        try:
            items = split_images(document.image) if self.is_list else [document.image]
            images = [msgspec.json.decode(item, type=_Image) for item in items]
        except JSON_ERRORS as error:
            raise MalformedRequest(f"expected image(s) as in {_EXAMPLE}, or with an address of the type 'url'") from error
        if not images:
            raise MalformedRequest("the list of images is empty")
        if len(images) == 1 and images[0].type == "url" and images[0].value.strip():
            return ParsedBatch([], [], [*pairs, ("url", images[0].value)])
        return self._finish([_decode(image) for image in images], pairs)

    def _finish(self, images: list[Image], pairs: Pairs) -> ParsedBatch:
        encoded = [image for image in images if isinstance(image, bytes)]
        if self._draws:
            if len(encoded) < len(images):
                raise InvalidParameter("visualize_predictions: of several images, all must be of the type 'base64'")
            self.drawn = encoded
        return ParsedBatch(images, [None] * len(images), list(pairs))


def parse_members(data: bytes) -> tuple[_Document, list[tuple[str, str]]]:
    """Parse a JSON object; return it and its parameters as names and values.

    Raises:
        MalformedRequest: The data is not a JSON object, or a member has the wrong type.
        InvalidParameter: The filter is not a list of names.
    """
    try:
        document = msgspec.json.decode(view_document(data), type=_Document)
    except JSON_ERRORS as error:
        raise describe_member(str(error), "image", Parameters) or MalformedRequest(
            f"expected a JSON object such as {_EXAMPLE}"
        ) from error
    members = msgspec.structs.asdict(document)
    for name in ("image", "visualize_predictions", "class_filter"):
        del members[name]
    pairs = [(name, _to_text(value)) for name, value in members.items() if value is not None]
    return document, pairs + _to_classes(document.class_filter)


def parse_v0(data: bytes, content_type: str, _: type[Parameters]) -> ParsedBody:
    """Parse a body that is an image: base64, the field `file` of a form, or the encoded image itself.

    Raises:
        MalformedRequest: The form is not well formed; or the body is declared as JSON or URL-encoded, which means base64 here, but
            is not base64.
    """
    declared = media_type(content_type)
    if declared == MULTIPART:
        parsed = parse_multipart(data, content_type)
        return parsed._replace(parameters=[("image" if name == "url" else name, value) for name, value in parsed.parameters])
    if declared in {JSON, URLENCODED} and data.isascii():
        return ParsedBody(decode_base64(data.decode()), [])
    return ParsedBody(data, [])


def _decode(image: _Image) -> Image:
    match image.type:
        case "base64":
            if decoded := decode_base64(image.value):
                return decoded
            raise MalformedRequest("the image is empty")
        case "url":
            return image.value
    raise MalformedRequest(
        f"images of the type {image.type[:64]!r} are not supported; send 'base64' or 'url'", repeats_request=True
    )


def _to_classes(given: msgspec.Raw) -> list[tuple[str, str]]:
    if kind_of(given) in {"", "null"}:
        return []
    if len(given) > _MAX_FILTER_BYTES:
        raise InvalidParameter(f"class_filter: longer than {_MAX_FILTER_BYTES >> 10} KiB")
    try:
        names = msgspec.json.decode(given, type=list[str])
    except JSON_ERRORS as error:
        raise InvalidParameter("class_filter: expected a list of names") from error
    return [("class_filter", ",".join(names))] if names else []


def _to_text(value: _Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
