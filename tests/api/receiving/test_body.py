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
from app.api.receiving.body import ParsedBody, needs_parsing, parse_body, parse_json, parse_multipart, parsing_bytes
from app.api.receiving.content_type import URLENCODED
from app.errors import GatewayError, InvalidParameter, MalformedRequest

IMAGE = bytes(range(256)) + b"\r\n--almost\r\n"
NOISE = random.Random(0).randbytes(3 << 20)  # noqa: S311 - an image that hardly shrinks
TYPE = "multipart/form-data; boundary=b"
HEADER = b'Content-Disposition: form-data; name="image"'


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"\r\nContent-Type: image/jpeg'
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def document(image: object = base64.b64encode(IMAGE).decode(), **members: object) -> bytes:
    return json.dumps({"image": image, **members}).encode()


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("multipart/form-data", True),
        ("application/json", True),
        ("application/x-www-form-urlencoded", True),
        ("image/jpeg", False),
        ("application/octet-stream", False),
        ("", False),
    ],
)
def test_only_forms_have_to_be_parsed(content_type: str, *, expected: bool) -> None:
    assert needs_parsing(content_type) is expected
    assert needs_parsing(content_type, "Identity") is expected
    assert needs_parsing(content_type, "gzip")


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
@pytest.mark.parametrize("kind", ["application/json", URLENCODED, TYPE, "image/jpeg"])
def test_parsing_takes_no_more_memory_than_is_counted(kind: str, text: str) -> None:
    """The text around the image is in memory several times."""
    bodies = {"application/json": document(text).replace(b"/", b"\\/"), URLENCODED: b"image=" + quote_plus(text).encode()}
    data = bodies.get(kind, form(part("image", NOISE)) if kind == TYPE else NOISE)
    tracemalloc.start()
    try:
        assert parse_body(data, kind).image == NOISE
        assert tracemalloc.get_traced_memory()[1] <= parsing_bytes(len(data), kind)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("members", [{}, {"boxes": "coco"}])
def test_a_byte_order_mark_does_not_count(members: dict[str, object]) -> None:
    """Some programs write a byte order mark before JSON."""
    data = b"\xef\xbb\xbf" + document(**members)

    assert parse_body(data, "application/json") == ParsedBody(IMAGE, [("boxes", "coco")] if members else [])


@pytest.mark.parametrize("header", [TYPE, "Multipart/Form-Data ; boundary=b"])
def test_a_form_is_parsed_by_its_content_type(header: str) -> None:
    assert parse_body(form(part("image", IMAGE), part("boxes", b"coco")), header) == ParsedBody(IMAGE, [("boxes", "coco")])


