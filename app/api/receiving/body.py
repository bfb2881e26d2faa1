"""Parse request bodies that contain more than the image: forms, JSON, and base64 in them."""

from binascii import a2b_base64
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from app.api.parameters.parse import Pairs, Parameters, unknown_parameter
from app.api.parameters.parse import names as parameter_names
from app.api.parameters.tasks import DetectParameters
from app.api.receiving import content_encoding, multipart, urlencoded
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED, body_type, media_type
from app.errors import GatewayError, InvalidParameter, MalformedRequest
from app.remote.address import is_address

FILE_FIELDS = ("image", "file")
MAX_PARTS = 16
JSON_ERRORS = (msgspec.DecodeError, ValueError, RecursionError)
"""Errors that invalid JSON raises. ValueError: not UTF-8, or an integer with too many digits."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COUNTED_BYTES = 1 << 20
# Minimum bytes of JSON per escape. Some programs escape `/` and `+`, each 1/64 of the characters of base64.
_PER_ESCAPE = 16
_STANDARD_ALPHABET = bytes.maketrans(b"-_", b"+/")

_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    bool | str | int | float | Annotated[list[str | int], Meta(max_length=1000)]
)
_MEMBERS = "a string, a finite number, true, false, or a list of at most 1000 strings or integers"
# Names of the image in other services, in lower case and without punctuation.
_OTHER_NAMES = {"image", "images", "imagebase", "imagedata", "imagefile", "img", "file", "files", "picture", "photo", "data"}
_EXPECTED = f"{FILE_FIELDS[0]!r} (or {FILE_FIELDS[1]!r})"
_MAX_MEMBER_BYTES = 1 << 16
# Memory for parsing a body, relative to its size: multipart holds the image in pieces and joined; base64 is held as text, as text
# without white space, and decoded.
_COPIES = {MULTIPART: 2, JSON: 3, URLENCODED: 3}
_EXAMPLE = 'expected a JSON object such as {"image": "<base64>", "confidence": 0.4}'
_SEVERAL = "routes such as /detect/batch and /ocr/batch take several"
_KINDS = {b'"': "a string", b"[": "a list", b"{": "an object", b"n": "null", b"t": "true", b"f": "false"}

T = TypeVar("T")


class ParsedBody(NamedTuple):
    """A parsed body."""

    image: bytes
    parameters: Pairs


@lru_cache(64)  # asked twice per request
def needs_parsing(content_type: str, encoding: str = "") -> bool:
    """Return whether a body with these `Content-Type` and `Content-Encoding` headers must be parsed; otherwise it is the image."""
    return media_type(content_type) in {MULTIPART, JSON, URLENCODED} or not content_encoding.is_plain(encoding)


def parsing_bytes(size: int, content_type: str) -> int:
    """Return the maximum memory, in bytes, for parsing a body of this size with this `Content-Type` header."""
    return size * _COPIES.get(media_type(content_type), 0) + _MAX_MEMBER_BYTES


def parse_body(
    data: bytes, content_type: str, kind: type[Parameters] = DetectParameters, fields: Sequence[str] = FILE_FIELDS
) -> ParsedBody:
    """Parse a form, JSON or the image itself, by the `Content-Type`; the `fields` of a form may have the image or its URL.

    Raise MalformedRequest unless there is exactly one image or URL, InvalidParameter if a parameter is unknown or not text.
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
    urls = [value for name, value in parsed.parameters if name == "url"] if parsed.parameters else []
    has_url = bool(urls) and any("".join(url).strip() for url in urls)
    if has_url and parsed.image:
        raise MalformedRequest("send either an image or a url, not both")
    if not has_url and not parsed.image:
        raise MalformedRequest(f"the {'url' if urls else 'image'} is empty")
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
    images = [part for part in images if part.content] or images[:1]  # browsers send fields that nobody has filled
    _check_number(len(images), [name for name, _ in pairs])
    if not images:
        return ParsedBody(b"", pairs)
    text = images[0].text
    return ParsedBody(decode_text(text) if text else images[0].content, pairs)


