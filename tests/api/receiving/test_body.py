"""Request bodies: the image as it is, a multipart form, or JSON."""

import base64
import json
import random
import re
import tracemalloc
from collections.abc import Callable
from typing import Any
from urllib.parse import quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.batch.body import parse_batch
from app.api.receiving.body import ParsedBody, parse_body, parse_json, parse_multipart, parsing_bytes
from app.api.receiving.content_type import JSON, URLENCODED
from app.errors import GatewayError, InvalidParameter, MalformedRequest

IMAGE = bytes(range(256)) + b"\r\n--almost\r\n"
NOISE = random.Random(0).randbytes(3 << 20)  # noqa: S311 - an image that hardly shrinks
TYPE = "multipart/form-data; boundary=b"
BASE64 = base64.b64encode(IMAGE)
HEADER = b'Content-Disposition: form-data; name="image"'


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"\r\nContent-Type: image/jpeg'
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def headed(header: bytes) -> bytes:
    return b"--b\r\n" + header + b"\r\n\r\n" + IMAGE + b"\r\n--b--\r\n"


def document(image: object = BASE64.decode(), **members: object) -> bytes:
    return json.dumps({"image": image, **members}).encode()


@pytest.mark.parametrize(
    "text",
    [
        base64.b64encode(NOISE).decode(),
        base64.encodebytes(NOISE).decode(),
        base64.urlsafe_b64encode(NOISE).decode().rstrip("="),
        "data:image/png;base64," + base64.urlsafe_b64encode(NOISE).decode().rstrip("="),
    ],
    ids=["base64", "lines", "of URLs", "data URL"],
)
@pytest.mark.parametrize("kind", [JSON, URLENCODED, TYPE, "image/jpeg"])
def test_parsing_takes_no_more_memory_than_is_counted(kind: str, text: str) -> None:
    """The text around the image is in memory several times."""
    bodies = {JSON: document(text).replace(b"/", b"\\/"), URLENCODED: b"image=" + quote_plus(text).encode()}
    data = bodies.get(kind, form(part("image", NOISE)) if kind == TYPE else NOISE)
    tracemalloc.start()
    try:
        assert parse_body(data, kind).image == NOISE
        assert tracemalloc.get_traced_memory()[1] <= parsing_bytes(len(data), kind)
    finally:
        tracemalloc.stop()


