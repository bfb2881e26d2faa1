"""Parse the body of a batch: a multipart form with several files, or JSON with a list of images in base64."""

from typing import Any, NamedTuple

import msgspec
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app.api import parameters
from app.api.body import UNKNOWN_MEMBER, decode_base64, outlines, parse_members, to_text
from app.api.content_type import MULTIPART, media_type
from app.api.parameters import BatchParameters, Parameters
from app.errors import MalformedRequest
from app.pipeline.batch_request import Image

MAX_IMAGES = 64
FIELDS = ("images", "image", "file")
"""Names of form fields that contain an image."""

_MAX_PARAMETERS = 16
_FEED_BYTES = 1 << 20
_EMPTY = MalformedRequest("the image is empty")
# A Struct, so that parsing stops at the first image too many, however many follow.
_Images: Any = msgspec.defstruct(
    "_Images",
    [(f"image_{number}", msgspec.Raw, msgspec.Raw()) for number in range(MAX_IMAGES)],
    array_like=True,
    forbid_unknown_fields=True,
)
_EXAMPLE = 'expected a JSON object such as {"images": ["<base64>", "<base64>"], "confidence": 0.4}'


class ParsedBatch(NamedTuple):
    """What the caller sent."""

    images: list[Image]
    """At least one."""
    names: list[str | None]
    """The file name of each image, if it has one."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body."""


def parse_batch(data: bytes, content_type: str, kind: type[Parameters] = BatchParameters) -> ParsedBatch:
    """Parse a multipart or JSON body with parameters of a kind; its `Content-Type` header tells which.

    Raises:
        MalformedRequest: It is not well formed, or contains no image or too many.
        InvalidParameter: A parameter in it is unknown or not text.
    """
    parsed = _parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else _parse_json(data, kind)
    if not parsed.images:
        raise MalformedRequest(
            f"the batch is empty; send up to {MAX_IMAGES} images in form fields {FIELDS[0]!r}, or {_EXAMPLE[9:]}"
        )
    return parsed


def _parse_multipart(data: bytes, content_type: str) -> ParsedBatch:
    batch = ParsedBatch([], [], [])
    segment: MultipartSegment | None = None
    chunks: list[bytes] = []
    try:
        _, options = parse_options_header(content_type)
        limit = MAX_IMAGES + _MAX_PARAMETERS
        with PushMultipartParser(options.get("boundary", ""), max_segment_count=limit) as parser:
            # In pieces: the parser copies what it gets.
            for at in range(0, len(data), _FEED_BYTES):
                for event in parser.parse(data[at : at + _FEED_BYTES]):
                    if isinstance(event, MultipartSegment):
                        segment, chunks = event, []
                        if event.name in FIELDS and len(batch.images) == MAX_IMAGES:
                            raise _too_many()
                    elif event:
                        chunks.append(bytes(event))
                    elif segment is not None:
                        _add(batch, segment, b"".join(chunks))
                        chunks = []
    except ValueError:
        # Not `from error`: its text, which would be logged, repeats parts of the body.
        raise MalformedRequest("the multipart body is not well formed or has too many parts") from None
    return batch


def _add(batch: ParsedBatch, segment: MultipartSegment, content: bytes) -> None:
    if segment.name in FIELDS:
        batch.images.append(content or _EMPTY)
        batch.names.append(segment.filename and segment.filename[:255])
    else:
        batch.parameters.append((segment.name, to_text(segment.name, content)))


def _parse_json(data: bytes, kind: type[Parameters]) -> ParsedBatch:
    outline, typed = outlines("images", kind)
    try:
        content = msgspec.json.decode(data, type=outline).images
        pairs = parse_members(data, "images", content, typed) if len(content) else []
        encoded = msgspec.json.decode(content, type=_Images) if len(content) else _Images()
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an integer of many digits
        if found := UNKNOWN_MEMBER.fullmatch(str(error)):
            raise parameters.unknown_parameter(found[1], kind) from error
        if f"length {MAX_IMAGES}" in str(error):
            raise _too_many() from error
        raise MalformedRequest(_EXAMPLE) from error
    images = [_decode(content) for content in msgspec.structs.astuple(encoded) if len(content)]
    return ParsedBatch(images, [None] * len(images), pairs)


def _decode(content: msgspec.Raw) -> Image:
    """Decode an image in base64; return the error if that is not possible."""
    try:
        return decode_base64(msgspec.json.decode(content, type=str)) or _EMPTY
    except msgspec.DecodeError:
        return MalformedRequest("the image is not a string in base64")
    except MalformedRequest:
        return MalformedRequest("the image is not base64")


def _too_many() -> MalformedRequest:
    return MalformedRequest(f"the batch size exceeds the maximum of {MAX_IMAGES} images")
