"""Parse request bodies that contain more than the image: forms and JSON."""

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from multipart import MultipartSegment, PushMultipartParser, parse_options_header

from app.api import content_encoding, multipart_defects, parameters, urlencoded
from app.api.content_type import JSON, MULTIPART, URLENCODED, media_type
from app.errors import InvalidParameter, MalformedRequest

FILE_FIELDS = ("image", "file")
MAX_PARTS = 16

_Member = str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
# Structs instead of dicts: parsing stops at the first unknown member, however many follow.
_Outline: Any = msgspec.defstruct(
    "_Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in ("image", *parameters.NAMES)], forbid_unknown_fields=True
)
_Members: Any = msgspec.defstruct("_Members", [(name, _Member | UnsetType, UNSET) for name in ("image", *parameters.NAMES)])
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `.*`, got `(\w+)` - at `\$\.(\w+)(\[.*\])?`")
# What other services call the image, but for case and punctuation.
_OTHER_NAMES = {"image", "images", "imagebase", "imagedata", "imagefile", "img", "file", "files", "picture", "photo", "data"}
_NOT_LETTERS = re.compile(r"[^a-z]")
_MAX_MEMBER_BYTES = 1 << 16
_SEVERAL = "POST /detect/batch takes several"
_KINDS = {b"{": "an object", b"n": "null", b"t": "true", b"f": "false"}
_PAIRS = json.JSONDecoder(object_pairs_hook=list)
_SPACES = b" \t\r\n"
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")


class ParsedBody(NamedTuple):
    """What the caller sent."""

    image: bytes
    """The encoded image; possibly empty."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body."""


def needs_parsing(content_type: str, encoding: str = "") -> bool:
    """Return whether a body with these `Content-Type` and `Content-Encoding` headers has to be parsed; any other is the image."""
    return media_type(content_type) in {MULTIPART, JSON, URLENCODED} or not content_encoding.is_plain(encoding)


def decode_and_parse(data: bytes, content_type: str, encoding: str, max_bytes: int, count: Callable[[int], None]) -> ParsedBody:
    """Undo the `Content-Encoding` of a body, as `content_encoding.decode` says, and parse it, as `parse_body` says."""
    return parse_body(content_encoding.decode(data, encoding, max_bytes, count), content_type)


def parse_body(data: bytes, content_type: str) -> ParsedBody:
    """Parse a body; its `Content-Type` header tells how. One of another type than a form or JSON is the image itself.

    Raises:
        MalformedRequest: It is not well formed, or does not contain exactly one image.
        InvalidParameter: A parameter in it is not text.
    """
    kind = media_type(content_type)
    if kind == MULTIPART:
        parsed = parse_multipart(data, content_type)
    elif kind == JSON:
        parsed = parse_json(data)
    elif kind == URLENCODED and urlencoded.is_form(data):
        parsed = parse_urlencoded(data)
    else:
        parsed = ParsedBody(data, [])
    if not parsed.image:
        raise MalformedRequest("the image is empty")
    return parsed


def parse_multipart(data: bytes, content_type: str) -> ParsedBody:
    """Parse a multipart form, whose boundary is in the `Content-Type` header. Raises as `parse_body`."""
    files: list[bytes] = []
    pairs = []
    name = ""
    is_file = False
    chunks: list[bytes] = []
    _, options = parse_options_header(content_type)
    boundary = options.get("boundary", "")
    try:
        # File names, which are not used, may have any encoding.
        with PushMultipartParser(boundary, max_segment_count=MAX_PARTS, header_charset="latin-1") as parser:
            for event in parser.parse(data):
                if isinstance(event, MultipartSegment):
                    name, is_file, chunks = _to_name(event.name or ""), event.filename is not None, []
                elif event:
                    chunks.append(bytes(event))
                elif name in FILE_FIELDS:
                    files.append(b"".join(chunks))
                else:
                    pairs.append((name, _to_text(name, b"".join(chunks), is_file=is_file)))
    except ValueError as error:  # MultipartError is one, and so is text that cannot be encoded
        # Not `from error`: its text, which would be logged, repeats parts of the body.
        raise MalformedRequest(multipart_defects.describe(error, data, boundary, MAX_PARTS)) from None
    _check_number(len(files), [name for name, _ in pairs])
    return ParsedBody(files[0], pairs)


