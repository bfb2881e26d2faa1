"""Request bodies: the image as it is, a form, or JSON; and compressed ones, which are decoded within a limit."""

import base64
import gzip
import json
import os
import random
import zlib
from itertools import count
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.receiving.body import ParsedBody, parse_body, parse_json, parsing_bytes
from app.api.receiving.content_encoding import check, decode, is_plain
from app.api.receiving.content_type import JSON, URLENCODED
from app.errors import BodyTooLarge, GatewayError, InvalidParameter, MalformedRequest, UnsupportedMediaType
from tests.imaging.samples import NOISE, encode
from tests.support import peak_below

IMAGE = bytes(range(256)) + b"\r\n--almost\r\n"
RANDOM = random.Random(0).randbytes(3 << 20)  # noqa: S311 - an image that hardly shrinks
TYPE = "multipart/form-data; boundary=b"
BASE64 = base64.b64encode(IMAGE)
HEADER = b'Content-Disposition: form-data; name="image"'
URL = "https://a.org/x.jpg"
COCO, ADDRESS = [("boxes", "coco")], [("url", URL)]


def part(name: str, content: bytes, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"\r\nContent-Type: image/jpeg'
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def headed(header: bytes) -> bytes:
    return form(b"--b\r\n" + header + b"\r\n\r\n" + IMAGE + b"\r\n")


def document(image: object = BASE64.decode(), **members: object) -> bytes:
    return json.dumps({"image": image, **members}).encode()


@pytest.mark.parametrize(
    ("data", "content_type", "image", "parameters"),
    [
        (form(part("image", IMAGE), part("boxes", b"coco")), "Multipart/Form-Data ; boundary=b", IMAGE, COCO),
        # The parser does not decide which of several values counts.
        (form(part("x", b""), part("image", IMAGE), *[part("x", b"1")] * 14), TYPE, IMAGE, [("x", ""), *[("x", "1")] * 14]),
        # Text in a field is base64, a data URL or an address, as in JSON, unless it has a file name.
        (form(part("image", BASE64), part("boxes", b"coco")), TYPE, IMAGE, COCO),
        (form(part("file", BASE64, filename="a.txt")), TYPE, BASE64, []),
        (form(part("image", URL.encode()), part("boxes", b"coco")), TYPE, b"", ADDRESS + COCO),
        (form(part("image", IMAGE)).replace(b"--b", b"--a b") + b"more", 'multipart/form-data; x=y; Boundary="a b"', IMAGE, []),
        (headed(HEADER + b'; filename="\xff\0"').replace(b"--b--", part("näme", b"1") + b"--b--"), TYPE, IMAGE, [("näme", "1")]),
        (
            form(part("image", IMAGE)).replace(b"--b", b"--a=/b"),
            "multipart/form-data; boundary=a=/b",
            IMAGE,
            [],
        ),  # should be quoted
        # A browser sends what nobody has filled or chosen.
        (form(part("file", b"", filename=""), part("image", IMAGE), part("x", b"", filename="")), TYPE, IMAGE, []),
        # curl declares anything as a form unless it is told a type.
        (IMAGE, URLENCODED, IMAGE, []),
        (document(boxes="coco"), URLENCODED, IMAGE, COCO),
        # Escapes are decoded, but a plus sign in base64 stays one.
        (b"image=AP%2Bf%2f/+A&x=a+b%2C2&b=&c", URLENCODED, b"\0\xff\x9f\xff\xff\x80", [("x", "a b,2"), ("b", ""), ("c", "")]),
        (document(f"DATA:image/jpeg;BASE64,{BASE64.decode()}"), "Application/JSON; charset=utf-8", IMAGE, []),
        (document(f" \r\ndata:;base64,{BASE64.decode()}"), JSON, IMAGE, []),
        (document("-_8"), JSON, b"\xfb\xff", []),  # as in URLs
        (b'{"im\\u0061ge": "QUJD", "classes": ["\\"", 1]}', JSON, b"ABC", [("classes", ['"', "1"])]),
        # Text stays, numbers and truth values are written as they came.
        (document(agnostic=True, iou=0.4, classes=[]), JSON, IMAGE, [("agnostic", "true"), ("iou", "0.4"), ("classes", [])]),
        (document("\r\n\t ".join(BASE64.decode())), JSON, IMAGE, []),
        (json.dumps({"boxes": "coco", "url": URL}).encode(), JSON, b"", COCO + ADDRESS),
    ],
    ids=count(),
)
def test_body_is_parsed(data: bytes, content_type: str, image: bytes, parameters: list[Any]) -> None:
    parsed = parse_body(data, content_type)

    assert (parsed.image, sorted(parsed.parameters)) == (image, sorted(parameters))


def test_image_that_is_declared_as_a_form_is_none() -> None:
    data = encode(NOISE, "PNG")
    assert parse_body(data, URLENCODED) == ParsedBody(data, [])
    with pytest.raises(MalformedRequest, match=r"as `curl --data` does it; use curl --data-binary @image\.jpg"):
        parse_body(data.translate(None, b"\0\r\n"), URLENCODED)  # it drops zero bytes and line breaks


SENT = form(part("image", IMAGE))
MALFORMED: list[tuple[str, str, list[bytes]]] = [
    (JSON, "is not base64; to send a file, use", [document(text) for text in ("QUJDR", "QU==JD", "äöü", "\0", "data:,QUJDR")]),
    (TYPE, "found 0; fields found: 'confidence', 'boxes'", [form(part("confidence", b"0.4"), part("boxes", b"coco"))]),
    (TYPE, "found 2; routes such as", [form(part("url", URL.encode()), part("image", b"a"), part("file", b"b"))]),
    (TYPE, "send either an image or a url, not both", [form(part("file", URL.encode()), part("image", IMAGE))]),
    (URLENCODED, "neither an image nor a form; to send a file, use curl --data-binary", [b"hello", b"x" * (1 << 20)]),
    (URLENCODED, "the form has too many fields; the maximum is 16", [b"&".join([b"a=1"] * 17)]),
    (URLENCODED, "the form has more than 64 KiB beside its image", [b"image=QUJD&x=" + b"y" * (1 << 16)]),
    (TYPE, f"a file in the field '{'n' * 64}'; expected", [form(part("n" * 70, IMAGE, filename="a.jpg"))]),
    ('multipart/form-data; boundary="b', "has no boundary", [SENT]),
    ("multipart/form-data; boundary=c", "does not occur in the body", [SENT]),
    ('multipart/form-data; x="; boundary=c"; boundary=b; boundary=c', "more than one boundary", [SENT]),
    (TYPE, "not well formed: maximum part header count exceeded", [headed(HEADER + b"\r\nX: x" * 20)]),
    (TYPE, "a part has no name; expected", [headed(HEADER[:30]), headed(HEADER[:-6] + b'""')]),
    (TYPE, "the form has line breaks of LF; they must be CR LF", [b"--b\nContent"]),
    (TYPE, "the form has too many parts; the maximum is 16", [form(part("image", IMAGE), *[part("x", b"")] * 16)]),
    (
        JSON,
        "expected a JSON object such as",
        [b"null", b'{"image": "QUJD"}}', b'{"iou": NaN}', b'{"image": "\\ud800"}', b"\xff\xfe{\0}\0"],
    ),
    (JSON, "expected a JSON object such as", [b"[" * 100_000, b'{"image":' * 100_000, b'{"iou": ' + b"[" * 50_000]),
    (JSON, '"classes" is null; expected a string, a finite number,', [document(classes=None)]),
    (JSON, '"classes" is a list; expected', [document(classes=found) for found in ([1.5], [None], [[1]], [7] * 1001)]),
    (JSON, 'expected one image in "image"; routes such as', [b'{"images": ["QUJD"]}']),
    (JSON, 'no string "image": expected the image in base64', [b"{}", b'{"boxes": "coco"}']),
    (JSON, "more than 64 KiB beside its image", [document(classes=[7] * 50_000), b"{" + b" " * 70_000 + b'"image": "AA=="}']),
]
INVALID: list[tuple[str, str, list[bytes]]] = [
    (TYPE, f"'{'n' * 64}' is not UTF-8 text; if it is the image", [form(part("n" * 70, b"\xe9"), part("image", b"x"))]),
    (JSON, "unknown parameter 'fill'; supported", [b'{"fill": ' * 100_000, b'{"fill": 1, ' + b'"x": 1, ' * 100_000]),
    (JSON, "given more than once", [b'{"image": "QUJD", "image": "QUJD"}', b'{"image": "QUJD", "im\\u0061ge": "QUJD"}']),
]


@pytest.mark.parametrize(
    ("error", "content_type", "message", "bodies"),
    [*((MalformedRequest, *row) for row in MALFORMED), *((InvalidParameter, *row) for row in INVALID)],
    ids=count(),
)
def test_malformed_body_is_told_its_defect(error: type[GatewayError], content_type: str, message: str, bodies: list[bytes]) -> None:
    """An error that repeats a caller's names is marked, so that it is not logged."""
    for data in bodies:
        with pytest.raises(error) as caught:
            parse_body(data, content_type)
        assert message in caught.value.detail
        if error is MalformedRequest:
            has_name = any(words in caught.value.detail for words in ("fields found", "a file in the field", "unknown member"))
            assert caught.value.repeats_request == has_name


def test_truncated_form_is_malformed() -> None:
    data = form(part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"))

    for length in [*range(0, len(data), 40), len(data) - 3]:
        with pytest.raises(MalformedRequest):
            parse_body(data[:length], TYPE)
    assert parse_body(data[:-2], TYPE).image == IMAGE


PIECES = [
    *(b"--b", b"--b\r\n", b"\r\n--b--", b"\r\n", b"\n", b"\r\n\r\n", b"Content-Disposition: form-data; name=", b'"image"', b'"x"'),
    *(b"; filename=", b'"', b"%0D", b"Content-Length: ", b"5", b" ", b"\0", b"\xff", b"image=", b"&", b"{"),
]
ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.binary(max_size=30) | st.sampled_from(PIECES), max_size=20).map(b"".join)
    | st.dictionaries(st.sampled_from(["image", "classes", "x"]), ANY).map(lambda members: json.dumps(members).encode())
    | st.text(st.characters(max_codepoint=127)).map(str.encode),
    st.sampled_from([TYPE, JSON, URLENCODED]) | st.text(st.characters(max_codepoint=255)),
)
def test_any_body_is_parsed_or_a_gateway_error(data: bytes, content_type: str) -> None:
    try:
        parsed = parse_body(data, content_type)
    except GatewayError:
        return

    assert parsed.image or parsed.parameters
    assert all(isinstance(text, str | list) for _, text in parsed.parameters)


