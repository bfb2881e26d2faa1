"""A request body -> the file in it and the parameters beside it, in each of the three envelopes."""

import asyncio
import base64
import re
from typing import Annotated, Any, NamedTuple

import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app import parameters
from app.errors import ClientGone, InvalidParameter, MalformedRequest
from app.guards import JSON, MULTIPART, media_type

FILE_FIELDS = ("image", "file")
_MAX_PARTS = 16

_Member = str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
# A struct and no dict: the first unknown member ends the reading, however many there are.
_Document: Any = msgspec.defstruct(
    "_Document",
    [(name, _Member | UnsetType, UNSET) for name in ("image", *parameters.NAMES)],
    forbid_unknown_fields=True,
)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_SPACES = b" \t\r\n"


class Body(NamedTuple):
    """What the caller sent."""

    file: bytes
    pairs: list[tuple[str, str]]
    """Parameters, by name."""


async def read(request: Request[Any, Any, Any]) -> Body:
    """Read the whole body and open its envelope.

    Raises:
        MalformedRequest: It is empty, has no picture or (a form) more than one, or its envelope is broken.
        InvalidParameter: A parameter in it is no text.
        ClientGone: The caller hung up half way.
        RequestEntityTooLarge: It is larger than allowed (Litestar's, by length or while it streams in).
    """
    try:
        data = await request.body()
    except InternalServerException as error:  # what Litestar makes of a disconnect
        raise ClientGone("the body was broken off") from error
    declared = media_type(request)
    if declared == MULTIPART:
        body = await asyncio.to_thread(_from_multipart, data, request.headers["content-type"])
    elif declared == JSON:
        body = await asyncio.to_thread(_from_json, data)
    else:
        body = Body(data, [])
    if not body.file:
        raise MalformedRequest("the body is empty" if not data else "the picture is empty")
    return body


def _from_multipart(data: bytes, content_type: str) -> Body:
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
                    pairs.append((name, _text(name, b"".join(chunks))))
    except ValueError as error:  # MultipartError is one, and so is text that cannot be decoded
        raise MalformedRequest("the multipart body is broken or has too many parts") from error
    if len(files) != 1:
        raise MalformedRequest(f"expected one picture in the field {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r}), found {len(files)}")
    return Body(files[0], pairs)


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{name[:64]!r} is not UTF-8 text") from error


def _from_json(data: bytes) -> Body:
    try:
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if found := _UNKNOWN.fullmatch(str(error)):
            raise parameters.unknown(found[1]) from error
        raise MalformedRequest('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') from error
    encoded = document.image
    if not isinstance(encoded, str):
        raise MalformedRequest('the JSON object has no string "image"')
    if encoded.startswith("data:"):
        encoded = encoded.partition(",")[2]
    try:
        file = base64.b64decode(encoded.encode("ascii").translate(None, _SPACES), validate=True)
    except ValueError as error:  # binascii.Error is one, and so is text beyond ASCII
        raise MalformedRequest('"image" is not base64') from error
    given = ((name, getattr(document, name)) for name in parameters.NAMES)
    return Body(file, [(name, _plain(value)) for name, value in given if value is not UNSET])


def _plain(value: _Member) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
