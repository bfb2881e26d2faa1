"""Request bodies: the image as it is, a multipart form, or JSON."""

import base64
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.body import ParsedBody, needs_parsing, parse_body, parse_json, parse_multipart
from app.errors import GatewayError, InvalidParameter, MalformedRequest

IMAGE = bytes(range(256)) + b"\r\n--almost\r\n"
TYPE = "multipart/form-data; boundary=b"


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
        ("image/jpeg", False),
        ("application/octet-stream", False),
        ("", False),
    ],
)
def test_only_forms_have_to_be_parsed(content_type: str, expected: bool) -> None:  # noqa: FBT001
    """Any other body is the image itself."""
    assert needs_parsing(content_type) is expected


@pytest.mark.parametrize("header", [TYPE, "Multipart/Form-Data ; boundary=b"])
def test_a_form_is_parsed_by_its_content_type(header: str) -> None:
    """Types are compared without regard to case and parameters."""
    assert parse_body(form(part("image", IMAGE), part("boxes", b"coco")), header) == ParsedBody(IMAGE, [("boxes", "coco")])


@pytest.mark.parametrize("header", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_parsed_by_its_content_type(header: str) -> None:
    """The same upload comes out of it."""
    assert parse_body(document(boxes="coco"), header) == ParsedBody(IMAGE, [("boxes", "coco")])


@pytest.mark.parametrize(
    ("data", "header"),
    [
        (form(part("image", b"", filename="")), TYPE),
        (document(""), "application/json"),
        (document("data:image/png;base64,"), "application/json"),
    ],
)
def test_an_empty_image_is_malformed(data: bytes, header: str) -> None:
    """A form that was submitted without choosing a file, for example."""
    with pytest.raises(MalformedRequest, match=r"^the image is empty$"):
        parse_body(data, header)


@pytest.mark.parametrize("field", ["image", "file"])
@pytest.mark.parametrize("filename", ["a.jpg", "", None])
def test_a_multipart_image_is_found(field: str, filename: str | None) -> None:
    """Either field contains the image, byte for byte, with a file name or without."""
    assert parse_multipart(form(part(field, IMAGE, filename=filename)), TYPE) == ParsedBody(IMAGE, [])


def test_multipart_parameters_are_found_beside_the_image() -> None:
    """Other fields are parameters, before and after the image, in their order."""
    data = form(
        part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"), part("classes", "naïve,2".encode()), part("x", b"")
    )

    assert parse_multipart(data, TYPE) == ParsedBody(IMAGE, [("confidence", "0.4"), ("classes", "naïve,2"), ("x", "")])


def test_a_field_given_twice_is_two_parameters() -> None:
    """The parser returns both values; it does not decide which one counts."""
    data = form(part("boxes", b"coco"), part("image", IMAGE), part("boxes", b"pixel"))

    assert parse_multipart(data, TYPE).parameters == [("boxes", "coco"), ("boxes", "pixel")]


def test_an_empty_multipart_image_is_returned() -> None:
    """`parse_body` rejects it, for all kinds of forms."""
    assert parse_multipart(form(part("image", b"", filename="")), TYPE) == ParsedBody(b"", [])


def test_the_boundary_may_be_quoted() -> None:
    """A boundary of other characters than letters is given in quotes."""
    data = form(part("image", IMAGE)).replace(b"--b", b"--a b=c")

    assert parse_multipart(data, 'multipart/form-data; charset=utf-8; Boundary="a b=c"').image == IMAGE


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ((part("confidence", b"0.4"),), 0),
        ((part("picture", b"x"),), 0),
        ((part("image", b"a"), part("image", b"b")), 2),
        ((part("image", b"a"), part("file", b"b")), 2),
        ((), 0),
    ],
)
def test_a_form_contains_exactly_one_image(parts: tuple[bytes, ...], found: int) -> None:
    """No image, or more than one, is rejected with their number."""
    with pytest.raises(MalformedRequest, match=rf"^expected one image in the field 'image' \(or 'file'\), found {found}$"):
        parse_multipart(form(*parts), TYPE)


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=c",
    ],
)
def test_a_wrong_boundary_is_malformed(content_type: str) -> None:
    """A form without its boundary, or with another one, cannot be parsed."""
    with pytest.raises(MalformedRequest, match="the multipart body is not well formed"):
        parse_multipart(form(part("image", IMAGE)), content_type)