@pytest.mark.parametrize("header", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_parsed_by_its_content_type(header: str) -> None:
    assert parse_body(document(boxes="coco"), header) == ParsedBody(IMAGE, [("boxes", "coco")])


@pytest.mark.parametrize(
    ("data", "header"),
    [
        (form(part("image", b"", filename="")), TYPE),
        (document(""), "application/json"),
        (document("data:image/png;base64,"), "application/json"),
        (document("data:nothing"), "application/json"),
        (b"image=", URLENCODED),
    ],
)
def test_an_empty_image_is_malformed(data: bytes, header: str) -> None:
    """A form submitted without a chosen file has an empty image."""
    with pytest.raises(MalformedRequest, match=r"^the image is empty$"):
        parse_body(data, header)


@pytest.mark.parametrize("field", ["image", "file"])
@pytest.mark.parametrize("filename", ["a.jpg", "", None])
def test_a_multipart_image_is_found(field: str, filename: str | None) -> None:
    assert parse_multipart(form(part(field, IMAGE, filename=filename)), TYPE) == ParsedBody(IMAGE, [])


def test_multipart_parameters_are_found_beside_the_image() -> None:
    data = form(
        part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"), part("classes", "naïve,2".encode()), part("x", b"")
    )

    assert parse_multipart(data, TYPE) == ParsedBody(IMAGE, [("confidence", "0.4"), ("classes", "naïve,2"), ("x", "")])


def test_a_field_given_twice_is_two_parameters() -> None:
    """The parser does not decide which value counts."""
    data = form(part("boxes", b"coco"), part("image", IMAGE), part("boxes", b"pixel"))

    assert parse_multipart(data, TYPE).parameters == [("boxes", "coco"), ("boxes", "pixel")]


@pytest.mark.parametrize("field", ["image", "file"])
def test_a_multipart_image_may_be_text(field: str) -> None:
    """Base64, a data URL or an address, as in JSON, unless it has a file name."""
    encoded = base64.b64encode(IMAGE)
    url = part(field, b"https://a.org/x.jpg")

    assert parse_body(form(part(field, encoded), part("boxes", b"coco")), TYPE) == ParsedBody(IMAGE, [("boxes", "coco")])
    assert parse_body(form(part(field, b"data:image/png;base64," + encoded)), TYPE) == ParsedBody(IMAGE, [])
    assert parse_body(form(part(field, encoded, filename="a.txt")), TYPE) == ParsedBody(encoded, [])
    assert parse_body(form(url, part("boxes", b"coco")), TYPE) == ParsedBody(
        b"", [("url", "https://a.org/x.jpg"), ("boxes", "coco")]
    )
    with pytest.raises(MalformedRequest, match=r"^send either an image or a url, not both$"):
        parse_body(form(url, part("image", IMAGE)), TYPE)
    with pytest.raises(MalformedRequest, match=r'^"image" is not base64$'):
        parse_body(form(part(field, b"@image.jpg")), TYPE)


def test_the_boundary_may_be_quoted() -> None:
    data = form(part("image", IMAGE)).replace(b"--b", b"--a b=c")

    assert parse_multipart(data, 'multipart/form-data; charset=utf-8; Boundary="a b=c"').image == IMAGE


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((part("confidence", b"0.4"), part("boxes", b"coco")), "0; fields found: 'confidence', 'boxes'"),
        ((part("x" * 60, b"x"), part("boxes", b"x"), part("y", b"x")), f"0; fields found: '{'x' * 60}', 'boxe'"),
        ((part("picture", b"x"),), "0; fields found: 'picture'"),
        ((part("x" * 3000, b"x"),), f"0; fields found: '{'x' * 64}'"),
        ((part("image", b"a"), part("image", b"b")), "2; POST /detect/batch takes several"),
        ((part("image", b"a"), part("file", b"b")), "2; POST /detect/batch takes several"),
        ((), "0; fields found: none"),
    ],
)
def test_a_form_contains_exactly_one_image(parts: tuple[bytes, ...], found: str) -> None:
    with pytest.raises(MalformedRequest, match=rf"^expected one image in the field 'image' \(or 'file'\), found {found}$"):
        parse_multipart(form(*parts), TYPE)


@pytest.mark.parametrize("name", ["Image", "image[]", "img", "images", "näme", "n" * 70])
def test_a_file_in_a_field_of_another_name_is_named(name: str) -> None:
    for content in (IMAGE, b"text"):
        with pytest.raises(MalformedRequest) as caught:
            parse_multipart(form(part(name, content, filename="a.jpg")), TYPE)
        hint = "; POST /detect/batch takes several" if name == "images" else ""
        assert caught.value.detail == f"there is a file in the field {name[:64]!r}; expected it in 'image' (or 'file'){hint}"


@pytest.mark.parametrize("filename", [b"caf\xe9.jpg", "café.jpg".encode(), "写真.jpg".encode("shift_jis"), b"\xff\0"])
def test_a_file_name_may_have_any_encoding(filename: bytes) -> None:
    data = form(part("image", IMAGE, filename="NAME"), part("näme", b"1")).replace(b"NAME", filename)

    assert parse_multipart(data, TYPE) == ParsedBody(IMAGE, [("näme", "1")])


def test_a_field_name_may_be_latin_1() -> None:
    data = form(part("image", IMAGE), part("NAME", b"1")).replace(b"NAME", b"n\xe4me")

    assert parse_multipart(data, TYPE).parameters == [("näme", "1")]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        *((given, "Content-Type header has no boundary; ") for given in ("", " boundary=", ' boundary=""', ' boundary="b')),
        (" boundary=\xff\xfe", "Content-Type header has no boundary; "),
        *(
            (f" boundary={given}", "boundary of the Content-Type header does not occur in the body; ")
            for given in ("c", "x" * 8000)
        ),
        (' boundary="a\nb"', "boundary in the Content-Type header has characters that no boundary may have"),
    ],
)
def test_a_wrong_boundary_is_malformed(parameters: str, message: str) -> None:
    with pytest.raises(MalformedRequest, match=f"^the {message}(let the HTTP client write .*)?$"):
        parse_multipart(form(part("image", IMAGE)), f"multipart/form-data;{parameters}")


