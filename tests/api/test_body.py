"""Request bodies: the image as it is, a form, or JSON."""

import base64
import json
import random
from itertools import count
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.receiving.body import ParsedBody, parse_body, parse_json, parsing_bytes
from app.api.receiving.content_type import JSON, URLENCODED
from app.errors import GatewayError, InvalidParameter, MalformedRequest
from tests.api.conftest import peak_below
from tests.imaging.samples import NOISE, encode

IMAGE = bytes(range(256)) + b"\r\n--almost\r\n"
RANDOM = random.Random(0).randbytes(3 << 20)  # noqa: S311 - an image that hardly shrinks
TYPE = "multipart/form-data; boundary=b"
BASE64 = base64.b64encode(IMAGE)
HEADER = b'Content-Disposition: form-data; name="image"'
URL = "https://a.org/x.jpg"
COCO, ADDRESS = [("boxes", "coco")], [("url", URL)]


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
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
        (document(boxes="coco"), "Application/JSON; charset=utf-8", IMAGE, COCO),
        (form(part("file", IMAGE, filename="a.jpg")), TYPE, IMAGE, []),
        # The parser does not decide which of several values counts.
        (form(part("x", b""), part("image", IMAGE), *[part("x", b"1")] * 14), TYPE, IMAGE, [("x", ""), *[("x", "1")] * 14]),
        # Text in a field is base64, a data URL or an address, as in JSON, unless it has a file name.
        (form(part("image", BASE64), part("boxes", b"coco")), TYPE, IMAGE, COCO),
        (form(part("file", BASE64, filename="a.txt")), TYPE, BASE64, []),
        (form(part("image", URL.encode()), part("boxes", b"coco")), TYPE, b"", ADDRESS + COCO),
        (form(part("image", IMAGE)).replace(b"--b", b"--a b") + b"more", 'multipart/form-data; x=y; Boundary="a b"', IMAGE, []),
        (headed(HEADER + b'; filename="\xff\0"').replace(b"--b--", part("näme", b"1") + b"--b--"), TYPE, IMAGE, [("näme", "1")]),
        # curl declares anything as a form unless it is told a type.
        (IMAGE, URLENCODED, IMAGE, []),
        (document(boxes="coco"), URLENCODED, IMAGE, COCO),
        # Escapes are decoded, but a plus sign in base64 stays one.
        (b"image=AP%2Bf%2f/+A&x=a+b%2C2&b=&c", URLENCODED, b"\0\xff\x9f\xff\xff\x80", [("x", "a b,2"), ("b", ""), ("c", "")]),
        (f"image={quote_plus(URL)}".encode(), URLENCODED, b"", ADDRESS),
        *((document(f"{prefix}{BASE64.decode()}"), JSON, IMAGE, []) for prefix in ("data:;base64,", "DATA:image/jpeg;BASE64,")),
        *((document(text), JSON, image, []) for text, image in (("QUI", b"AB"), ("-_8", b"\xfb\xff"))),  # as in URLs
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
    (TYPE, "the image is empty", [form(part("image", b"", filename=""))]),
    (JSON, "is not base64; to send a file, use", [document(text) for text in ("QUJDR", "QU==JD", "äöü", "\0", "data:,QUJDR")]),
    (TYPE, "is not base64; to send a file, use curl -F", [form(part("file", b"@image.jpg"))]),
    (TYPE, "found 0; fields found: 'confidence', 'boxes'", [form(part("confidence", b"0.4"), part("boxes", b"coco"))]),
    (TYPE, "found 2; routes such as", [form(part("url", URL.encode()), part("image", b"a"), part("file", b"b"))]),
    (TYPE, "send either an image or a url, not both", [form(part("file", URL.encode()), part("image", IMAGE))]),
    (URLENCODED, "neither an image nor a form; to send a file, use curl --data-binary", [b"hello", b"x" * (1 << 20)]),
    (URLENCODED, "the form has too many fields; the maximum is 16", [b"&".join([b"a=1"] * 17)]),
    (URLENCODED, "the form has more than 64 KiB beside its image", [b"image=QUJD&x=" + b"y" * (1 << 16)]),
    (TYPE, f"a file in the field '{'n' * 64}'; expected", [form(part("n" * 70, IMAGE, filename="a.jpg"))]),
    ('multipart/form-data; boundary="b', "has no boundary", [SENT]),
    ("multipart/form-data; boundary=c", "does not occur in the body", [SENT]),
    (TYPE, "not well formed: maximum part header count exceeded", [headed(HEADER + b"\r\nX: x" * 20)]),
    (TYPE, "a part has no name; expected", [headed(HEADER[:30]), headed(HEADER[:-6] + b'""')]),
    (TYPE, "the form has line breaks of LF; they must be CR LF", [b"--b\nContent"]),
    (TYPE, "the headers of a part end in LF; they must end in CR LF", [b"--b\r\n" + HEADER + b"\n\n"]),
    (TYPE, "the form ends before its last boundary", [SENT[:-6]]),
    (TYPE, "the form has too many parts; the maximum is 16", [form(part("image", IMAGE), *[part("x", b"")] * 16)]),
    (
        JSON,
        "expected a JSON object such as",
        [b"null", b"{", b'{"image": "QUJD"}}', b'{"iou": NaN}', b'{"image": "\\ud800"}', b"\xff\xfe{\0}\0"],
    ),
    (JSON, "expected a JSON object such as", [b"[" * 100_000, b'{"image":' * 100_000, b'{"iou": ' + b"[" * 50_000]),
    (JSON, '"classes" is null; expected a string, a finite number,', [document(classes=None)]),
    (JSON, '"classes" is a list; expected', [document(classes=found) for found in ([1.5], [None], [[1]], [7] * 1001)]),
    (JSON, 'expected the image in "image"', [json.dumps({name: "QUJD"}).encode() for name in ("file", "IMAGE_BASE64", "picture")]),
    (JSON, 'expected one image in "image"; routes such as', [b'{"images": ["QUJD"]}']),
    (JSON, 'no string "image": it is a list; routes such as', [b'{"image": ["QUJD"]}']),
    (JSON, 'no string "image": expected the image in base64', [b"{}", b'{"boxes": "coco"}']),
    (JSON, 'no string "image": it is a number; expected the image in base64', [document(-5)]),
    (JSON, "more than 64 KiB beside its image", [document(classes=[7] * 50_000), b"{" + b" " * 70_000 + b'"image": "AA=="}']),
    (JSON, "more than 64 KiB beside its image", [b'{"url": "https://a.org/' + b"x" * (1 << 16) + b'"}']),
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
