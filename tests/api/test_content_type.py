"""Which content types a detection request may declare."""

import pytest
from litestar.testing import RequestFactory

from app.api.content_type import content_type_header, is_supported, media_type


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("image/jpeg", "image/jpeg"),
        ("IMAGE/JPEG; x=y", "image/jpeg"),
        ("multipart/form-data; boundary=ABC", "multipart/form-data"),
        (" application/json ;charset=utf-8", "application/json"),
        (";", ""),
        ("", ""),
        (None, ""),
    ],
)
def test_the_declared_type_is_compared_without_case_and_parameters(header: str | None, expected: str) -> None:
    """Without a header it is empty."""
    headers = {} if header is None else {"Content-Type": header}

    assert media_type(content_type_header(RequestFactory().get("/", headers=headers).scope)) == expected


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
        ("application/x-www-form-urlencoded", False),
        ("multipart/mixed", False),
        ("video/mp4", False),
        ("images/jpeg", False),
        ("nonsense", False),
    ],
)
def test_images_forms_and_unknown_bytes_are_supported(content_type: str, expected: bool) -> None:  # noqa: FBT001
    """What an image really is, its first bytes tell, so its subtype does not matter."""
    assert is_supported(content_type) is expected