def test_a_truncated_form_is_malformed() -> None:
    data = form(part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"))

    for length in range(len(data) - 2):
        with pytest.raises(MalformedRequest):
            parse_multipart(data[:length], TYPE)
    assert parse_multipart(data[:-2], TYPE).image == IMAGE


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "a part has no Content-Disposition header"),
        (b"Content-Type: image/jpeg", "a part has no Content-Disposition header"),
        (b'Content-Disposition: attachment; name="image"', 'the Content-Disposition of a part is not "form-data"'),
        (b"Content-Disposition form-data", "a part has a header without a colon"),
        (HEADER + b"\r\nContent-Length: 3", "a part is longer than its Content-Length"),
        (HEADER + b"\r\nContent-Length: 3000", "a part is shorter than its Content-Length"),
        (HEADER + b"\r\nContent-Length: many", "the Content-Length of a part is not a number"),
        (HEADER + b"\r\nContent-Length: 3\r\nContent-Length: 3", "a part has more than one Content-Length header"),
        (HEADER + b"\r\nX: " + b"x" * 5000, "a header of a part is too long; the maximum is 4 KiB"),
        (HEADER + b"\r\nX: x" * 20, "a part has too many headers; the maximum is 8"),
        (HEADER + b"\r\n(X): x", "a part has a header whose name is not valid"),
        (HEADER + b"\r\n \t", "a part has a header line of nothing but white space"),
        (b" " + HEADER, "the headers of a part begin with white space"),
    ],
)
def test_a_part_with_a_bad_header_is_malformed(header: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=f"^{message}$"):
        parse_multipart(b"--b\r\n" + header + b"\r\n\r\n" + IMAGE + b"\r\n--b--\r\n", TYPE)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x--b\r\n", "the first boundary is not at the start of a line"),
        (b"--b\nContent", "the form has line breaks of LF; they must be CR LF"),
        (b"--b--x"[:4] + b" \r\n", "the form is not well formed behind one of its boundaries"),
        (form(part("image", IMAGE)).replace(b"--b--", b"--bc-"), "the form is not well formed behind one of its boundaries"),
        (b"--b\r\n" + HEADER + b"\n\n", "the headers of a part end in LF; they must end in CR LF, and an empty line"),
        (form(part("image", IMAGE))[:-6], "the form ends before its last boundary"),
    ],
)
def test_a_defect_of_a_form_is_described(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=f"^{message}"):
        parse_multipart(data, TYPE)


@pytest.mark.parametrize("header", ["form-data", 'form-data; name=""', 'form-data; filename="a.jpg"'])
def test_a_part_without_a_name_is_malformed(header: str) -> None:
    nameless = f"--b\r\nContent-Disposition: {header}\r\n\r\nx\r\n".encode()
    for data in (form(nameless, part("image", IMAGE)), form(nameless)):
        with pytest.raises(MalformedRequest, match=r'^a part has no name; expected Content-Disposition: form-data; name="image"$'):
            parse_multipart(data, TYPE)


def test_a_form_may_have_sixteen_parts() -> None:
    assert len(parse_multipart(form(part("image", IMAGE), *[part("x", b"")] * 15), TYPE).parameters) == 15
    for count in (16, 1500):
        with pytest.raises(MalformedRequest, match=r"^the form has too many parts; the maximum is 16$"):
            parse_multipart(form(part("image", IMAGE), *[part("x", b"")] * count), TYPE)


