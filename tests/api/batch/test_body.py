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
URLENCODED = "application/x-www-form-urlencoded"
NO_IMAGES: list[Any] = ["", "***", 7, None, {"x": []}]
DEEP = b'{"images": ' + b"[" * 100_000


def form(*parts: tuple[str, bytes, str | None]) -> bytes:
    """Encode a multipart form of (name, content, file name) fields."""
    encoded = b""
    for name, content, filename in parts:
        file = "" if filename is None else f'; filename="{filename}"'
        encoded += f'--b\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
    return encoded + b"--b--\r\n"


def document(images: Any, **members: Any) -> bytes:  # noqa: ANN401
    return json.dumps({"images": images, **members}).encode()


def test_form_has_images_under_three_names_and_parameters_in_any_order() -> None:
    """A field without a file name holds base64 or an address; any other text is an error of that image only."""
    large = bytes(range(256)) * 10_000  # arrives in pieces
    files = [("images", b"YQ==", "a.jpg"), ("boxes", b"pixel", None), ("image", large, "b"), ("file", b"c", "x" * 300)]
    texts = [("images", b"YQ==", None), ("image", b"https://a.org/x", None), ("file", b"***", None)]
    parsed = parse_batch(form(*files, *texts), FORM)

    assert parsed.images[:-1] == [b"YQ==", large, b"c", b"a", "https://a.org/x"]
    assert isinstance(parsed.images[-1], MalformedRequest)
    assert parsed.names == ["a.jpg", "b", "x" * 255, None, None, None]
    assert parsed.parameters == [("boxes", "pixel")]


@pytest.mark.parametrize("kind", [JSON, URLENCODED])
def test_json_has_a_list_of_images_and_parameters(kind: str) -> None:
    """`curl -d` declares a form unless it is told a type; some programs write a byte order mark."""
    given = ["DATA:image/png;BASE64,YQ==", "YQ", "-_8=", "data:,YQ==", "https://example.org/a.png", "HTTP://x"]
    parsed = parse_batch(b"\xef\xbb\xbf" + document(given, confidence=0.4, classes=["cat", 16]), kind)

    assert parsed.images == [b"a", b"a", b"\xfb\xff", b"a", *given[-2:]]
    assert parsed.names == [None] * 6
    assert parsed.parameters == [("confidence", "0.4"), ("classes", ["cat", "16"])]
    assert parse_batch(document(["YQ=="] * MAX_IMAGES), kind).images == [b"a"] * MAX_IMAGES


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (form(("images", b"a", "a"), ("images", b"", None), ("images", b"c", "c")), FORM),
        *((document(["YQ==", entry, "Yw=="]), JSON) for entry in NO_IMAGES),
        (b'{"images": ["YQ==", "\xff", "Yw=="]}', JSON),
    ],
)
def test_entry_without_an_image_is_an_error_in_its_place(data: bytes, kind: str) -> None:
    first, second, third = parse_batch(data, kind).images

    assert (first, third) == (b"a", b"c")
    assert isinstance(second, MalformedRequest)


@pytest.mark.parametrize("kind", [FORM, JSON])
def test_too_many_images_are_rejected_before_they_take_memory(kind: str) -> None:
    for count in (MAX_IMAGES + 1, 10_000):
        text = base64.b64encode(bytes(1000)).decode()
        data = form(*[("images", bytes(1000), None)] * count) if kind == FORM else document([text] * count)
        tracemalloc.start()
        try:
            with pytest.raises(MalformedRequest, match="the batch size exceeds the maximum of 64 images"):
                parse_batch(data, kind)
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        *((data, FORM, "'images'") for data in (form(("boxes", b"pixel", None)), b"--b--\r\n")),
        *((data, JSON, "'images'") for data in (document([]), b"{}", b'{"confidence": 0.4}')),
        (form(("images[]", b"a", "a.jpg")), FORM, "in the field 'images[]'; expected it in 'images' (or 'image' or 'file')"),
        (form(*[("x", b"", None)] * 81), FORM, "the form has too many parts; the maximum is 80"),
        (form(("images", b"a", None))[:-9], FORM, "the form ends before its last boundary"),
        (form(("boxes", b"\xff", None)), FORM, "'boxes' is not UTF-8 text"),
        (b"images=YQ==", URLENCODED, "expected a JSON object such as"),
        (b'{"image": "YQ=="}', JSON, "unknown member 'image'; expected the images in \"images\", a list of base64"),
        (document(["YQ=="], boxes=None), JSON, '"boxes" is null; expected a string, a finite number'),
        (document(["YQ=="], unknown=1), JSON, "unknown parameter 'unknown'"),
        (document(["YQ=="], boxes="x" * (1 << 16)), JSON, "more than 64 KiB beside its images"),
        (b'{"images": ["YQ=="], "images": ["YQ=="]}', JSON, "a member of the JSON object is given more than once"),
        *((data, JSON, "expected a JSON object such as") for data in (b'{"images": ["YQ=="', b'["YQ=="]', b"\xff", DEEP)),
        *(
            (document(images), JSON, f'has no list "images": it is {kind}; POST /detect takes a single image')
            for images, kind in (("YQ==", "a string"), ({}, "an object"), (None, "null"), (True, "true"), (-1, "a number"))
        ),
    ],
)
def test_error_says_what_is_wrong(data: bytes, kind: str, text: str) -> None:
    with pytest.raises((MalformedRequest, InvalidParameter)) as caught:
        parse_batch(data, kind)
    assert text in caught.value.detail