def parse_urlencoded(data: bytes) -> ParsedBody:
    """Parse a form of names and values, whose image is base64. Raises as `parse_body`."""
    fields = urlencoded.split(data, FILE_FIELDS, MAX_PARTS)
    _check_number(len(fields.images), [name for name, _ in fields.others])
    return ParsedBody(_decode_base64(fields.images[0]), fields.others)


def parse_json(data: bytes) -> ParsedBody:
    """Parse a JSON object whose `image` is base64. Raises as `parse_body`."""
    try:
        image = msgspec.json.decode(data, type=_Outline).image
        if kind := _other_kind(image):
            raise MalformedRequest(f'the JSON object has no string "image": {kind}')
        members = _parse_members(data, image)
        encoded = msgspec.json.decode(image, type=str)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or an integer of many digits
        if found := _UNKNOWN.fullmatch(str(error)):
            raise _unknown_member(found[1]) from error
        if found := _WRONG_TYPE.fullmatch(str(error)):
            raise MalformedRequest(_describe_type(*found.groups())) from error
        raise MalformedRequest('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') from error
    return ParsedBody(_decode_base64(encoded), members)


def _other_kind(image: msgspec.Raw) -> str:
    """Say what an `image` that is not a string is; nothing for a string."""
    start = bytes(memoryview(image)[:1])
    if start in {b'"', b""}:
        return "" if start else "expected the image in base64"
    if start == b"[":
        return f"it is a list; {_SEVERAL}"
    return f"it is {_KINDS.get(start, 'a number')}; expected the image in base64"


def _unknown_member(name: str) -> MalformedRequest | InvalidParameter:
    if name == "images":
        return MalformedRequest(f"unknown member 'images'; expected one image in \"image\"; {_SEVERAL}")
    if _NOT_LETTERS.sub("", name[:64].lower()) in _OTHER_NAMES:
        return MalformedRequest(f'unknown member {name[:64]!r}; expected the image in "image", in base64')
    return parameters.unknown_parameter(name)


def _describe_type(kind: str, name: str, index: str | None) -> str:
    if index is None:
        return f'"{name}" is of the type {kind}; expected a string, a number or a list'
    return f'"{name}" has an item of the type {kind}; expected strings or integers'


def _parse_members(data: bytes, image: msgspec.Raw) -> list[tuple[str, str]]:
    """Parse the members beside the image, once it is known that they are few bytes."""
    if len(data) - len(image) > _MAX_MEMBER_BYTES:
        raise MalformedRequest(f"the JSON object has more than {_MAX_MEMBER_BYTES >> 10} KiB beside its image")
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
    """Decode base64 or a data URL; white space, in which long lines are often broken, does not count.

    The alphabet of URLs, which needs no padding, is read as well. Source: RFC 4648, 5.
    """
    if encoded[:5].lower() == "data:":
        encoded = encoded.partition(",")[2]
    with suppress(msgspec.ValidationError):
        return msgspec.convert(encoded, bytes)
    try:
        text = encoded.encode("ascii").translate(_STANDARD_ALPHABET, _SPACES)
        return msgspec.convert((text + b"=" * (-len(text) % 4)).decode(), bytes)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise MalformedRequest('"image" is not base64') from error


def _check_number(images: int, others: Iterable[str]) -> None:
    """Check that a form has one image, and say what it has instead."""
    expected = f"expected one image in the field {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r}), found {images}"
    if images > 1:
        raise MalformedRequest(f"{expected}; {_SEVERAL}")
    if not images:
        found = ", ".join(name[:64] for name in others)
        raise MalformedRequest(f"{expected}; fields found: {repr(found[:64]) if found else 'none'}")


def _to_name(name: str) -> str:
    """Return the name of a field as it was meant: in UTF-8, or else in Latin-1."""
    try:
        return name.encode("latin-1").decode()
    except UnicodeDecodeError:
        return name


def _to_text(name: str, content: bytes, *, is_file: bool) -> str:
    if is_file:
        hint = f"; {_SEVERAL}" if name in {"images", "images[]"} else ""
        expected = f"expected it in {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r})"
        raise MalformedRequest(f"there is a file in the field {name[:64]!r}; {expected}{hint}")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"{name[:64]!r} is not UTF-8 text; if it is the image, its field must be {FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r})"
        ) from error


def _to_parameter(value: _Member) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