@pytest.mark.parametrize(("name", "quoted"), [("classes", "classes"), ("n" * 3000, "n" * 64)])
def test_a_parameter_that_is_not_text_is_rejected_by_name(name: str, quoted: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^'{quoted}' is not UTF-8 text; if it is the image, its field must be 'image'"):
        parse_multipart(form(part(name, b"caf\xe9"), part("image", IMAGE)), TYPE)


def test_an_epilogue_is_ignored() -> None:
    assert parse_multipart(form(part("image", IMAGE)) + b"anything", TYPE).image == IMAGE


def test_an_image_may_be_declared_as_a_form() -> None:
    """`curl --data-binary` declares a form unless it is told a type."""
    assert parse_body(IMAGE, URLENCODED) == ParsedBody(IMAGE, [])


@pytest.mark.parametrize("field", ["image", "file"])
def test_a_form_of_names_and_values_is_read(field: str) -> None:
    data = f"boxes=coco&{field}={quote_plus(base64.b64encode(IMAGE))}&classes=traffic+light%2C2".encode()

    assert parse_body(data, URLENCODED) == ParsedBody(IMAGE, [("boxes", "coco"), ("classes", "traffic light,2")])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"boxes=coco&img=QUJD", r"found 0; fields found: 'boxes', 'img'"),
        (b"image=QUJD&file=QUJD", r"found 2; POST /detect/batch takes several"),
        (b"image=%40", '"image" is not base64'),
        (b"hello", "the body is neither an image nor a form; to send a file, use curl --data-binary @image.jpg"),
    ],
)
def test_a_form_of_names_and_values_without_an_image_is_malformed(data: bytes, message: str) -> None:
    with pytest.raises(MalformedRequest, match=message):
        parse_body(data, URLENCODED)


def test_json_may_be_declared_as_a_form() -> None:
    """`curl -d` declares a form unless it is told a type."""
    assert parse_body(document(boxes="coco"), URLENCODED) == ParsedBody(IMAGE, [("boxes", "coco")])
    with pytest.raises(MalformedRequest, match="expected a JSON object such as"):
        parse_body(b'{"image": "QUJD"', URLENCODED)


@pytest.mark.parametrize(
    ("data", "content_type"),
    [
        (b'{"image https://a.org/": ""}', "application/json"),
        (b'{"img": ""}', "application/json"),
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
    b"--b",
    b"--b\r\n",
    b"\r\n--b--",
    b"\r\n",
    b"\n",
    b"\r\n\r\n",
    b"Content-Disposition: form-data; name=",
    b'"image"',
    b'"x"',
]
PIECES += [b"; filename=", b'"', b"%0D", b"Content-Length: ", b"5", b" ", b"\0", b"\xff"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.sampled_from(PIECES),
        ),
        max_size=20,
    ),
    st.one_of(st.just(TYPE), st.text(st.characters(max_codepoint=255))),
)
def test_any_multipart_body_is_parsed_or_a_gateway_error(pieces: list[bytes], content_type: str) -> None:
    try:
        parsed = parse_multipart(b"".join(pieces), content_type)
    except GatewayError:
        return

    body = b"".join(pieces)
    assert parsed.image in body or base64.b64encode(parsed.image).rstrip(b"=") in body.translate(None, b" \r\n\t")


def test_a_json_image_is_decoded() -> None:
    assert parse_json(document()) == ParsedBody(IMAGE, [])


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", "data:;base64,", "DATA:image/jpeg;BASE64,"])
def test_a_json_image_may_be_a_data_url(prefix: str) -> None:
    """Browsers make data URLs from files."""
    assert parse_json(document(prefix + base64.b64encode(IMAGE).decode())).image == IMAGE


@pytest.mark.parametrize("size", [1, 2, 3, 300, 1 << 20])
def test_a_json_image_may_be_in_the_alphabet_of_urls(size: int) -> None:
    image = bytes([251, 255, 191]) * size
    encoded = base64.urlsafe_b64encode(image).decode()

    assert parse_json(document(encoded)).image == parse_json(document(encoded.rstrip("="))).image == image


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("cat,2", "cat,2"),
        (["cat", "traffic light"], "cat,traffic light"),
        ([0, "cat", 2], "0,cat,2"),
        ([], ""),
        (0.4, "0.4"),
        (0, "0"),
        (100, "100"),
        (-1, "-1"),
        (True, "true"),
        (False, "false"),
        ("", ""),
    ],
)
def test_json_members_are_parameters(value: object, text: str) -> None:
    """Text stays, numbers and truth values are written as they came, and lists are joined by commas."""
    assert parse_json(document(classes=value)).parameters == [("classes", text)]


