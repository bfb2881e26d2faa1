"""Parse the body of a batch: a multipart form with several files, or JSON with a list of base64 images or URLs."""

from typing import Any, NamedTuple, TypeVar

import msgspec

from app.api.parameters.parse import Pairs, Parameters
from app.api.parameters.tasks import BatchParameters
from app.api.receiving import multipart
from app.api.receiving.body import JSON_ERRORS, decode, decode_base64, kind_of, parse_document
from app.api.receiving.client_watch import body_too_large
from app.api.receiving.content_type import MULTIPART, media_type
from app.errors import MalformedRequest
from app.pipeline.batch_request import Image
from app.remote.address import is_address

MAX_IMAGES = 64
FIELDS = ("images", "image", "file")

_MAX_PARAMETERS = 16
_EXPECTED = f"{FIELDS[0]!r} (or {FIELDS[1]!r} or {FIELDS[2]!r})"
_EMPTY = MalformedRequest("the image is empty")
_ImageList: Any = msgspec.defstruct(
    "_ImageList", [(f"image_{number}", msgspec.Raw, msgspec.Raw()) for number in range(MAX_IMAGES + 1)], array_like=True
)
"""A JSON list of which at most one item more than the maximum is kept, however long it is."""
_EXAMPLE = 'expected a JSON object such as {"images": ["<base64>", "<base64>"], "confidence": 0.4}'


T = TypeVar("T")


class ParsedBatch(NamedTuple):
    """A parsed batch."""

    images: list[Image]
    names: list[str | None]
    parameters: Pairs


def parse_batch(data: bytes, content_type: str, kind: type[Parameters] = BatchParameters) -> ParsedBatch:
    """Parse a multipart or JSON body, depending on its `Content-Type`; errors are those of `parse_body`."""
    parsed = _parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else _parse_json(data, kind)
    if not parsed.images:
        raise MalformedRequest(
            f"the batch is empty; send up to {MAX_IMAGES} images in form fields {FIELDS[0]!r}, or {_EXAMPLE[9:]}"
        )
    return parsed


def _parse_multipart(data: bytes, content_type: str) -> ParsedBatch:
    parameters: list[tuple[str, str]] = []
    batch = ParsedBatch([], [], parameters)
    for part in multipart.read_parts(data, content_type, MAX_IMAGES + _MAX_PARAMETERS):
        if part.name not in FIELDS:
            parameters.append(multipart.to_parameter(part, _EXPECTED))
        elif len(batch.images) == MAX_IMAGES:
            raise _too_many()
        else:
            text = part.text
            batch.images.append(decode_text(text) if text else part.content or _EMPTY)
            batch.names.append(part.file_name and part.file_name[:255])
    return batch


def _parse_json(data: bytes, kind: type[Parameters]) -> ParsedBatch:
    content, pairs = parse_document(data, "images", kind, _EXAMPLE)
    if (given := kind_of(content)) not in {"", "a list"}:
        raise MalformedRequest(f'the JSON object has no list "images": it is {given}; POST /detect takes a single image')
    images = [_decode(image) for image in split_images(content, msgspec.Raw, _EXAMPLE)] if content else []
    return ParsedBatch(images, [None] * len(images), pairs)


def split_images(content: msgspec.Raw, kind: type[T], expected: str) -> list[T]:
    """Split a JSON list of images of a type; raise MalformedRequest if there are too many or, with this detail, if it is none."""
    images = [image for image in msgspec.structs.astuple(decode(content, _ImageList, expected)) if image]
    if len(images) > MAX_IMAGES:
        raise _too_many()
    return [decode(image, kind, expected) for image in images]


def _decode(content: msgspec.Raw) -> Image:
    try:
        return decode_text(msgspec.json.decode(content, type=str))
    except JSON_ERRORS:
        return MalformedRequest("the image is not a string in base64")


def decode_text(text: str) -> Image:
    """Return a URL unchanged; decode other text from base64. Return, not raise, the error if it is invalid."""
    try:
        return text if is_address(text) else decode_base64(text) or _EMPTY
    except MalformedRequest:
        return MalformedRequest("the image is not base64")


def refuse_large(images: list[Image], max_bytes: int) -> None:
    """Replace each image above the limit by the error that it would get in a request of its own."""
    for index, image in enumerate(images):
        if isinstance(image, bytes) and len(image) > max_bytes:
            images[index] = body_too_large(max_bytes)


def _too_many() -> MalformedRequest:
    return MalformedRequest(f"the batch size exceeds the maximum of {MAX_IMAGES} images")