MIXED = "classes", ['"', "1"]
COCO = [("boxes", "coco")]
URL = "https://a.org/x.jpg"
ADDRESS = [("url", URL)]
TWICE = [*COCO, ("boxes", "pixel")]
ACCEPTED: dict[str, list[tuple[bytes, str, ParsedBody]]] = {
    "a form by its type": [
        (form(part("image", IMAGE), part("boxes", b"coco")), header, ParsedBody(IMAGE, COCO))
        for header in (TYPE, "Multipart/Form-Data ; boundary=b")
    ],
    "json by its type": [
        (document(boxes="coco"), header, ParsedBody(IMAGE, COCO)) for header in (JSON, "Application/JSON; charset=utf-8")
    ],
    "json after a byte order mark, which some programs write": [
        (b"\xef\xbb\xbf" + document(), JSON, ParsedBody(IMAGE, [])),
        (b"\xef\xbb\xbf" + document(boxes="coco"), JSON, ParsedBody(IMAGE, COCO)),
    ],
    "an image in a field, with or without a file name": [
        (form(part(field, IMAGE, filename=filename)), TYPE, ParsedBody(IMAGE, []))
        for field in ("image", "file")
        for filename in ("a.jpg", "", None)
    ],
    "parameters in the order of the form; the parser does not decide which value counts": [
        (
            form(part("x", b""), part("image", IMAGE, filename="a.jpg"), part("classes", "naïve,2".encode()), part("x", b"1")),
            TYPE,
            ParsedBody(IMAGE, [("x", ""), ("classes", "naïve,2"), ("x", "1")]),
        ),
        (form(part("image", IMAGE), *[part("x", b"")] * 15), TYPE, ParsedBody(IMAGE, [("x", "")] * 15)),
    ],
    "text in a field: base64, a data URL or an address, as in JSON, unless it has a file name": [
        row
        for field in ("image", "file")
        for row in (
            (form(part(field, BASE64), part("boxes", b"coco")), TYPE, ParsedBody(IMAGE, COCO)),
            (form(part(field, b"data:image/png;base64," + BASE64)), TYPE, ParsedBody(IMAGE, [])),
            (form(part(field, BASE64, filename="a.txt")), TYPE, ParsedBody(BASE64, [])),
            (form(part(field, URL.encode()), part("boxes", b"coco")), TYPE, ParsedBody(b"", ADDRESS + COCO)),
        )
    ],
    "a quoted boundary, and what follows the last one": [
        (
            form(part("image", IMAGE)).replace(b"--b", b"--a b=c") + b"anything",
            'multipart/form-data; charset=utf-8; Boundary="a b=c"',
            ParsedBody(IMAGE, []),
        )
    ],
    "names in any encoding": [
        (
            form(part("image", IMAGE, filename="FILE"), part("FIELD", b"1")).replace(b"FILE", filename).replace(b"FIELD", field),
            TYPE,
            ParsedBody(IMAGE, [("näme", "1")]),
        )
        for filename in (b"caf\xe9.jpg", "café.jpg".encode(), "写真.jpg".encode("shift_jis"), b"\xff\0")
        for field in ("näme".encode(), b"n\xe4me")
    ],
    "what curl declares as a form unless it is told a type": [
        (IMAGE, URLENCODED, ParsedBody(IMAGE, [])),
        (document(boxes="coco"), URLENCODED, ParsedBody(IMAGE, COCO)),
    ],
    "names and values": [
        (
            f"boxes=coco&{field}={quote_plus(BASE64)}&classes=traffic+light%2C2".encode(),
            URLENCODED,
            ParsedBody(IMAGE, [*COCO, ("classes", "traffic light,2")]),
        )
        for field in ("image", "file")
    ],
    "data URLs, which browsers make from files": [
        (document(prefix + BASE64.decode()), JSON, ParsedBody(IMAGE, []))
        for prefix in ("data:image/png;base64,", "data:;base64,", "DATA:image/jpeg;BASE64,")
    ],
    "an alias beside its parameter, which is left to `parameters.parse`": [
        (document(model="a", boxes="coco", model_name="b"), JSON, ParsedBody(IMAGE, [("model", "a"), *COCO, ("model_name", "b")])),
        (b'{"im\\u0061ge": "QUJD", "classes": ["\\"", 1], "boxes": "coco"}', JSON, ParsedBody(b"ABC", [*COCO, MIXED])),
    ],
    "base64 in lines, and with the escapes of PHP": [
        (document("\r\n\t ".join(BASE64.decode())), JSON, ParsedBody(IMAGE, [])),
        (b'{"image": "' + base64.b64encode(b"\xff" * 300).replace(b"/", b"\\/") + b'"}', JSON, ParsedBody(b"\xff" * 300, [])),
    ],
    "an address, in any scheme": [
        (document(f"{scheme}://a.org/x", boxes="coco"), JSON, ParsedBody(b"", [*COCO, ("url", f"{scheme}://a.org/x")]))
        for scheme in ("https", "HTTPS", "http", "file")
    ],
    "an address and no image": [
        (b'{"boxes": "coco", "url": "https://a.org/x.jpg"}', JSON, ParsedBody(b"", COCO + ADDRESS)),
        (form(part("url", URL.encode())), TYPE, ParsedBody(b"", ADDRESS)),
    ],
}


@pytest.mark.parametrize("rows", ACCEPTED.values(), ids=ACCEPTED)
def test_a_body_is_parsed(rows: list[tuple[bytes, str, ParsedBody]]) -> None:
    for data, content_type, expected in rows:
        image, parameters = parse_body(data, content_type)
        assert (image, sorted(parameters)) == (expected.image, sorted(expected.parameters))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cat,2", "cat,2"),
        (["cat", "traffic light"], ["cat", "traffic light"]),
        ([0, "cat", 2], ["0", "cat", "2"]),
        ([], []),
        (0.4, "0.4"),
        (0, "0"),
        (100, "100"),
        (-1, "-1"),
        (True, "true"),
        (False, "false"),
        ("", ""),
    ],
)
def test_json_members_are_parameters(value: object, text: str | list[str]) -> None:
    """Text stays, numbers and truth values are written as they came, also in lists."""
    assert parse_json(document(classes=value)).parameters == [("classes", text)]