def test_a_truncated_form_is_malformed() -> None:
    """Cut anywhere before its last boundary is complete, a form is rejected."""
    data = form(part("confidence", b"0.4"), part("image", IMAGE, filename="a.jpg"))

    for length in range(len(data) - 2):
        with pytest.raises(MalformedRequest):
            parse_multipart(data[:length], TYPE)
    assert parse_multipart(data[:-2], TYPE).image == IMAGE


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Content-Type: image/jpeg",
        b'Content-Disposition: attachment; name="image"',
        b"Content-Disposition form-data",
        b'Content-Disposition: form-data; name="\xff"',
        b'Content-Disposition: form-data; name="image"\r\nContent-Length: 3',
        b'Content-Disposition: form-data; name="image"\r\nContent-Length: many',
        b'Content-Disposition: form-data; name="image"\r\nX: ' + b"x" * 5000,
        b'Content-Disposition: form-data; name="image"' + b"\r\nX: x" * 20,
    ],
)
def test_a_part_with_a_bad_header_is_malformed(header: bytes) -> None:
    """A part must say what it is, in few and short lines."""
    with pytest.raises(MalformedRequest, match=r"^the multipart body is not well formed or has too many parts$"):
        parse_multipart(b"--b\r\n" + header + b"\r\n\r\n" + IMAGE + b"\r\n--b--\r\n", TYPE)


def test_a_part_without_a_name_is_not_an_image() -> None:
    """It is a parameter with an empty name, which is unknown."""
    nameless = b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n"

    assert parse_multipart(form(nameless, part("image", IMAGE)), TYPE) == ParsedBody(IMAGE, [("", "x")])


@pytest.mark.parametrize("count", [17, 1500])
def test_too_many_parts_are_malformed(count: int) -> None:
    """More than there are parameters, and some."""
    with pytest.raises(MalformedRequest, match="too many parts"):
        parse_multipart(form(part("image", IMAGE), *[part("x", b"")] * (count - 1)), TYPE)


def test_sixteen_parts_are_read() -> None:
    """The limit is above the number of parameters."""
    assert len(parse_multipart(form(part("image", IMAGE), *[part("x", b"")] * 15), TYPE).parameters) == 15


def test_a_parameter_that_is_not_text_is_rejected_by_name() -> None:
    """It must be UTF-8."""
    with pytest.raises(InvalidParameter, match=r"^'classes' is not UTF-8 text$"):
        parse_multipart(form(part("classes", b"caf\xe9"), part("image", IMAGE)), TYPE)


def test_a_long_field_name_is_quoted_in_part() -> None:
    """The response does not repeat kilobytes of the request."""
    with pytest.raises(InvalidParameter, match=f"^'{'n' * 64}' is not UTF-8 text$"):
        parse_multipart(form(part("n" * 3000, b"\xff"), part("image", IMAGE)), TYPE)


def test_an_epilogue_is_ignored() -> None:
    """Anything may follow the last boundary."""
    assert parse_multipart(form(part("image", IMAGE)) + b"anything", TYPE).image == IMAGE


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
    """No bytes and no header lead to any other exception."""
    try:
        parsed = parse_multipart(b"".join(pieces), content_type)
    except GatewayError:
        return

    assert parsed.image in b"".join(pieces)


def test_a_json_image_is_decoded() -> None:
    """`image` is base64."""
    assert parse_json(document()) == ParsedBody(IMAGE, [])


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", "data:;base64,", "data:image/svg+xml;charset=utf-8;base64,"])
def test_a_json_image_may_be_a_data_url(prefix: str) -> None:
    """Browsers make data URLs from files."""
    assert parse_json(document(prefix + base64.b64encode(IMAGE).decode())).image == IMAGE


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
        ("", ""),
    ],
)
def test_json_members_are_parameters(value: object, text: str) -> None:
    """Text stays, numbers are written as they came, and lists are joined by commas."""
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
        b'{"image": "QUJD", "confidence": null}',
        b'{"image": "QUJD", "confidence": true}',
        b'{"image": "QUJD", "confidence": {}}',
        b'{"image": "QUJD", "classes": [1.5]}',
        b'{"image": "QUJD", "classes": [null]}',
        b'{"image": "QUJD", "classes": [[1]]}',
        b'{"image": "QUJD", "classes": [' + b"9" * 5000 + b"]}",
        b'{"image": "QUJD", "classes": "\\ud800"}',
        b'{"image": "\xff"}',
        b"\xff\xfe{\0}\0",
        b"[" * 100_000,
        b'{"image":' * 100_000,
    ],
)
def test_any_other_json_is_malformed(data: bytes) -> None:
    """Anything but a flat object of texts, numbers and lists is answered with an example."""
    with pytest.raises(MalformedRequest, match=r'^expected a JSON object such as {"image": "<base64>", "confidence": 0.4}$'):
        parse_json(data)


@pytest.mark.parametrize("members", [1001, 100_000])
def test_a_very_long_list_is_rejected(members: int) -> None:
    """No model has so many classes."""
    with pytest.raises(MalformedRequest, match="JSON object"):
        parse_json(json.dumps({"image": "AA==", "classes": [7] * members}).encode())


