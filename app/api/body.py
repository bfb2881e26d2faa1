"""Parse request bodies that contain more than the image: multipart forms and JSON."""

import json
import re
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app.api import parameters
from app.api.content_type import JSON, MULTIPART, media_type
from app.errors import InvalidParameter, MalformedRequest
from app.remote.address import is_address

FILE_FIELDS = ("image", "file")
_MAX_PARTS = 16

_Member = str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
# Structs instead of dicts: parsing stops at the first unknown member, however many follow.
_Outline: Any = msgspec.defstruct(
    "_Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in ("image", *parameters.NAMES)], forbid_unknown_fields=True
)
_Members: Any = msgspec.defstruct("_Members", [(name, _Member | UnsetType, UNSET) for name in ("image", *parameters.NAMES)])
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MAX_MEMBER_BYTES = 1 << 16
_PAIRS = json.JSONDecoder(object_pairs_hook=list)
_SPACES = b" \t\r\n"


class ParsedBody(NamedTuple):
    """What the caller sent."""

    image: bytes
    """The encoded image; possibly empty."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body. An image that is given by its address is the parameter `url`."""

    @property
    def has_url(self) -> bool:
        """Whether the image is given by its address."""
        return any(name == "url" for name, _ in self.parameters)


def needs_parsing(content_type: str) -> bool:
    """Return whether a body with this `Content-Type` header has to be parsed; any other is the image itself."""
    return media_type(content_type) in {MULTIPART, JSON}


def parse_body(data: bytes, content_type: str) -> ParsedBody:
    """Parse a multipart or JSON body; its `Content-Type` header tells which.

    Raises:
        MalformedRequest: It is not well formed, or contains neither exactly one image nor the address of one.
        InvalidParameter: A parameter in it is not text.
    """
    parsed = parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else parse_json(data)
    if not parsed.image and not parsed.has_url:
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
                    pairs.append((name, _to_text(name, b"".join(chunks))))
    except ValueError:  # MultipartError is one, and so is text that cannot be decoded
        # Not `from error`: its text, which would be logged, repeats parts of the body.
        raise MalformedRequest("the multipart body is not well formed or has too many parts") from None
    parsed = ParsedBody(files[0] if files else b"", pairs)
    if len(files) != 1 and (files or not parsed.has_url):
        raise MalformedRequest(f"expected one image in the field {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r}), found {len(files)}")
    return parsed


def parse_json(data: bytes) -> ParsedBody:
    """Parse a JSON object whose `image` is base64 or an address, or whose `url` is. Raises as `parse_body`."""
    try:
        outline = msgspec.json.decode(data, type=_Outline)
        image = outline.image
        if not image and outline.url:
            return ParsedBody(b"", _parse_members(data, image))
        if bytes(memoryview(image)[:1]) != b'"':
            raise MalformedRequest('the JSON object has no string "image"')
        members = _parse_members(data, image)
        encoded = msgspec.json.decode(image, type=str)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an integer of many digits
        if found := _UNKNOWN.fullmatch(str(error)):
            raise parameters.unknown_parameter(found[1]) from error
        raise MalformedRequest('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') from error
    if is_address(encoded):
        return ParsedBody(b"", [*members, ("url", encoded)])
    return ParsedBody(_decode_base64(encoded), members)


def _parse_members(data: bytes, image: msgspec.Raw) -> list[tuple[str, str]]:
    """Parse the members beside the image, once it is known that they are few bytes."""
    if len(data) - len(image) > _MAX_MEMBER_BYTES:
        raise MalformedRequest(f"the JSON object has more than {_MAX_MEMBER_BYTES >> 10} KiB beside its image")
    rest = data
    if image:
        start = _address(image) - _address(data)
        rest = data[:start] + b'""' + data[start + len(image) :]
    msgspec.json.decode(rest, type=_Members)  # checks the types, but keeps only the last of several members of one name
    pairs = _PAIRS.decode(rest.decode())
    if [name for name, _ in pairs].count("image") > 1:
        raise InvalidParameter("image is given more than once")
    return [(name, _to_parameter(value)) for name, value in pairs if name != "image"]


def _address(data: bytes | msgspec.Raw) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _decode_base64(encoded: str) -> bytes:
    """Decode base64 or a data URL; white space, in which long lines are often broken, does not count."""
    if encoded.startswith("data:"):
        encoded = encoded.partition(",")[2]
    with suppress(msgspec.ValidationError):
        return msgspec.convert(encoded, bytes)
    try:
        return msgspec.convert(encoded.encode("ascii").translate(None, _SPACES).decode(), bytes)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise MalformedRequest('"image" is not base64') from error


def _to_text(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{name[:64]!r} is not UTF-8 text") from error


def _to_parameter(value: _Member) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