NO_BASE64 = '"image" is not base64; to send a file, use curl -F image=@image.jpg$'
ONE = r"expected one image in the field 'image' \(or 'file'\), found "
SEVERAL = "; routes such as /detect/batch and /ocr/batch take several$"
NO_BOUNDARY = "the Content-Type header has no boundary; let the HTTP client write "
OTHER_BOUNDARY = "the boundary of the Content-Type header does not occur in the body; let the HTTP client write "
AN_OBJECT = re.escape('expected a JSON object such as {"image": "<base64>", "confidence": 0.4}') + "$"
FORM = "the form is not well formed: "
NO_STRING = 'the JSON object has no string "image": '
MALFORMED: dict[str, list[tuple[bytes, str, str]]] = {
    "an empty image, as in a form without a chosen file": [
        (form(part("image", b"", filename="")), TYPE, "the image is empty$"),
        (document(""), JSON, "the image is empty$"),
        (document("data:image/png;base64,"), JSON, "the image is empty$"),
        (document("data:nothing"), JSON, "the image is empty$"),
        (b"image=", URLENCODED, "the image is empty$"),
    ],
    "no base64": [
        *((document(text), JSON, NO_BASE64) for text in ("QUJDR", "QU==JD", "äöü", "\0", "data:,QUJDR")),
        (form(part("file", b"@image.jpg")), TYPE, NO_BASE64),
        (b"image=%40", URLENCODED, NO_BASE64),
    ],
    "no image or several in a form": [
        (form(part("confidence", b"0.4"), part("boxes", b"coco")), TYPE, ONE + "0; fields found: 'confidence', 'boxes'$"),
        (form(*[part("x" * 40, b"x")] * 5), TYPE, f"{ONE}0; fields found: {', '.join([repr('x' * 32)] * 4)}$"),
        (form(part("picture", b"x")), TYPE, ONE + "0; fields found: 'picture'$"),
        (form(), TYPE, ONE + "0; fields found: none$"),
        (form(part("image", b"a"), part("image", b"b")), TYPE, ONE + "2" + SEVERAL),
        (form(part("image", b"a"), part("file", b"b")), TYPE, ONE + "2" + SEVERAL),
        (form(part("url", URL.encode()), part("image", b"a"), part("image", b"b")), TYPE, ONE + "2" + SEVERAL),
        (form(part("file", URL.encode()), part("image", IMAGE)), TYPE, "send either an image or a url, not both$"),
        (b"boxes=coco&img=QUJD", URLENCODED, ONE + "0; fields found: 'boxes', 'img'$"),
        (b"image=QUJD&file=QUJD", URLENCODED, ONE + "2" + SEVERAL),
        (b"hello", URLENCODED, "the body is neither an image nor a form; to send a file, use curl --data-binary @image.jpg"),
    ],
    "a file in a field of another name": [
        (
            form(part(name, content, filename="a.jpg")),
            TYPE,
            re.escape(f"there is a file in the field {name[:64]!r}; expected it in 'image' (or 'file')")
            + (SEVERAL if name == "images" else "$"),
        )
        for name in ("Image", "image[]", "img", "images", "näme", "n" * 70)
        for content in (IMAGE, b"text")
    ],
    "a wrong boundary": [
        (form(part("image", IMAGE)), f"multipart/form-data;{parameters}", message)
        for parameters, message in (
            *((given, NO_BOUNDARY) for given in ("", " boundary=", ' boundary=""', ' boundary="b', " boundary=\xff\xfe")),
            *((f" boundary={given}", OTHER_BOUNDARY) for given in ("c", "x" * 8000)),
            (' boundary="a\nb"', f"{FORM}invalid characters in boundary$"),
        )
    ],
    "a bad header of a part": [
        (headed(header), TYPE, f"{message}$")
        for header, message in (
            (b"", f"{FORM}missing Content-Disposition part header"),
            (b"Content-Disposition form-data", f"{FORM}malformed part header"),
            (HEADER + b"\r\nContent-Length: 3", f"{FORM}part Content-Length exceeded"),
            (HEADER + b"\r\nX: x" * 20, f"{FORM}maximum part header count exceeded"),
            *(
                (
                    f"Content-Disposition: {nameless}".encode(),
                    'a part has no name; expected Content-Disposition: form-data; name="image"',
                )
                for nameless in ("form-data", 'form-data; name=""', 'form-data; filename="a.jpg"')
            ),
        )
    ],
    "another defect of a form": [
        (b"x--b\r\n", TYPE, f"{FORM}unexpected byte in front of first boundary$"),
        (b"--b\nContent", TYPE, "the form has line breaks of LF; they must be CR LF"),
        (b"--b\r\n" + HEADER + b"\n\n", TYPE, "the headers of a part end in LF; they must end in CR LF, and an empty line"),
        (form(part("image", IMAGE))[:-6], TYPE, "the form ends before its last boundary"),
        *(
            (form(part("image", IMAGE), *[part("x", b"")] * count), TYPE, "the form has too many parts; the maximum is 16$")
            for count in (16, 1500)
        ),
    ],
    "anything but a flat object of texts, numbers, truth values and lists, which is answered with an example": [
        *(
            (data, JSON, AN_OBJECT)
            for data in (
                *(
                    b"null",
                    b"5",
                    b'"text"',
                    b"[]",
                    b'["image"]',
                    b"{",
                    b'{"image": "QUJD"',
                    b'{"image": "QUJD"}}',
                    b"{'image': 'QUJD'}",
                ),
                b'{"image": "QUJD", "confidence": NaN}',
                b'{"image": "QUJD", "classes": "\\ud800"}',
                b'{"image": "\\ud800"}',
                b'{"image": "QUJD", "classes": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
                b'{"image": "\xff"}',
                b"\xff\xfe{\0}\0",
                b"[" * 100_000,
                b'{"image":' * 100_000,
            )
        ),
        (b'{"image": "QUJD"', URLENCODED, AN_OBJECT),
    ],
    "a member of another type, or a list of more classes than any model has": [
        (f'{{"image": "QUJD", "classes": {value}}}'.encode(), JSON, f'"classes" is {found}; expected a string, a finite number,')
        for value, found in (
            *(("null", "null"), ("{}", "an object"), ("1e400", "a number")),
            *((f"[{items}]", "a list") for items in ("1.5", "0, null", "[1]", "9" * 5000, ",".join("7" * 1001))),
        )
    ],
    "a name that other services have for the image": [
        (json.dumps({name: "QUJD"}).encode(), JSON, rf"unknown member '{name}'; expected the image in \"image\", in base64$")
        for name in ("file", "Image", "img", "IMAGE_BASE64", "imageData", "picture")
    ],
    "several images": [
        (b'{"images": ["QUJD"]}', JSON, "unknown member 'images'; .*" + SEVERAL),
        (b'{"image": ["QUJD"]}', JSON, NO_STRING + "it is a list" + SEVERAL),
    ],
    "an object without an image": [
        (data, JSON, f"{NO_STRING}{found}expected the image in base64$")
        for data, found in (
            (b"{}", ""),
            (b'{"boxes": "coco"}', ""),
            (b'{"image": 5}', "it is a number; "),
            (b'{"image": -5}', "it is a number; "),
            (b'{"image": {"b64": "QUJD"}}', "it is an object; "),
            (b'{"image": null}', "it is null; "),
            (b'{"image": false}', "it is false; "),
        )
    ],
    "long members beside the image": [
        (data, JSON, "the JSON object has more than 64 KiB beside its image$")
        for member in (
            b'"classes": [' + b"7," * 50_000 + b"7]",
            b'"model": "' + b"x" * 70_000 + b'"',
            b" " * 70_000 + b'"model": "x"',
        )
        for data in (
            b'{"image": "AA==", ' + member + b"}",
            b"{" + member + b', "image": "' + base64.b64encode(bytes(100_000)) + b'"}',
        )
    ]
    + [(b'{"url": "https://a.org/' + b"x" * (1 << 16) + b'"}', JSON, "the JSON object has more than 64 KiB beside its image$")],
}
INVALID: dict[str, list[tuple[bytes, str, str]]] = {
    "a parameter that is not text": [
        (
            form(part(name, b"caf\xe9"), part("image", IMAGE)),
            TYPE,
            f"'{name[:64]}' is not UTF-8 text; if it is the image, its field must be 'image'",
        )
        for name in ("classes", "n" * 3000)
    ],
    "an unknown member, however many follow and whatever they are": [
        (data, JSON, "unknown parameter 'fill'; supported parameters: timeout_ms")
        for data in (b'{"fill": "QUJD"}', b'{"fill": ' * 100_000, b'{"fill": 1, ' + b'"x": 1, ' * 100_000)
    ],
    "a member that is given twice": [
        (data, JSON, "a member of the JSON object is given more than once$")
        for data in (
            b'{"image": "QUJD", "image": "QUJD"}',
            b'{"image": "QUJD", "boxes": "coco", "image": ""}',
            b'{"image": "QUJD", "im\\u0061ge": "QUJD"}',
            b'{"image": 5, "image": "QUJD"}',
            b'{"confidence": 0.1, "image": "QUJD", "confidence": 0.2}',
        )
    ],
}


