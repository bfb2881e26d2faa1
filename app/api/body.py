"""Receive request bodies, and parse those that contain more than the image: multipart forms and JSON."""

import base64
import re
from typing import Annotated, Any, NamedTuple

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app.api import parameters
from app.api.content_type import JSON, MULTIPART, media_type
from app.errors import ClientGone, InvalidParameter, MalformedRequest

FILE_FIELDS = ("image", "file")
_MAX_PARTS = 16

_Member = str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
# A struct instead of a dict: parsing stops at the first unknown member, however many follow.
_Document: Any = msgspec.defstruct(
    "_Document",
    [(name, _Member | UnsetType, UNSET) for name in ("image", *parameters.NAMES)],
    forbid_unknown_fields=True,
)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_SPACES = b" \t\r\n"


class Upload(NamedTuple):
    """What the caller sent."""

    image: bytes
    """The encoded image; possibly empty."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body."""


async def read_body(request: Request[Any, Any, Any]) -> bytes:
    """Receive the whole body.

    Raises:
        MalformedRequest: It is empty.
        ClientGone: The client disconnected before its end.
        RequestEntityTooLarge: It is larger than allowed (Litestar's, raised while it is received).
    """
    try:
        data = await request.body()
    except InternalServerException as error:  # what Litestar makes of a disconnect
        raise ClientGone("the client disconnected before the end of the body") from error
    if not data:
        raise MalformedRequest("the body is empty")
    return data


def needs_parsing(content_type: str) -> bool:
    """Return whether a body with this `Content-Type` header has to be parsed; any other is the image itself."""
    return media_type(content_type) in {MULTIPART, JSON}


def parse_upload(data: bytes, content_type: str) -> Upload:
    """Parse a multipart or JSON body; its `Content-Type` header tells which.

    Raises:
        MalformedRequest: It is not well formed, or does not contain exactly one image.
        InvalidParameter: A parameter in it is not text.
    """
    upload = parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else parse_json(data)
    if not upload.image:
        raise MalformedRequest("the image is empty")
    return upload


def parse_multipart(data: bytes, content_type: str) -> Upload:
    """Parse a multipart form, whose boundary is in the `Content-Type` header. Raises as `parse_upload`."""
    files: list[bytes] = []
    pairs = []
    name = ""
    chunks: list[bytes] = []
    try:
        _, options = parse_options_header(content_type)
        with PushMultipartParser(options.get("boundary", ""), max_segment_count=_MAX_PARTS) as parser:
            for event in parser.parse(data):
                if isinstance(event, MultipartSegment):
                    name, chunks = event.name, []
                elif event:
                    chunks.append(bytes(event))
                elif name in FILE_FIELDS:
                    files.append(b"".join(chunks))
                else:
                    pairs.append((name, _to_text(name, b"".join(chunks))))
    except ValueError as error:  # MultipartError is one, and so is text that cannot be decoded
        raise MalformedRequest("the multipart body is not well formed or has too many parts") from error
    if len(files) != 1:
        raise MalformedRequest(f"expected one image in the field {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r}), found {len(files)}")
    return Upload(files[0], pairs)


def parse_json(data: bytes) -> Upload:
    """Parse a JSON object whose `image` is base64. Raises as `parse_upload`."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if found := _UNKNOWN.fullmatch(str(error)):
            raise parameters.unknown_parameter(found[1]) from error
        raise MalformedRequest('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') from error
    encoded = document.image
    if not isinstance(encoded, str):
        raise MalformedRequest('the JSON object has no string "image"')
    if encoded.startswith("data:"):
        encoded = encoded.partition(",")[2]
    try:
        image = base64.b64decode(encoded.encode("ascii").translate(None, _SPACES), validate=True)
    except ValueError as error:  # binascii.Error is one, and so is text beyond ASCII
        raise MalformedRequest('"image" is not base64') from error
    given = ((name, getattr(document, name)) for name in parameters.NAMES)
    return Upload(image, [(name, _to_parameter(value)) for name, value in given if value is not UNSET])


def _to_text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{name[:64]!r} is not UTF-8 text") from error


def _to_parameter(value: _Member) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
