"""The bodies of requests to Roboflow's inference server: JSON with one image, or a list of images.

Source: roboflow/inference, inference/core/entities/requests/inference.py.
"""

import msgspec

from app.api.batch.body import ParsedBatch, split_images
from app.api.parameters.parse import Pairs, Parameters
from app.api.receiving.body import decode, decode_base64, kind_of, parse_document
from app.api.receiving.content_type import JSON, URLENCODED, media_type
from app.errors import InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.pipeline.batch_request import Image

EXAMPLE = '{"model_id": "yolo11n/1", "image": {"type": "base64", "value": "..."}}'


class _Image(msgspec.Struct):
    type: str
    value: str


class InferenceBody:
    """Parser of the body of one request to a route such as `/infer/object_detection`."""

    def __init__(self) -> None:
        self.is_list = False
        self.drawn: list[bytes] = []
        self._draws = False

    def parse(self, data: bytes, content_type: str, kind: type[Parameters]) -> ParsedBatch:
        """Parse the body; a body without a type is an image. Pictures can be drawn of all images unless some are URLs."""
        images: list[Image] = [data]
        pairs: Pairs = []
        if content_type:
            if media_type(content_type) not in {JSON, URLENCODED}:
                raise UnsupportedMediaType(f"expected application/json with an object such as {EXAMPLE}")
            content, pairs = parse_document(data, "image", kind, f"expected a JSON object such as {EXAMPLE}")
            # These are not members of the service's.
            pairs = [pair for pair in pairs if pair[0] not in {"url", "model", "model_name", "version", "timeout_ms"}]
            self._draws = str(dict(pairs).get("visualize_predictions")).lower() in {"true", "1"}
            self.is_list = kind_of(content) == "a list"
            expected = f"expected image(s) as in {EXAMPLE}, or with an address of the type 'url'"
            given = split_images(content, _Image, expected) if self.is_list else [decode(content, _Image, expected)]
            if not given:
                raise MalformedRequest("the list of images is empty")
            if len(given) == 1 and given[0].type == "url" and given[0].value.strip():
                return ParsedBatch([], [], [*pairs, ("url", given[0].value)])
            images = [_decode(image) for image in given]
        if self._draws:
            self.drawn = [image for image in images if isinstance(image, bytes)]
            if len(self.drawn) < len(images):
                raise InvalidParameter("visualize_predictions: of several images, all must be of the type 'base64'")
        return ParsedBatch(images, [None] * len(images), pairs)


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