@pytest.mark.parametrize(
    ("error", "rows"),
    [*((MalformedRequest, rows) for rows in MALFORMED.values()), *((InvalidParameter, rows) for rows in INVALID.values())],
    ids=[*MALFORMED, *INVALID],
)
def test_malformed_body_is_told_what_is_wrong(error: type[GatewayError], rows: list[tuple[bytes, str, str]]) -> None:
    for data, content_type, message in rows:
        with pytest.raises(error, match="^" + message):
            parse_body(data, content_type)


def test_a_truncated_form_is_malformed() -> None:
    data = form(part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"))

    for length in range(len(data) - 2):
        with pytest.raises(MalformedRequest):
            parse_multipart(data[:length], TYPE)
    assert parse_multipart(data[:-2], TYPE).image == IMAGE


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b'{"image https://a.org/": ""}', JSON),
        (b'{"img": ""}', JSON),
        (b"img=https://a.org/", URLENCODED),
        (form(part("picture", b"x")), TYPE),
        (form(part("picture", b"x", filename="a.jpg")), TYPE),
    ],
)
def test_an_error_that_repeats_a_name_is_marked(data: bytes, content_type: str) -> None:
    """The name is the caller's text, which must not be logged."""
    with pytest.raises(GatewayError) as caught:
        parse_body(data, content_type)
    assert caught.value.repeats_request


