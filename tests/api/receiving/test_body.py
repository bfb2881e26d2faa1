"""Request bodies: the image as it is, a form, or JSON."""

import base64
import json
import random
import sys
from collections.abc import Callable
from itertools import count
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.batch.body import parse_batch
from app.api.receiving import urlencoded
from app.api.receiving.body import FILE_FIELDS, ParsedBody, parse_body, parse_json, parsing_bytes
from app.api.receiving.content_type import JSON, URLENCODED
from app.errors import GatewayError, InvalidParameter, MalformedRequest
from tests.api.conftest import peak_below
from tests.imaging.samples import FORMATS, NOISE, encode

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
        # Some programs write a byte order mark.
        (b"\xef\xbb\xbf" + document(boxes="coco"), JSON, IMAGE, COCO),
        (form(part("file", IMAGE, filename="a.jpg")), TYPE, IMAGE, []),
        (form(part("image", IMAGE, filename="")), TYPE, IMAGE, []),
        # The parser does not decide which of several values counts.
        (form(part("x", b""), part("image", IMAGE), *[part("x", b"1")] * 14), TYPE, IMAGE, [("x", ""), *[("x", "1")] * 14]),
        # Text in a field is base64, a data URL or an address, as in JSON, unless it has a file name.
        (form(part("image", BASE64), part("boxes", b"coco")), TYPE, IMAGE, COCO),
        (form(part("file", b"data:image/png;base64," + BASE64)), TYPE, IMAGE, []),
        (form(part("file", BASE64, filename="a.txt")), TYPE, BASE64, []),
        (form(part("image", URL.encode()), part("boxes", b"coco")), TYPE, b"", ADDRESS + COCO),
        (form(part("url", URL.encode())), TYPE, b"", ADDRESS),
        (form(part("image", IMAGE)).replace(b"--b", b"--a b") + b"more", 'multipart/form-data; x=y; Boundary="a b"', IMAGE, []),
        (headed(HEADER + b'; filename="\xff\0"').replace(b"--b--", part("näme", b"1") + b"--b--"), TYPE, IMAGE, [("näme", "1")]),
        (form(part("image", IMAGE), part("NAME", b"1")).replace(b"NAME", b"n\xe4me"), TYPE, IMAGE, [("näme", "1")]),
        # curl declares anything as a form unless it is told a type.
        (IMAGE, URLENCODED, IMAGE, []),
        (b"BM\0=", URLENCODED, b"BM\0=", []),
        (document(boxes="coco"), URLENCODED, IMAGE, COCO),
        # Escapes are decoded, but a plus sign in base64 stays one.
        (b"image=AP%2Bf%2f/+A&x=a+b%2C2&b=&c", URLENCODED, b"\0\xff\x9f\xff\xff\x80", [("x", "a b,2"), ("b", ""), ("c", "")]),
        (f"file={quote_plus(BASE64)}".encode(), URLENCODED, IMAGE, []),
        (f"image={quote_plus(URL)}".encode(), URLENCODED, b"", ADDRESS),
        *((document(f"{prefix}{BASE64.decode()}"), JSON, IMAGE, []) for prefix in ("data:;base64,", "DATA:image/jpeg;BASE64,")),
        *((document(text), JSON, image, []) for text, image in (("QUI", b"AB"), ("-_8", b"\xfb\xff"))),  # as in URLs
        # An alias beside its parameter is left to `parameters.parse`.
        (document(model="a", model_name="b"), JSON, IMAGE, [("model", "a"), ("model_name", "b")]),
        (b'{"im\\u0061ge": "QUJD", "classes": ["\\"", 1]}', JSON, b"ABC", [("classes", ['"', "1"])]),
        # Text stays, numbers and truth values are written as they came.
        (document(boxes="coco", classes=[]), JSON, IMAGE, [*COCO, ("classes", [])]),
        (document(iou=0.4, max_detections=-1), JSON, IMAGE, [("iou", "0.4"), ("max_detections", "-1")]),
        (document(agnostic=True, truncated=False), JSON, IMAGE, [("agnostic", "true"), ("truncated", "false")]),
        (document("\r\n\t ".join(BASE64.decode())), JSON, IMAGE, []),
        (b'{"image": "' + base64.b64encode(b"\xff" * 300).replace(b"/", b"\\/") + b'"}', JSON, b"\xff" * 300, []),
        (document("FILE://a.org/x", boxes="coco"), JSON, b"", [*COCO, ("url", "FILE://a.org/x")]),
        (json.dumps({"boxes": "coco", "url": URL}).encode(), JSON, b"", COCO + ADDRESS),
    ],
    ids=count(),
)
def test_body_is_parsed(data: bytes, content_type: str, image: bytes, parameters: list[Any]) -> None:
    parsed = parse_body(data, content_type)

    assert (parsed.image, sorted(parsed.parameters)) == (image, sorted(parameters))