def test_parsing_takes_no_more_memory_than_is_counted() -> None:
    """The text around the image is in memory several times."""
    text = base64.b64encode(RANDOM).decode()
    urlsafe = document("data:image/png;base64," + base64.urlsafe_b64encode(RANDOM).decode().rstrip("="))
    for kind, data in (
        (JSON, document(base64.encodebytes(RANDOM).decode()).replace(b"/", b"\\/")),
        (JSON, urlsafe),
        (URLENCODED, b"image=" + quote_plus(text).encode()),
        (TYPE, form(part("image", RANDOM))),
    ):
        with peak_below(parsing_bytes(len(data), kind) + 1):
            assert parse_body(data, kind).image == RANDOM


def test_long_members_and_escapes_cost_little_memory() -> None:
    """A list of millions of numbers is skipped without a copy of it."""
    members = b'{"image": "AA==", "classes": [' + b"7," * 1_000_000 + b"7]}"
    with peak_below(100_000), pytest.raises(MalformedRequest):
        parse_json(members)
    for data in (b"image=" + b"%41" * (1 << 20), b"a=" + b"%41" * (1 << 20), b"a=b&" * (1 << 20)):
        with peak_below(4 * len(data)), pytest.raises(MalformedRequest):
            parse_body(data, URLENCODED)


