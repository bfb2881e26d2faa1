"""Envelopes opened: multipart and JSON."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.body import Body, _from_json, _from_multipart
from app.errors import GatewayError, InvalidParameter, MalformedRequest

PICTURE = bytes(range(256)) + b"\r\n--almost\r\n"
TYPE = "multipart/form-data; boundary=b"


def part(name: str, content: bytes, *, filename: str | None = None) -> bytes:
    file = "" if filename is None else f'; filename="{filename}"\r\nContent-Type: image/jpeg'
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--b--\r\n"


def envelope(image: object = base64.b64encode(PICTURE).decode(), **members: object) -> bytes:
    return json.dumps({"image": image, **members}).encode()


@pytest.mark.parametrize("field", ["image", "file"])
@pytest.mark.parametrize("filename", ["a.jpg", "", None])
def test_multipart_picture_is_found(field: str, filename: str | None) -> None:
    """Either field holds the picture, byte for byte, with a file name or without."""
    assert _from_multipart(form(part(field, PICTURE, filename=filename)), TYPE) == Body(PICTURE, [])


def test_multipart_parameters_are_found_beside_it() -> None:
    """Other fields are parameters, before and after the picture, in their order."""
    data = form(
        part("confidence", b"0.4"), part("image", PICTURE, filename="a.jpg"), part("classes", "naïve,2".encode()), part("x", b"")
    )

    assert _from_multipart(data, TYPE) == Body(PICTURE, [("confidence", "0.4"), ("classes", "naïve,2"), ("x", "")])


def test_field_given_twice_is_two_parameters() -> None:
    """Which of two values counts is not decided here."""
    data = form(part("boxes", b"coco"), part("image", PICTURE), part("boxes", b"pixel"))

    assert _from_multipart(data, TYPE).pairs == [("boxes", "coco"), ("boxes", "pixel")]


def test_empty_picture_is_left_to_the_reader() -> None:
    """A form submitted without a file chosen has an empty picture."""
    assert _from_multipart(form(part("image", b"", filename="")), TYPE) == Body(b"", [])


def test_boundary_may_be_quoted() -> None:
    """A boundary of other characters than letters comes in quotes."""
    data = form(part("image", PICTURE)).replace(b"--b", b"--a b=c")

    assert _from_multipart(data, 'multipart/form-data; charset=utf-8; Boundary="a b=c"').file == PICTURE


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
def test_there_is_one_picture(parts: tuple[bytes, ...], found: int) -> None:
    """No picture, or more than one, is refused with their number."""
    with pytest.raises(MalformedRequest, match=rf"expected one picture in the field 'image' \(or 'file'\), found {found}$"):
        _from_multipart(form(*parts), TYPE)


@pytest.mark.parametrize(
    "content_type",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=c",
    ],
)
def test_wrong_boundary_is_malformed(content_type: str) -> None:
    """A form without its boundary, or with another, cannot be read."""
    with pytest.raises(MalformedRequest, match="the multipart body is broken"):
        _from_multipart(form(part("image", PICTURE)), content_type)


def test_truncated_form_is_malformed() -> None:
    """Cut anywhere before its last boundary is complete, a form is refused."""
    data = form(part("confidence", b"0.4"), part("image", PICTURE, filename="a.jpg"))

    for length in range(len(data) - 2):
        with pytest.raises(MalformedRequest):
            _from_multipart(data[:length], TYPE)
    assert _from_multipart(data[:-2], TYPE).file == PICTURE


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
def test_part_with_a_bad_header_is_malformed(header: bytes) -> None:
    """A part must say what it is, in few and short lines."""
    with pytest.raises(MalformedRequest, match="the multipart body is broken or has too many parts"):
        _from_multipart(b"--b\r\n" + header + b"\r\n\r\n" + PICTURE + b"\r\n--b--\r\n", TYPE)


def test_part_without_a_name_is_no_picture() -> None:
    """It is a parameter that nobody knows."""
    nameless = b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n"

    assert _from_multipart(form(nameless, part("image", PICTURE)), TYPE) == Body(PICTURE, [("", "x")])


@pytest.mark.parametrize("count", [17, 1500])
def test_too_many_parts_are_malformed(count: int) -> None:
    """Nobody needs more parts than there are parameters, and some."""
    with pytest.raises(MalformedRequest, match="too many parts"):
        _from_multipart(form(part("image", PICTURE), *[part("x", b"")] * (count - 1)), TYPE)


def test_sixteen_parts_are_read() -> None:
    """The limit leaves room."""
    assert len(_from_multipart(form(part("image", PICTURE), *[part("x", b"")] * 15), TYPE).pairs) == 15


def test_text_that_is_no_text_is_named() -> None:
    """A parameter that is not UTF-8 is refused by name."""
    with pytest.raises(InvalidParameter, match=r"^'classes' is not UTF-8 text$"):
        _from_multipart(form(part("classes", b"caf\xe9"), part("image", PICTURE)), TYPE)


@pytest.mark.parametrize("members", [1001, 100_000])
def test_a_list_without_end_is_refused(members: int) -> None:
    """Nobody wants so many classes."""
    with pytest.raises(MalformedRequest, match="JSON object"):
        _from_json(json.dumps({"image": "AA==", "classes": [7] * members}).encode())


def test_long_field_name_is_quoted_in_part() -> None:
    """Nobody gets kilobytes of his own back."""
    with pytest.raises(InvalidParameter, match=f"^'{'n' * 64}' is not UTF-8 text$"):
        _from_multipart(form(part("n" * 3000, b"\xff"), part("image", PICTURE)), TYPE)


def test_what_follows_the_form_is_ignored() -> None:
    """An epilogue is allowed."""
    assert _from_multipart(form(part("image", PICTURE)) + b"anything", TYPE).file == PICTURE


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
def test_any_multipart_raises_only_our_errors(pieces: list[bytes], content_type: str) -> None:
    """Whatever the bytes, they are a form or a gateway error."""
    try:
        body = _from_multipart(b"".join(pieces), content_type)
    except GatewayError:
        return

    assert body.file in b"".join(pieces)


def test_json_picture_is_decoded() -> None:
    """`image` is base64."""
    assert _from_json(envelope()) == Body(PICTURE, [])


@pytest.mark.parametrize("prefix", ["data:image/png;base64,", "data:;base64,", "data:image/svg+xml;charset=utf-8;base64,"])
def test_json_picture_may_be_a_data_url(prefix: str) -> None:
    """What browsers make of a file is taken as it is."""
    assert _from_json(envelope(prefix + base64.b64encode(PICTURE).decode())).file == PICTURE


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
    assert _from_json(envelope(classes=value)).pairs == [("classes", text)]


def test_json_members_keep_their_order() -> None:
    """Aliases and duplicates are left to the parameters."""
    assert [name for name, _ in _from_json(envelope(model="a", boxes="coco", model_name="b")).pairs] == [
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
def test_other_json_is_malformed(data: bytes) -> None:
    """What is no flat object of texts, numbers and lists is answered with an example."""
    with pytest.raises(MalformedRequest, match=r'^expected a JSON object such as {"image": "<base64>", "confidence": 0.4}$'):
        _from_json(data)


@pytest.mark.parametrize("data", [b'{"file": "QUJD"}', b'{"file": ' * 100_000, b'{"file": 1, ' + b'"x": 1, ' * 100_000])
def test_the_first_unknown_member_ends_the_reading(data: bytes) -> None:
    """However many come behind it, and whatever they are."""
    with pytest.raises(InvalidParameter, match="unknown parameter 'file'; known are model"):
        _from_json(data)


def test_a_json_picture_may_be_broken_into_lines() -> None:
    """As base64 often is; blanks are no part of it, and cost next to nothing."""
    encoded = base64.b64encode(PICTURE).decode()
    assert _from_json(envelope("\r\n\t ".join(encoded))).file == PICTURE


@pytest.mark.parametrize("data", [b"{}", b'{"boxes": "coco"}', b'{"image": 5}', b'{"image": ["QUJD"]}'])
def test_json_must_hold_a_picture(data: bytes) -> None:
    """An object without a text `image` says so."""
    with pytest.raises(MalformedRequest, match=r'^the JSON object has no string "image"$'):
        _from_json(data)


@pytest.mark.parametrize("image", ["QUJ", "QUJ-", "äöü", "\0", "data:image/png;base64,QUJ", "https://example.org/a.png"])
def test_text_that_is_no_base64_is_malformed(image: str) -> None:
    """Every character counts; nothing but white space is skipped."""
    with pytest.raises(MalformedRequest, match=r'^"image" is not base64$'):
        _from_json(envelope(image))


@pytest.mark.parametrize("image", ["", "data:image/png;base64,", "data:nothing"])
def test_json_picture_may_be_empty_here(image: str) -> None:
    """An empty picture is left to the reader, as in the other envelopes."""
    assert _from_json(envelope(image)).file == b""


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(deadline=None)
@given(
    st.one_of(st.binary(), st.dictionaries(st.sampled_from(["image", "classes", "x"]), JSON).map(lambda o: json.dumps(o).encode()))
)
def test_any_json_raises_only_our_errors(data: bytes) -> None:
    """Whatever the bytes, they are an envelope or a gateway error."""
    try:
        body = _from_json(data)
    except GatewayError:
        return

    assert all(isinstance(text, str) for _, text in body.pairs)