@pytest.mark.parametrize("image_format", FORMATS)
def test_image_that_is_declared_as_a_form_is_none(image_format: str) -> None:
    data = encode(NOISE, image_format)
    assert parse_body(data, URLENCODED) == ParsedBody(data, [])
    if image_format in {"JPEG", "PNG"}:  # `curl --data @image.jpg` drops zero bytes and line breaks
        with pytest.raises(MalformedRequest, match=r"as `curl --data` does it; use curl --data-binary @image\.jpg"):
            parse_body(data.translate(None, b"\0\r\n"), URLENCODED)


SENT = form(part("image", IMAGE))
MALFORMED: list[tuple[str, str, list[bytes]]] = [
    (TYPE, "the image is empty", [form(part("image", b"", filename=""))]),
    (JSON, "the image is empty", [document(""), document("data:image/png;base64,"), document("data:nothing")]),
    (URLENCODED, "the image is empty", [b"image="]),
    (JSON, "is not base64; to send a file, use", [document(text) for text in ("QUJDR", "QU==JD", "äöü", "\0", "data:,QUJDR")]),
    (TYPE, "is not base64; to send a file, use curl -F", [form(part("file", b"@image.jpg"))]),
    (URLENCODED, "is not base64; to send a file, use curl -F", [b"image=%40"]),
    (TYPE, "found 0; fields found: 'confidence', 'boxes'", [form(part("confidence", b"0.4"), part("boxes", b"coco"))]),
    (TYPE, f"found 0; fields found: {', '.join([repr('x' * 32)] * 4)}", [form(*[part("x" * 40, b"x")] * 5)]),
    (TYPE, "found 0; fields found: none", [form()]),
    (TYPE, "found 2; routes such as", [form(part("url", URL.encode()), part("image", b"a"), part("file", b"b"))]),
    (TYPE, "send either an image or a url, not both", [form(part("file", URL.encode()), part("image", IMAGE))]),
    (URLENCODED, "found 0; fields found: 'boxes', 'img'", [b"boxes=coco&img=QUJD"]),
    (URLENCODED, "found 2; routes such as", [b"image=QUJD&file=QUJD"]),
    (URLENCODED, "neither an image nor a form; to send a file, use curl --data-binary", [b"hello", b"x" * (1 << 20)]),
    (URLENCODED, "the form has too many fields; the maximum is 16", [b"&".join([b"a=1"] * 17)]),
    (URLENCODED, "the form has more than 64 KiB beside its image", [b"image=QUJD&x=" + b"y" * (1 << 16)]),
    (TYPE, "a file in the field 'Image'; expected it in 'image'", [form(part("Image", b"text", filename="a.jpg"))]),
    (TYPE, "(or 'file'); routes such as", [form(part("images", IMAGE, filename="a.jpg"))]),
    (TYPE, f"a file in the field '{'n' * 64}'; expected", [form(part("n" * 70, IMAGE, filename="a.jpg"))]),
    *((f"multipart/form-data;{given}", "has no boundary", [SENT]) for given in ("", ' boundary="b', " boundary=\xff\xfe")),
    *((f"multipart/form-data; boundary={given}", "does not occur in the body", [SENT]) for given in ("c", "x" * 8000)),
    ('multipart/form-data; boundary="a\nb"', "not well formed: invalid characters in boundary", [SENT]),
    (TYPE, "not well formed: missing Content-Disposition part header", [headed(b"")]),
    (TYPE, "not well formed: malformed part header", [headed(b"Content-Disposition form-data")]),
    (TYPE, "not well formed: maximum part header count exceeded", [headed(HEADER + b"\r\nX: x" * 20)]),
    (TYPE, "a part has no name; expected", [headed(HEADER[:30]), headed(HEADER[:-6] + b'""')]),
    (TYPE, "not well formed: unexpected byte in front of first boundary", [b"x--b\r\n"]),
    (TYPE, "the form has line breaks of LF; they must be CR LF", [b"--b\nContent"]),
    (TYPE, "the headers of a part end in LF; they must end in CR LF", [b"--b\r\n" + HEADER + b"\n\n"]),
    (TYPE, "the form ends before its last boundary", [SENT[:-6]]),
    (TYPE, "the form has too many parts; the maximum is 16", [form(part("image", IMAGE), *[part("x", b"")] * 16)]),
    (JSON, "expected a JSON object such as", [b"null", b"5", b'["image"]', b"{", b'{"image": "QUJD"}}', b"{'image': 'QUJD'}"]),
    (JSON, "expected a JSON object such as", [b'{"iou": NaN}', b'{"image": "\\ud800"}', b'{"image": "\xff"}', b"\xff\xfe{\0}\0"]),
    (JSON, "expected a JSON object such as", [b"[" * 100_000, b'{"image":' * 100_000, b'{"iou": ' + b"[" * 50_000]),
    (URLENCODED, "expected a JSON object such as", [b'{"image": "QUJD"']),
    (JSON, '"classes" is null; expected a string, a finite number,', [document(classes=None)]),
    (JSON, '"classes" is an object; expected', [document(classes={})]),
    (JSON, '"classes" is a number; expected', [b'{"image": "QUJD", "classes": 1e400}']),
    (JSON, '"classes" is a list; expected', [document(classes=found) for found in ([1.5], [None], [[1]], [7] * 1001)]),
    (JSON, 'expected the image in "image"', [json.dumps({name: "QUJD"}).encode() for name in ("file", "IMAGE_BASE64", "picture")]),
    (JSON, 'expected one image in "image"; routes such as', [b'{"images": ["QUJD"]}']),
    (JSON, 'no string "image": it is a list; routes such as', [b'{"image": ["QUJD"]}']),
    (JSON, 'no string "image": expected the image in base64', [b"{}", b'{"boxes": "coco"}']),
    (JSON, 'no string "image": it is a number; expected the image in base64', [document(-5)]),
    (JSON, 'no string "image": it is an object;', [document({"b64": "QUJD"})]),
    (JSON, 'no string "image": it is null;', [document(None)]),
    (JSON, 'no string "image": it is false;', [document(image=False)]),
    (JSON, "more than 64 KiB beside its image", [document(classes=[7] * 50_000), b"{" + b" " * 70_000 + b'"image": "AA=="}']),
    (JSON, "more than 64 KiB beside its image", [b'{"model": "' + b"x" * 70_000 + b'", "image": "' + b"AAAA" * 30_000 + b'"}']),
    (JSON, "more than 64 KiB beside its image", [b'{"url": "https://a.org/' + b"x" * (1 << 16) + b'"}']),
]
INVALID: list[tuple[str, str, list[bytes]]] = [
    (TYPE, f"'{'n' * 64}' is not UTF-8 text; if it is the image", [form(part("n" * 70, b"\xe9"), part("image", b"x"))]),
    (JSON, "unknown parameter 'fill'; supported", [b'{"fill": ' * 100_000, b'{"fill": 1, ' + b'"x": 1, ' * 100_000]),
    (JSON, "given more than once", [b'{"image": "QUJD", "image": "QUJD"}', b'{"image": "QUJD", "im\\u0061ge": "QUJD"}']),
    (JSON, "given more than once", [b'{"iou": 0.1, "image": "QUJD", "iou": 0.2}', b'{"image": 5, "boxes": "coco", "image": ""}']),
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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (JSON, base64.encodebytes(RANDOM).decode()),
        (JSON, "data:image/png;base64," + base64.urlsafe_b64encode(RANDOM).decode().rstrip("=")),
        (URLENCODED, base64.b64encode(RANDOM).decode()),
        (TYPE, ""),
        ("image/jpeg", ""),
    ],
)
def test_parsing_takes_no_more_memory_than_is_counted(kind: str, text: str) -> None:
    """The text around the image is in memory several times."""
    bodies = {JSON: document(text).replace(b"/", b"\\/"), URLENCODED: b"image=" + quote_plus(text).encode()}
    data = bodies.get(kind, form(part("image", RANDOM)) if kind == TYPE else RANDOM)
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