def test_json_that_is_mostly_escaped_is_rejected() -> None:
    """Decoding many escapes would block all other threads; some programs write line breaks or escaped slashes into base64."""
    with pytest.raises(MalformedRequest, match="too many escaped characters"):
        parse_json(b'{"image": "' + rb"A\n" * 500_000 + b'"}')
    encoded = (b"A" * 70 + rb"\/" * 2 + b"A" * 2 + rb"\n") * 20_000
    assert len(parse_json(b'{"image": "' + encoded + b'"}').image) == 20_000 * 74 * 3 // 4


MIB = 1 << 20


def uncounted(_: int) -> None: ...


def test_body_is_decoded() -> None:
    for encoding, compress in (
        ("X-GZIP ", gzip.compress),
        ("deflate", zlib.compress),
        ("gzip", zlib.compress),
        ("identity", bytes),
    ):
        check(encoding)
        for plain in (b"", bytes(MIB), os.urandom(3 * MIB // 2).hex().encode(), os.urandom(200_000)):
            counted: list[int] = []
            assert decode(compress(plain), encoding, len(plain), counted.append) == plain
            assert sum(counted) == (0 if is_plain(encoding) else len(plain))
    for encoding in ("br", "gzip, gzip"):
        with pytest.raises(UnsupportedMediaType, match=r"send the body as it is, or with gzip or deflate$"):
            check(encoding)


def test_bomb_stops_at_the_limit() -> None:
    """A body may expand 25 times: noise does not shrink; zeros shrink a thousandfold."""
    noise = os.urandom(MIB // 10)
    plain = noise + bytes(19 * len(noise))
    for compress in (gzip.compress, zlib.compress):
        counted: list[int] = []
        data = compress(bytes(100 * MIB))
        with peak_below(6 * MIB):
            with pytest.raises(BodyTooLarge, match="the limit is 2 MiB"):
                decode(data, "gzip", 2 * MIB, uncounted)
            with pytest.raises(BodyTooLarge, match=r"^the body becomes more than 25 times as large .*; send it as it is$"):
                decode(data, "gzip", 100 * MIB, counted.append)
        assert sum(counted) <= max(25 * len(data), MIB) + MIB
        assert decode(compress(plain), "gzip", len(plain), uncounted) == plain


def test_truncated_or_continued_body_is_malformed() -> None:
    data, large = gzip.compress(os.urandom(300)), zlib.compress(os.urandom(200_000))
    for length in [1, 2, *range(3, len(data), 40), len(data) - 1]:
        with pytest.raises(MalformedRequest, match=r"truncated|corrupt"):
            decode(data[:length], "gzip", MIB, uncounted)
    whole = zlib.compress(bytes(65_525), 0)  # ends where the input is cut
    for continued in (data + b"x", whole + b"x", large + bytes(200_000), large + gzip.compress(b"more")):
        with pytest.raises(MalformedRequest, match=r"^something follows the end of the compressed body$"):
            decode(continued, "deflate", MIB, uncounted)


@given(st.sampled_from([b"", b"\x1f\x8b\x08\0", b"\x78\x9c"]), st.binary())
def test_any_body_is_decoded_or_a_gateway_error(start: bytes, rest: bytes) -> None:
    try:
        decoded = decode(start + rest, "gzip", MIB, uncounted)
    except GatewayError:
        return

    assert len(decoded) <= MIB