def parse_urlencoded(data: bytes, fields: Sequence[str] = FILE_FIELDS) -> ParsedBody:
    """Parse a URL-encoded form whose image is base64 or a URL. Raises the same errors as `parse_body`."""
    images, others = urlencoded.split(data, fields, MAX_PARTS)
    images = [*filter(None, images)] or images[:1]
    _check_number(len(images), [name for name, _ in others])
    return ParsedBody(decode_text(images[0]) if images else b"", others)


@cache
def _outline(content: str, kind: type[Parameters]) -> Any:  # noqa: ANN401 - a Struct with these fields
    """A Struct, not a dict, so that parsing stops at the first unknown member."""
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in (content, *parameter_names(kind))]
    return msgspec.defstruct("_Outline", fields, forbid_unknown_fields=not kind.ignores_unknown)


def parse_document(data: bytes, content: str, kind: type[Parameters], example: str) -> tuple[msgspec.Raw, Pairs]:
    """Parse a JSON object to its member `content`, empty if missing, and parameters; raise MalformedRequest or InvalidParameter."""
    document = view_document(data)
    try:
        members = msgspec.structs.asdict(msgspec.json.decode(document, type=_outline(content, kind)))
    except JSON_ERRORS as error:
        unknown = str(error)[:128].partition("unknown field `")[2].removesuffix("`")
        raise (_unknown_member(unknown, content, kind) if unknown else MalformedRequest(example)) from error
    found = members.pop(content)
    beside = sum(map(len, members.values())) if kind.ignores_unknown else len(document) - len(found)
    if beside > _MAX_MEMBER_BYTES:
        raise MalformedRequest(f"the JSON object has more than {_MAX_MEMBER_BYTES >> 10} KiB beside its {content}")
    if not kind.ignores_unknown:
        _refuse_repeated(document, found, [value for value in members.values() if value])
    given = [(name, value) for name, value in members.items() if value and not (kind.ignores_unknown and bytes(value) == b"null")]
    return found, [
        (name, bytes(value).decode())
        if name in kind.documents and kind_of(value) != "a string"
        else (name, _to_parameter(name, value, is_list=name in kind.repeatable))
        for name, value in given
    ]


def _refuse_repeated(document: memoryview, found: msgspec.Raw, others: Sequence[msgspec.Raw]) -> None:
    """Raise InvalidParameter unless an object has no other values: the parser keeps only the last of repeated members."""
    start = _address(found) - _address(document) if found else 0
    rest = bytes(document[:start]) + bytes(document[start + len(found) :])
    # Beside the values there are no quotes but the two of each name.
    if rest.count(b'"') > 2 * bool(found) + sum(bytes(value).count(b'"') + 2 for value in others):
        raise InvalidParameter("a member of the JSON object is given more than once")


def _address(data: memoryview | msgspec.Raw) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def parse_json(data: bytes, kind: type[Parameters] = DetectParameters) -> ParsedBody:
    """Parse a JSON object with a base64 image or a URL in `image`, or a URL in `url`. Raises the same errors as `parse_body`."""
    image, members = parse_document(data, "image", kind, _EXAMPLE)
    if not image and any(name == "url" for name, _ in members):
        return ParsedBody(b"", members)
    if (found := kind_of(image)) != "a string":
        expected = _SEVERAL if found == "a list" else "expected the image in base64"
        raise MalformedRequest(f'the JSON object has no string "image": {f"it is {found}; " if found else ""}{expected}')
    encoded = decode(image, str, _EXAMPLE)
    if is_address(encoded):
        return ParsedBody(b"", [*members, ("url", encoded)])
    return ParsedBody(decode_text(encoded), members)