PIECES = [
    *(b"--b", b"--b\r\n", b"\r\n--b--", b"\r\n", b"\n", b"\r\n\r\n", b"Content-Disposition: form-data; name=", b'"image"', b'"x"'),
    *(b"; filename=", b'"', b"%0D", b"Content-Length: ", b"5", b" ", b"\0", b"\xff"),
]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=30), st.sampled_from(PIECES)), max_size=20),
    st.one_of(st.just(TYPE), st.text(st.characters(max_codepoint=255))),
)
def test_any_multipart_body_is_parsed_or_a_gateway_error(pieces: list[bytes], content_type: str) -> None:
    try:
        parsed = parse_multipart(b"".join(pieces), content_type)
    except GatewayError:
        return

    body = b"".join(pieces)
    assert parsed.image in body or base64.b64encode(parsed.image).rstrip(b"=") in body.translate(None, b" \r\n\t")


def test_long_members_cost_no_memory() -> None:
    """A list of millions of numbers is skipped without a copy of it."""
    data = b'{"image": "AA==", "classes": [' + b"7," * 1_000_000 + b"7]}"
    tracemalloc.start()
    with pytest.raises(MalformedRequest):
        parse_json(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


ANY: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(
    st.one_of(st.binary(), st.dictionaries(st.sampled_from(["image", "classes", "x"]), ANY).map(lambda o: json.dumps(o).encode()))
)
def test_any_json_body_is_parsed_or_a_gateway_error(data: bytes) -> None:
    try:
        parsed = parse_json(data)
    except GatewayError:
        return

    assert all(isinstance(text, str) for _, text in parsed.parameters)


@pytest.mark.parametrize("parse", [parse_json, lambda data: parse_batch(data, "application/json")])
def test_json_that_is_mostly_escaped_is_rejected(parse: Callable[[bytes], object]) -> None:
    """Decoding many escapes would block all other threads."""
    with pytest.raises(MalformedRequest, match="too many escaped characters"):
        parse(b'{"image": "' + rb"A\n" * 500_000 + b'"}')


def test_line_breaks_in_base64_are_no_reason() -> None:
    """Some programs write line breaks or escaped slashes into base64."""
    encoded = (b"A" * 70 + rb"\/" * 2 + b"A" * 2 + rb"\n") * 20_000

    assert len(parse_json(b'{"image": "' + encoded + b'"}').image) == 20_000 * 74 * 3 // 4