@pytest.mark.parametrize("data", [b'{"file": "QUJD"}', b'{"file": ' * 100_000, b'{"file": 1, ' + b'"x": 1, ' * 100_000])
def test_parsing_stops_at_the_first_unknown_member(data: bytes) -> None:
    """The error comes at once, however many members follow and whatever they are."""
    with pytest.raises(InvalidParameter, match="unknown parameter 'file'; supported parameters: model"):
        parse_json(data)


@pytest.mark.parametrize(
    "member",
    [b'"classes": [' + b"7," * 50_000 + b"7]", b'"model": "' + b"x" * 70_000 + b'"', b'"boxes": 1, ' * 10_000 + b'"boxes": 1'],
    ids=["list", "text", "many"],
)
def test_long_members_beside_the_image_are_rejected(member: bytes) -> None:
    """They are not even built; an image of any length is."""
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
    """Also if one is the same, is no text, or its name is spelt with escapes."""
    with pytest.raises(InvalidParameter, match=r"^image is given more than once$"):
        parse_json(data)


@pytest.mark.parametrize("name", ["boxes", "bo\\u0078es"])
def test_a_json_member_given_twice_is_two_parameters(name: str) -> None:
    """As in a form; also if a name is spelt with escapes."""
    data = f'{{"boxes": "coco", "image": "QUJD", "{name}": "pixel"}}'.encode()

    assert parse_json(data).parameters == [("boxes", "coco"), ("boxes", "pixel")]


def test_a_json_image_may_be_spelt_with_escapes() -> None:
    """As PHP does it with every slash."""
    image = bytes([255] * 300)

    assert parse_json(document().replace(document()[11:-2], base64.b64encode(image).replace(b"/", b"\\/"))).image == image


def test_a_json_image_may_be_broken_into_lines() -> None:
    """Base64 is often broken into lines; white space is not part of it."""
    encoded = base64.b64encode(IMAGE).decode()
    assert parse_json(document("\r\n\t ".join(encoded))).image == IMAGE


@pytest.mark.parametrize("scheme", ["https", "HTTPS", "http", "file"])
def test_a_json_image_may_be_an_address(scheme: str) -> None:
    """It is the parameter `url`, which is judged later."""
    url = f"{scheme}://example.org/a.png"

    assert parse_json(document(url)) == ParsedBody(b"", [("url", url)])
    assert parse_json(document(url, boxes="coco")) == ParsedBody(b"", [("boxes", "coco"), ("url", url)])


@pytest.mark.parametrize("data", [b'{"boxes": "coco", "url": "https://a.org/"}', b'{"boxes": "coco", "image": "https://a.org/"}'])
def test_json_with_an_address_needs_no_image(data: bytes) -> None:
    """Whichever member has it."""
    assert parse_body(data, "application/json") == ParsedBody(b"", [("boxes", "coco"), ("url", "https://a.org/")])


def test_long_members_beside_an_address_are_rejected() -> None:
    """As beside an image."""
    with pytest.raises(MalformedRequest, match="KiB beside its image"):
        parse_json(b'{"url": "https://a.org/' + b"x" * (1 << 16) + b'"}')


def test_a_form_with_an_address_needs_no_image() -> None:
    """But an empty image, or several, are not one."""
    url = part("url", b"https://a.org/")

    assert parse_body(form(url), TYPE) == ParsedBody(b"", [("url", "https://a.org/")])
    with pytest.raises(MalformedRequest, match="expected one image"):
        parse_multipart(form(url, part("image", b"a"), part("image", b"b")), TYPE)


@pytest.mark.parametrize("data", [b"{}", b'{"boxes": "coco"}', b'{"image": 5}', b'{"image": ["QUJD"]}'])
def test_json_without_an_image_is_malformed(data: bytes) -> None:
    """An object must have a text `image`."""
    with pytest.raises(MalformedRequest, match=r'^the JSON object has no string "image"$'):
        parse_json(data)


@pytest.mark.parametrize("image", ["QUJ", "QUJ-", "äöü", "\0", "data:image/png;base64,QUJ"])
def test_text_that_is_not_base64_is_malformed(image: str) -> None:
    """Every character counts; nothing but white space is skipped."""
    with pytest.raises(MalformedRequest, match=r'^"image" is not base64$'):
        parse_json(document(image))


@pytest.mark.parametrize("image", ["", "data:image/png;base64,", "data:nothing"])
def test_an_empty_json_image_is_returned(image: str) -> None:
    """`parse_body` rejects it, for all kinds of forms."""
    assert parse_json(document(image)).image == b""


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(
    st.one_of(st.binary(), st.dictionaries(st.sampled_from(["image", "classes", "x"]), JSON).map(lambda o: json.dumps(o).encode()))
)
def test_any_json_body_is_parsed_or_a_gateway_error(data: bytes) -> None:
    """Whatever the bytes."""
    try:
        parsed = parse_json(data)
    except GatewayError:
        return

    assert all(isinstance(text, str) for _, text in parsed.parameters)
