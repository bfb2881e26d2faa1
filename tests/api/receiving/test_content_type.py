"""Which content types a detection request may declare."""

import pytest

from app.api.receiving.content_type import body_type, is_supported, media_type


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("image/jpeg", "image/jpeg"),
        ("IMAGE/JPEG; x=y", "image/jpeg"),
        ("multipart/form-data; boundary=ABC", "multipart/form-data"),
        (" application/json ;charset=utf-8", "application/json"),
        (";", ""),
        ("", ""),
    ],
)
def test_the_media_type_has_neither_case_nor_parameters(header: str, expected: str) -> None:
    assert media_type(header) == expected


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("image/jpeg", True),
        ("image/x-anything", True),
        ("application/octet-stream", True),
        ("multipart/form-data", True),
        ("application/json", True),
        ("", True),
        ("text/html", False),
        ("text/plain", False),
        ("application/pdf", False),
        ("application/x-www-form-urlencoded", True),
        ("multipart/mixed", False),
        ("video/mp4", False),
        ("images/jpeg", False),
        ("nonsense", False),
    ],
)
def test_images_forms_and_unknown_bytes_are_supported(content_type: str, *, expected: bool) -> None:
    """The format of an image is found in its first bytes, so its subtype does not matter."""
    assert is_supported(content_type) is expected


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        ("application/x-www-form-urlencoded", b'{"image": "QUJD"}', "application/json"),
        ("application/x-www-form-urlencoded; charset=utf-8", b' \r\n{"image": "QUJD"}', "application/json"),
        ("application/x-www-form-urlencoded", b"image=QUJD", "application/x-www-form-urlencoded"),
        ("application/x-www-form-urlencoded", b"", "application/x-www-form-urlencoded"),
        ("image/jpeg", b"{", "image/jpeg"),
        ("application/json", b"x", "application/json"),
    ],
)
def test_an_object_that_curl_has_declared_as_a_form_is_json(header: str, data: bytes, expected: str) -> None:
    """`curl -d` declares an object as a form unless it is told the type."""
    assert body_type(header, data) == expected
