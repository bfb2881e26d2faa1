"""Parse request bodies that contain more than the image: multipart forms and JSON."""

import json
import re
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app.api import parameters
from app.api.content_type import JSON, MULTIPART, media_type
from app.api.parameters import DetectParameters, Parameters
from app.errors import InvalidParameter, MalformedRequest

FILE_FIELDS = ("image", "file")
_MAX_PARTS = 16

_Member = bool | str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
UNKNOWN_MEMBER = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
"""Finds the name in msgspec's text about an unknown member."""
_MAX_MEMBER_BYTES = 1 << 16
_PAIRS = json.JSONDecoder(object_pairs_hook=list)
_SPACES = b" \t\r\n"


class ParsedBody(NamedTuple):
    """What the caller sent."""

    image: bytes
    """The encoded image; possibly empty."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body."""


def needs_parsing(content_type: str) -> bool:
    """Return whether a body with this `Content-Type` header has to be parsed; any other is the image itself."""
    return media_type(content_type) in {MULTIPART, JSON}


def parse_body(data: bytes, content_type: str, kind: type[Parameters] = DetectParameters) -> ParsedBody:
    """Parse a body with parameters of a kind: a multipart form, JSON or the image itself, as its `Content-Type` header says.

    Raises:
        MalformedRequest: It is not well formed, or does not contain exactly one image.
        InvalidParameter: A parameter in it is not text.
    """
    if not needs_parsing(content_type):
        return ParsedBody(data, [])
    parsed = parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else parse_json(data, kind)
    if not parsed.image:
        raise MalformedRequest("the image is empty")
    return parsed


def parse_multipart(data: bytes, content_type: str) -> ParsedBody:
    """Parse a multipart form, whose boundary is in the `Content-Type` header. Raises as `parse_body`."""
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
                    pairs.append((name, to_text(name, b"".join(chunks))))
    except ValueError:  # MultipartError is one, and so is text that cannot be decoded
        # Not `from error`: its text, which would be logged, repeats parts of the body.
        raise MalformedRequest("the multipart body is not well formed or has too many parts") from None
    if len(files) != 1:
        raise MalformedRequest(f"expected one image in the field {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r}), found {len(files)}")
    return ParsedBody(files[0], pairs)


@cache
def outlines(content: str, kind: type[Parameters]) -> tuple[Any, type[msgspec.Struct]]:
    """Make the types of a JSON object that has a member `content` and parameters of a kind: all as it is, and with types.

    Structs instead of dicts: parsing stops at the first unknown member, however many follow.
    """
    names = (content, *parameters.names(kind))
    outline = msgspec.defstruct("_Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in names], forbid_unknown_fields=True)
    return outline, msgspec.defstruct("_Members", [(name, _Member | UnsetType, UNSET) for name in names])


def parse_json(data: bytes, kind: type[Parameters] = DetectParameters) -> ParsedBody:
    """Parse a JSON object whose `image` is base64. Raises as `parse_body`."""
    outline, typed = outlines("image", kind)
    try:
        image = msgspec.json.decode(data, type=outline).image
        if bytes(memoryview(image)[:1]) != b'"':
            raise MalformedRequest('the JSON object has no string "image"')
        members = parse_members(data, "image", image, typed)
        encoded = msgspec.json.decode(image, type=str)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an integer of many digits
        if found := UNKNOWN_MEMBER.fullmatch(str(error)):
            raise parameters.unknown_parameter(found[1], kind) from error
        raise MalformedRequest('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') from error
    return ParsedBody(decode_base64(encoded), members)


def parse_members(data: bytes, name: str, content: msgspec.Raw, typed: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Parse the members of a JSON object beside its `content`, whose name this is.

    They may have few bytes, and must be of the types of a Struct.

    Raises:
        MalformedRequest: They have too many bytes.
        InvalidParameter: There are several members of that name.
        msgspec.DecodeError, ValueError, RecursionError: A value is not one of a parameter.
    """
    if len(data) - len(content) > _MAX_MEMBER_BYTES:
        raise MalformedRequest(f"the JSON object has more than {_MAX_MEMBER_BYTES >> 10} KiB beside its {name}")
    start = _address(content) - _address(data)
    rest = data[:start] + b'""' + data[start + len(content) :]
    msgspec.json.decode(rest, type=typed)  # checks the types, but keeps only the last of several members of one name
    pairs = _PAIRS.decode(rest.decode())
    if [member for member, _ in pairs].count(name) > 1:
        raise InvalidParameter(f"{name} is given more than once")
    return [(member, _to_parameter(value)) for member, value in pairs if member != name]


def _address(data: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def decode_base64(encoded: str) -> bytes:
    """Decode base64 or a data URL; white space, in which long lines are often broken, does not count."""
    if encoded.startswith("data:"):
        encoded = encoded.partition(",")[2]
    with suppress(msgspec.ValidationError):
        return msgspec.convert(encoded, bytes)
    try:
        return msgspec.convert(encoded.encode("ascii").translate(None, _SPACES).decode(), bytes)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise MalformedRequest('"image" is not base64') from error


def to_text(name: str, content: bytes) -> str:
    """Decode a form field; raise InvalidParameter if it is not text."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{name[:64]!r} is not UTF-8 text") from error


def _to_parameter(value: _Member) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