def test_json_members_keep_the_order_of_the_parameters() -> None:
    """Aliases and duplicates are left to `parameters.parse`."""
    assert [name for name, _ in parse_json(document(model="a", boxes="coco", model_name="b")).parameters] == [
        "model",
        "boxes",
        "model_name",
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"5",
        b'"text"',
        b"[]",
        b'["image"]',
        b"{",
        b'{"image": "QUJD"',
        b'{"image": "QUJD"}}',
        b"{'image': 'QUJD'}",
        b'{"image": "QUJD", "confidence": NaN}',
        b'{"image": "QUJD", "confidence": 1e400}',
        b'{"image": "QUJD", "classes": [' + b"9" * 5000 + b"]}",
        b'{"image": "QUJD", "classes": "\\ud800"}',
        b'{"image": "\\ud800"}',
        b'{"image": "QUJD", "classes": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"image": "\xff"}',
        b"\xff\xfe{\0}\0",
        b"[" * 100_000,
        b'{"image":' * 100_000,
    ],
)
def test_any_other_json_is_malformed(data: bytes) -> None:
    """Anything but a flat object of texts, numbers, truth values and lists is answered with an example."""
    with pytest.raises(MalformedRequest, match=r'^expected a JSON object such as {"image": "<base64>", "confidence": 0.4}$'):
        parse_json(data)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("null", '"confidence" is of the type null; expected a string, a number, true, false or a list'),
        ("{}", '"confidence" is of the type object; expected a string, a number, true, false or a list'),
        ("[1.5]", '"confidence" has an item of the type float; expected strings or integers'),
        ("[0, null]", '"confidence" has an item of the type null; expected strings or integers'),
        ("[[1]]", '"confidence" has an item of the type array; expected strings or integers'),
    ],
)
def test_a_member_of_another_type_is_named(value: str, message: str) -> None:
    with pytest.raises(MalformedRequest, match=f"^{re.escape(message)}$"):
        parse_json(f'{{"image": "QUJD", "confidence": {value}}}'.encode())


@pytest.mark.parametrize("members", [1001, 100_000])
def test_a_very_long_list_is_rejected(members: int) -> None:
    """No model has so many classes."""
    with pytest.raises(MalformedRequest, match="JSON object"):
        parse_json(json.dumps({"image": "AA==", "classes": [7] * members}).encode())


@pytest.mark.parametrize("name", ["file", "Image", "img", "IMAGE_BASE64", "imageData", "picture"])
def test_a_member_that_seems_to_be_the_image_is_named(name: str) -> None:
    """Other services use these names for the image."""
    with pytest.raises(MalformedRequest, match=rf"^unknown member '{name}'; expected the image in \"image\", in base64$"):
        parse_json(json.dumps({name: "QUJD"}).encode())


def test_several_images_belong_into_a_batch() -> None:
    with pytest.raises(MalformedRequest, match=r"^unknown member 'images'; .*; POST /detect/batch takes several$"):
        parse_json(json.dumps({"images": ["QUJD"]}).encode())
    with pytest.raises(MalformedRequest, match=r'^the JSON object has no string "image": it is a list; POST /detect/batch takes'):
        parse_json(json.dumps({"image": ["QUJD"]}).encode())


@pytest.mark.parametrize("data", [b'{"fill": "QUJD"}', b'{"fill": ' * 100_000, b'{"fill": 1, ' + b'"x": 1, ' * 100_000])
def test_parsing_stops_at_the_first_unknown_member(data: bytes) -> None:
    """The error comes at once, however many members follow and whatever they are."""
    with pytest.raises(InvalidParameter, match="unknown parameter 'fill'; supported parameters: model"):
        parse_json(data)


@pytest.mark.parametrize(
    "member",
    [b'"classes": [' + b"7," * 50_000 + b"7]", b'"model": "' + b"x" * 70_000 + b'"', b'"boxes": 1, ' * 10_000 + b'"boxes": 1'],
    ids=["list", "text", "many"],
)
def test_long_members_beside_the_image_are_rejected(member: bytes) -> None:
    image = base64.b64encode(bytes(100_000))
    for data in (b'{"image": "AA==", ' + member + b"}", b"{" + member + b', "image": "' + image + b'"}'):
        with pytest.raises(MalformedRequest, match=r"^the JSON object has more than 64 KiB beside its image$"):
            parse_json(data)