@pytest.mark.parametrize("before", range(3))
def test_escapes_are_undone_slice_by_slice(before: int) -> None:
    """Wherever one is cut, the text is the same; no call copies more than a slice, and other threads run in between."""
    copied: list[int] = []

    def note(_: object, event: str, function: Any) -> None:  # noqa: ANN401
        if event == "c_call" and function.__name__ == "replace":
            copied.append(len(function.__self__))

    sys.setprofile(note)
    try:
        images, _ = urlencoded.split(b"image=" + b"x" * before + b"%2B" * (1 << 20) + b"%", FILE_FIELDS, 16)
    finally:
        sys.setprofile(None)

    assert images == ["x" * before + "+" * (1 << 20) + "%"]
    assert len(copied) > 3
    assert max(copied) <= 1 << 20


@pytest.mark.parametrize("parse", [parse_json, lambda data: parse_batch(data, "application/json")])
def test_json_that_is_mostly_escaped_is_rejected(parse: Callable[[bytes], object]) -> None:
    """Decoding many escapes would block all other threads; some programs write line breaks or escaped slashes into base64."""
    with pytest.raises(MalformedRequest, match="too many escaped characters"):
        parse(b'{"image": "' + rb"A\n" * 500_000 + b'"}')
    encoded = (b"A" * 70 + rb"\/" * 2 + b"A" * 2 + rb"\n") * 20_000
    assert len(parse_json(b'{"image": "' + encoded + b'"}').image) == 20_000 * 74 * 3 // 4
