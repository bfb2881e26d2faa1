"""Parse the bodies of Roboflow's clients."""

import msgspec

from app.api.batch.body import ParsedBatch, split_images
from app.api.parameters.parse import Pairs, Parameters
from app.api.receiving.body import ParsedBody, kind_of, parse_document, parse_multipart
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED, media_type
from app.api.receiving.json_body import JSON_ERRORS, decode_base64
from app.errors import InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.pipeline.batch_request import Image

EXAMPLE = '{"model_id": "yolo11n/1", "image": {"type": "base64", "value": "..."}}'


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

    def parse(self, data: bytes, content_type: str, kind: type[Parameters]) -> ParsedBatch:
        """Parse the body; a body without a type is an image.

        Raises:
            UnsupportedMediaType: The declared type is not supported.
            MalformedRequest: The body is not well formed, or contains no image or too many.
            InvalidParameter: The request asks for pictures, and one of several images is a URL.
        """
        if not content_type:
            return self._finish([data], [])
        if media_type(content_type) not in {JSON, URLENCODED}:
            raise UnsupportedMediaType(f"expected application/json with an object such as {EXAMPLE}")
        content, pairs = parse_document(data, "image", kind, f"expected a JSON object such as {EXAMPLE}")
        self._draws = ("visualize_predictions", "true") in pairs
        self.is_list = kind_of(content) == "a list"
        try:
            items = split_images(content) if self.is_list else [content]
            images = [msgspec.json.decode(item, type=_Image) for item in items]
        except JSON_ERRORS as error:
            raise MalformedRequest(f"expected image(s) as in {EXAMPLE}, or with an address of the type 'url'") from error
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
