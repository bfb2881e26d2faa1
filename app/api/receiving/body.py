"""Parse request bodies that contain more than the image: forms and JSON."""

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from app.api.parameters.parse import Parameters, unknown_parameter
from app.api.parameters.parse import names as parameter_names
from app.api.parameters.tasks import DetectParameters
from app.api.receiving import content_encoding, multipart, urlencoded
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED, body_type, media_type
from app.api.receiving.json_body import JSON_ERRORS, decode_base64, view_document
from app.errors import InvalidParameter, MalformedRequest
from app.remote.address import is_address

FILE_FIELDS = ("image", "file")
MAX_PARTS = 16

_Member = bool | str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `.*`, got `(\w+)` - at `\$\.(\w+)(\[.*\])?`")
# Names of the image in other services, in lower case and without punctuation.
_OTHER_NAMES = {"image", "images", "imagebase", "imagedata", "imagefile", "img", "file", "files", "picture", "photo", "data"}
_NOT_LETTERS = re.compile(r"[^a-z]")
_EXPECTED = f"{FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r})"
_MAX_MEMBER_BYTES = 1 << 16
# Memory for parsing a body, relative to its size: multipart holds the image in pieces and joined; base64 is held as text, as text
# without white space, and decoded.
_COPIES = {MULTIPART: 2, JSON: 3, URLENCODED: 3}
_EXAMPLE = 'expected a JSON object such as {"image": "<base64>", "confidence": 0.4}'
_SEVERAL = "POST /detect/batch takes several"
NOT_BOTH = "send either an image or a url, not both"
"""The error for a request with both."""
_KINDS = {b'"': "a string", b"[": "a list", b"{": "an object", b"n": "null", b"t": "true", b"f": "false"}
_PAIRS = json.JSONDecoder(object_pairs_hook=list)


class ParsedBody(NamedTuple):
    """A parsed body."""

    image: bytes
    """The encoded image; possibly empty."""
    parameters: list[tuple[str, str]]
    """Name and value of each parameter in the body. The URL of an image is the parameter `url`."""

    @property
    def has_url(self) -> bool:
        """Whether the body contains the URL of an image."""
        return any(name == "url" and value.strip() for name, value in self.parameters)


def needs_parsing(content_type: str, encoding: str = "") -> bool:
    """Return whether a body with these `Content-Type` and `Content-Encoding` headers must be parsed; otherwise it is the image."""
    return media_type(content_type) in {MULTIPART, JSON, URLENCODED} or not content_encoding.is_plain(encoding)


def parsing_bytes(size: int, content_type: str) -> int:
    """Return the maximum memory, in bytes, for parsing a body of this size with this `Content-Type` header."""
    return size * _COPIES.get(media_type(content_type), 0) + _MAX_MEMBER_BYTES


def parse_body(
    data: bytes, content_type: str, kind: type[Parameters] = DetectParameters, fields: Sequence[str] = FILE_FIELDS
) -> ParsedBody:
    """Parse a body with parameters of a kind: a form, JSON or the image itself, depending on its `Content-Type` header.

    In a form, one of the `fields` contains the image or its URL.

    Raises:
        MalformedRequest: The body is not well formed, or does not contain exactly one image or URL.
        InvalidParameter: A parameter in the body is not text.
    """
    declared = body_type(content_type, data)
    if declared == MULTIPART:
        parsed = parse_multipart(data, content_type, fields)
    elif declared == JSON:
        parsed = parse_json(data, kind)
    elif declared == URLENCODED and urlencoded.is_form(data):
        parsed = parse_urlencoded(data, fields)
    else:
        parsed = ParsedBody(data, [])
    if parsed.has_url and parsed.image:
        raise MalformedRequest(NOT_BOTH)
    if not parsed.has_url and not parsed.image:
        what = "url" if any(name == "url" for name, _ in parsed.parameters) else "image"
        raise MalformedRequest(f"the {what} is empty")
    return parsed


def parse_multipart(data: bytes, content_type: str, fields: Sequence[str] = FILE_FIELDS) -> ParsedBody:
    """Parse a multipart form with the boundary in its `Content-Type` header. Raises the same errors as `parse_body`."""
    images: list[multipart.Part] = []
    pairs = []
    for part in multipart.read_parts(data, content_type, MAX_PARTS):
        if part.name in fields and is_address(part.text):
            pairs.append(("url", part.text))
        elif part.name in fields:
            images.append(part)
        else:
            hint = f"; {_SEVERAL}" if part.name in {"images", "images[]"} else ""
            pairs.append(multipart.to_parameter(part, _EXPECTED + hint))
    _check_number(len(images), [name for name, _ in pairs])
    if not images:
        return ParsedBody(b"", pairs)
    text = images[0].text
    return ParsedBody(decode_base64(text) if text else images[0].content, pairs)


def parse_urlencoded(data: bytes, fields: Sequence[str] = FILE_FIELDS) -> ParsedBody:
    """Parse a URL-encoded form whose image is base64 or a URL. Raises the same errors as `parse_body`."""
    form = urlencoded.split(data, fields, MAX_PARTS)
    _check_number(len(form.images), [name for name, _ in form.others])
    return ParsedBody(decode_base64(form.images[0]) if form.images else b"", form.others)