def test_long_members_cost_no_memory() -> None:
    """A list of millions of numbers is skipped without a copy of it."""
    data = b'{"image": "AA==", "classes": [' + b"7," * 1_000_000 + b"7]}"
    tracemalloc.start()
    with pytest.raises(MalformedRequest):
        parse_json(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100_000


@pytest.mark.parametrize(
    "data",
    [
        b'{"image": "QUJD", "image": "QUJD"}',
        b'{"image": "QUJD", "boxes": "coco", "image": ""}',
        b'{"image": "QUJD", "im\\u0061ge": "QUJD"}',
        b'{"image": 5, "image": "QUJD"}',
    ],
)
def test_a_json_image_given_twice_is_rejected(data: bytes) -> None:
    with pytest.raises(InvalidParameter, match=r"^image is given more than once$"):
        parse_json(data)


@pytest.mark.parametrize("name", ["boxes", "bo\\u0078es"])
def test_a_json_member_given_twice_is_two_parameters(name: str) -> None:
    data = f'{{"boxes": "coco", "image": "QUJD", "{name}": "pixel"}}'.encode()

    assert parse_json(data).parameters == [("boxes", "coco"), ("boxes", "pixel")]


def test_a_json_image_may_be_spelt_with_escapes() -> None:
    """PHP escapes every slash in JSON."""
    image = bytes([255] * 300)

    assert parse_json(document().replace(document()[11:-2], base64.b64encode(image).replace(b"/", b"\\/"))).image == image


def test_a_json_image_may_be_broken_into_lines() -> None:
    """Base64 is often broken into lines; white space is not part of it."""
    encoded = base64.b64encode(IMAGE).decode()
    assert parse_json(document("\r\n\t ".join(encoded))).image == IMAGE


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "http", "file"])
def test_a_json_image_may_be_an_address(scheme: str) -> None:
    url = f"{scheme}://example.org/a.png"

    assert parse_json(document(url)) == ParsedBody(b"", [("url", url)])
    assert parse_json(document(url, boxes="coco")) == ParsedBody(b"", [("boxes", "coco"), ("url", url)])


@pytest.mark.parametrize("data", [b'{"boxes": "coco", "url": "https://a.org/"}', b'{"boxes": "coco", "image": "https://a.org/"}'])
def test_json_with_an_address_needs_no_image(data: bytes) -> None:
    assert parse_body(data, "application/json") == ParsedBody(b"", [("boxes", "coco"), ("url", "https://a.org/")])


def test_long_members_beside_an_address_are_rejected() -> None:
    with pytest.raises(MalformedRequest, match="KiB beside its image"):
        parse_json(b'{"url": "https://a.org/' + b"x" * (1 << 16) + b'"}')


def test_a_form_with_an_address_needs_no_image() -> None:
    url = part("url", b"https://a.org/")

    assert parse_body(form(url), TYPE) == ParsedBody(b"", [("url", "https://a.org/")])
    with pytest.raises(MalformedRequest, match="expected one image"):
        parse_multipart(form(url, part("image", b"a"), part("image", b"b")), TYPE)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"{}", ""),
        (b'{"boxes": "coco"}', ""),
        (b'{"image": 5}', "it is a number; "),
        (b'{"image": -5}', "it is a number; "),
        (b'{"image": {"b64": "QUJD"}}', "it is an object; "),
        (b'{"image": null}', "it is null; "),
        (b'{"image": false}', "it is false; "),
    ],
)
def test_json_without_an_image_is_malformed(data: bytes, found: str) -> None:
    with pytest.raises(MalformedRequest, match=f'^the JSON object has no string "image": {found}expected the image in base64$'):
        parse_json(data)


@pytest.mark.parametrize("image", ["QUJDR", "QU==JD", "äöü", "\0", "data:image/png;base64,QUJDR"])
def test_text_that_is_not_base64_is_malformed(image: str) -> None:
    with pytest.raises(MalformedRequest, match=r'^"image" is not base64$'):
        parse_json(document(image))


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(
    st.one_of(st.binary(), st.dictionaries(st.sampled_from(["image", "classes", "x"]), JSON).map(lambda o: json.dumps(o).encode()))
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