def decode_text(encoded: str) -> bytes:
    """Decode base64 or a data URL, as `decode_base64`; the error tells how to send a file."""
    try:
        return decode_base64(encoded)
    except MalformedRequest as error:
        raise MalformedRequest(f"{error.detail}; to send a file, use curl -F image=@image.jpg") from error


def kind_of(value: msgspec.Raw) -> str:
    """Return the kind of a JSON value; nothing if the value is missing."""
    start = bytes(memoryview(value)[:1])
    return _KINDS.get(start, "a number") if start else ""


def _unknown_member(name: str, content: str, kind: type[Parameters]) -> MalformedRequest | InvalidParameter:
    if "".join(filter(str.isalpha, name[:64].lower())) not in _OTHER_NAMES:
        return unknown_parameter(name, kind)
    if content != "image":
        expected = f'the images in "{content}", a list of base64'
    else:
        expected = f'one image in "image"; {_SEVERAL}' if name == "images" else 'the image in "image", in base64'
    return MalformedRequest(f"unknown member {name[:64]!r}; expected {expected}", repeats_request=True)


def _check_number(images: int, others: Sequence[str]) -> None:
    expected = f"expected one image in the field {_EXPECTED}, found {images}"
    if images > 1:
        raise MalformedRequest(f"{expected}; {_SEVERAL}")
    if not images and "url" not in others:
        found = ", ".join(repr(name[:32]) for name in others[:4])
        raise MalformedRequest(f"{expected}; fields found: {found or 'none'}", repeats_request=True)


def _to_parameter(name: str, value: msgspec.Raw, *, is_list: bool) -> str | list[str]:
    try:
        member = _DECODER.decode(value)
    except JSON_ERRORS as error:
        raise MalformedRequest(f'"{name}" is {kind_of(value)}; expected {_MEMBERS}') from error
    if isinstance(member, bool):
        return "true" if member else "false"
    texts = list(map(str, member)) if isinstance(member, list) else [str(member)]
    return texts if is_list and isinstance(member, list) else ",".join(texts)


def view_document(data: bytes) -> memoryview:
    """View JSON without the byte order mark that some programs add (RFC 8259, 8.1).

    Raise MalformedRequest if it has so many escapes that decoding it would block all threads for long.
    """
    escapes = 0
    for start in range(0, len(data), _COUNTED_BYTES) if len(data) > _COUNTED_BYTES else ():
        escapes += data.count(b"\\", start, start + _COUNTED_BYTES)
        if escapes > len(data) / _PER_ESCAPE:
            raise MalformedRequest("the JSON has too many escaped characters; base64 needs none but for line breaks")
    return memoryview(data)[len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0 :]


def decode_base64(encoded: str) -> bytes:
    """Decode base64, also that of URLs without padding (RFC 4648, 5), or a data URL; ignore white space.

    At most two copies of the text are in memory, in addition to the text or the result. Raise MalformedRequest for anything else.
    """
    head = encoded[:64]
    start = len(head) - len(head.lstrip(" \t\r\n"))
    if encoded[start : start + 5].lower() == "data:":
        start = encoded.find(",") + 1 or len(encoded)
    with suppress(msgspec.ValidationError):
        return msgspec.convert(encoded[start:], bytes)
    try:
        text = bytearray(encoded, "ascii")
        del text[:start]
        text = text.translate(_STANDARD_ALPHABET, b" \t\r\n")
        text += b"=" * (-len(text) % 4)
        return a2b_base64(text, strict_mode=True)
    except ValueError as error:  # not ASCII, or not base64
        raise MalformedRequest('"image" is not base64') from error


def decode(data: memoryview | msgspec.Raw | str, kind: type[T], expected: str, error: type[GatewayError] = MalformedRequest) -> T:
    """Decode JSON to a type; raise the error with this detail if it is not of this type."""
    try:
        return msgspec.json.decode(data, type=kind)
    except JSON_ERRORS as cause:
        raise error(expected) from cause