@cache
def _outlines(content: str, kind: type[Parameters]) -> tuple[Any, type[msgspec.Struct]]:
    """Make two types of a JSON object with a member `content` and parameters of a kind: raw members, and typed members.

    They are Structs, not dicts, so that parsing stops at the first unknown member.
    """
    names = (content, *parameter_names(kind))
    outline = msgspec.defstruct("_Outline", [(name, msgspec.Raw, msgspec.Raw()) for name in names], forbid_unknown_fields=True)
    return outline, msgspec.defstruct("_Members", [(name, _Member | UnsetType, UNSET) for name in names])


def parse_document(data: bytes, content: str, kind: type[Parameters], example: str) -> tuple[msgspec.Raw, list[tuple[str, str]]]:
    """Parse a JSON object; return its member `content`, empty if it is missing, and the parameters beside it.

    Raises:
        MalformedRequest: It is not a JSON object as in the example, or the parameters are too large.
        InvalidParameter: A parameter is unknown, or there are several members `content`.
    """
    outline, typed = _outlines(content, kind)
    document = view_document(data)
    try:
        found = getattr(msgspec.json.decode(document, type=outline), content)
        return found, _parse_members(document, content, found, typed)
    except JSON_ERRORS as error:
        raise describe_member(str(error), content, kind) or MalformedRequest(example) from error


def parse_json(data: bytes, kind: type[Parameters] = DetectParameters) -> ParsedBody:
    """Parse a JSON object with a base64 image or a URL in `image`, or a URL in `url`. Raises the same errors as `parse_body`."""
    image, members = parse_document(data, "image", kind, _EXAMPLE)
    if not image and any(name == "url" for name, _ in members):
        return ParsedBody(b"", members)
    if other := _other_kind(image):
        raise MalformedRequest(f'the JSON object has no string "image": {other}')
    try:
        encoded = msgspec.json.decode(image, type=str)
    except JSON_ERRORS as error:
        raise MalformedRequest(_EXAMPLE) from error
    if is_address(encoded):
        return ParsedBody(b"", [*members, ("url", encoded)])
    return ParsedBody(decode_base64(encoded), members)


def _other_kind(image: msgspec.Raw) -> str:
    """Describe an `image` that is not a string; return nothing for a string."""
    kind = kind_of(image)
    if kind == "a list":
        return f"it is a list; {_SEVERAL}"
    if kind == "a string":
        return ""
    return f"it is {kind}; expected the image in base64" if kind else "expected the image in base64"


def kind_of(value: msgspec.Raw) -> str:
    """Return the kind of a JSON value; nothing if the value is missing."""
    start = bytes(memoryview(value)[:1])
    return _KINDS.get(start, "a number") if start else ""


def describe_member(error: str, content: str, kind: type[Parameters]) -> MalformedRequest | InvalidParameter | None:
    """Return the error for a member that msgspec rejected; None if msgspec reports any other defect.

    Args:
        error: msgspec's message.
        content: Name of the member with the image or images.
        kind: The type of the parameters.
    """
    if found := _UNKNOWN.fullmatch(error):
        return _unknown_member(found[1], content, kind)
    if not (found := _WRONG_TYPE.fullmatch(error)):
        return None
    if found[3] is None:
        return MalformedRequest(f'"{found[2]}" is of the type {found[1]}; expected a string, a number, true, false or a list')
    return MalformedRequest(f'"{found[2]}" has an item of the type {found[1]}; expected strings or integers')


def _unknown_member(name: str, content: str, kind: type[Parameters]) -> MalformedRequest | InvalidParameter:
    if _NOT_LETTERS.sub("", name[:64].lower()) not in _OTHER_NAMES:
        return unknown_parameter(name, kind)
    if content != "image":
        expected = f'the images in "{content}", a list of base64'
    else:
        expected = f'one image in "image"; {_SEVERAL}' if name == "images" else 'the image in "image", in base64'
    return MalformedRequest(f"unknown member {name[:64]!r}; expected {expected}", repeats_request=True)


def _parse_members(data: memoryview, name: str, content: msgspec.Raw, typed: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Parse the members of a JSON object other than its `content`, the member `name`, which may be missing."""
    if len(data) - len(content) > _MAX_MEMBER_BYTES:
        raise MalformedRequest(f"the JSON object has more than {_MAX_MEMBER_BYTES >> 10} KiB beside its {name}")
    start = _address(content) - _address(data) if content else len(data)
    rest = bytes(data[:start])
    if content:
        rest += b'""' + data[start + len(content) :]
    msgspec.json.decode(rest, type=typed)  # checks the types, but keeps only the last of repeated members
    pairs = _PAIRS.decode(rest.decode())
    if [member for member, _ in pairs].count(name) > 1:
        raise InvalidParameter(f"{name} is given more than once")
    return [(member, _to_parameter(value)) for member, value in pairs if member != name]


def _address(data: memoryview | msgspec.Raw) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _check_number(images: int, others: Sequence[str]) -> None:
    """Check that a form has one image or a URL; the error reports what it has instead."""
    expected = f"expected one image in the field {_EXPECTED}, found {images}"
    if images > 1:
        raise MalformedRequest(f"{expected}; {_SEVERAL}")
    if not images and "url" not in others:
        raise MalformedRequest(f"{expected}; fields found: {multipart.quote_names(others) or 'none'}", repeats_request=True)


def _to_parameter(value: _Member) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
