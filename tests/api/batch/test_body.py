"""Bodies of batches: what they contain, and what is wrong with those that contain none."""

import base64
import json
import tracemalloc
from typing import Any

import pytest

from app.api.batch.body import MAX_IMAGES, parse_batch
from app.errors import InvalidParameter, MalformedRequest

FORM = "multipart/form-data; boundary=b"
JSON = "application/json"


def form(*parts: tuple[str, bytes, str | None]) -> bytes:
    """Encode a multipart form of (name, content, file name) fields."""
    encoded = [
        f'--b\r\nContent-Disposition: form-data; name="{name}"'.encode()
        + (b"" if filename is None else f'; filename="{filename}"'.encode())
        + b"\r\n\r\n"
        + content
        + b"\r\n"
        for name, content, filename in parts
    ]
    return b"".join([*encoded, b"--b--\r\n"])


def document(images: Any, **members: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"images": images, **members}).encode()


def encoded(*images: bytes) -> list[str]:
    return [base64.b64encode(image).decode() for image in images]


def test_a_form_has_images_under_three_names_and_parameters() -> None:
    """Images and parameters may be mixed in any order; a large image arrives in pieces."""
    large = bytes(range(256)) * 10_000
    data = form(("images", b"a", "a.jpg"), ("boxes", b"pixel", None), ("image", large, None), ("file", b"c", "x" * 300))
    parsed = parse_batch(data, FORM)

    assert parsed.images == [b"a", large, b"c"]
    assert parsed.names == ["a.jpg", None, "x" * 255]
    assert parsed.parameters == [("boxes", "pixel")]


def test_json_has_a_list_of_images_and_parameters() -> None:
    data = json.dumps({"confidence": 0.4, "classes": ["cat", 16], "images": encoded(b"a", b"b")}).encode()
    parsed = parse_batch(data, JSON)

    assert parsed.images == [b"a", b"b"]
    assert parsed.names == [None, None]
    assert parsed.parameters == [("confidence", "0.4"), ("classes", ["cat", "16"])]


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ("DATA:image/png;BASE64,YQ==", b"a"),
        ("YQ", b"a"),
        ("-_8=", b"\xfb\xff"),
        ("data:,YQ==", b"a"),
        ("https://example.org/a.png", "https://example.org/a.png"),
        ("HTTP://x", "HTTP://x"),
    ],
)
def test_text_is_read_as_of_a_single_image(given: str, image: bytes | str) -> None:
    """Also after the byte order mark that some programs write."""
    assert parse_batch(b"\xef\xbb\xbf" + document([given] * MAX_IMAGES), JSON).images == [image] * MAX_IMAGES


def test_a_form_may_have_text() -> None:
    """A field without a file name holds base64 or an address; any other text is an error of that image only."""
    data = form(("images", b"YQ==", None), ("image", b"https://a.org/x", None), ("file", b"***", None), ("file", b"YQ==", "a.txt"))
    decoded, address, wrong, file = parse_batch(data, FORM).images

    assert (decoded, address, file) == (b"a", "https://a.org/x", b"YQ==")
    assert isinstance(wrong, MalformedRequest)


def test_json_may_be_declared_as_a_form() -> None:
    """`curl -d` declares a form unless it is told a type."""
    assert parse_batch(document(encoded(b"a")), "application/x-www-form-urlencoded").images == [b"a"]
    with pytest.raises(MalformedRequest, match="expected a JSON object such as"):
        parse_batch(b"images=YQ==", "application/x-www-form-urlencoded")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (form(("images", b"a", "a"), ("images", b"", None), ("images", b"c", "c")), FORM),
        (document([*encoded(b"a"), "", *encoded(b"c")]), JSON),
        (document([*encoded(b"a"), "***", *encoded(b"c")]), JSON),
        (document([*encoded(b"a"), 7, *encoded(b"c")]), JSON),
        (document([*encoded(b"a"), None, *encoded(b"c")]), JSON),
        (document([*encoded(b"a"), {"x": []}, *encoded(b"c")]), JSON),
        (b'{"images": ["YQ==", "\xff", "Yw=="]}', JSON),
    ],
)
def test_entry_without_an_image_is_an_error_in_its_place(data: bytes, kind: str) -> None:
    first, second, third = parse_batch(data, kind).images

    assert (first, third) == (b"a", b"c")
    assert isinstance(second, MalformedRequest)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (form(("boxes", b"pixel", None)), FORM),
        (b"--b--\r\n", FORM),
        (document([]), JSON),
        (b"{}", JSON),
        (b'{"confidence": 0.4}', JSON),
    ],
)
def test_an_empty_batch_is_rejected(data: bytes, kind: str) -> None:
    with pytest.raises(MalformedRequest, match="'images'"):
        parse_batch(data, kind)


@pytest.mark.parametrize("count", [MAX_IMAGES + 1, 10_000])
@pytest.mark.parametrize("kind", [FORM, JSON])
def test_too_many_images_are_rejected(kind: str, count: int) -> None:
    content = bytes(1000)
    data = form(*[("images", content, None)] * count) if kind == FORM else document(encoded(content) * count)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedRequest, match="the batch size exceeds the maximum of 64 images"):
            parse_batch(data, kind)
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


DEEP = b'{"images": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (
            form(("Images", b"a", "a.jpg")),
            FORM,
            "there is a file in the field 'Images'; expected it in 'images' (or 'image' or 'file')",
        ),
        (
            form(("images[]", b"a", "a.jpg")),
            FORM,
            "there is a file in the field 'images[]'; expected it in 'images' (or 'image' or 'file')",
        ),
        (form(*[("x", b"", None)] * 81), FORM, "the form has too many parts; the maximum is 80"),
        (form(("images", b"a", None))[:-9], FORM, "the form ends before its last boundary"),
        (b'{"image": "YQ=="}', JSON, "unknown member 'image'; expected the images in \"images\", a list of base64"),
        (b'{"images": ["YQ=="], "boxes": null}', JSON, '"boxes" is null; expected a string, a finite number'),
        (b'{"images": ["YQ=="], "unknown": 1}', JSON, "unknown parameter 'unknown'"),
        (b'{"images": ["YQ=="], "images": ["YQ=="]}', JSON, "a member of the JSON object is given more than once"),
        (form(("boxes", b"\xff", None)), FORM, "'boxes' is not UTF-8 text"),
        *((data, JSON, "expected a JSON object such as") for data in (b'{"images": ["YQ=="', b'["YQ=="]', b"\xff", DEEP)),
        (b'{"images": ["YQ=="], "boxes": "' + b"x" * (1 << 16) + b'"}', JSON, "more than 64 KiB beside its images"),
        *(
            (document(images), JSON, f'the JSON object has no list "images": it is {kind}; POST /detect takes a single image')
            for images, kind in (("YQ==", "a string"), ({}, "an object"), (None, "null"), (True, "true"), (-1, "a number"))
        ),
    ],
)
def test_the_error_says_what_is_wrong(data: bytes, kind: str, text: str) -> None:
    with pytest.raises((MalformedRequest, InvalidParameter)) as caught:
        parse_batch(data, kind)
    assert text in caught.value.detail
