"""The choice of a format by name or by `Accept`: qualities, ranges, and whatever else is sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.answering.format import best, select
from app.api.parameters.tasks import CLASSIFICATIONS, DETECTIONS
from app.errors import NotAcceptable

TYPES = ("application/json", "image/jpeg", "image/png")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"image/jpeg", "image/jpeg"),
        (b"IMAGE/PNG", "image/png"),
        (b"image/*", "image/jpeg"),
        (b"*/*", "application/json"),
        (b"image/png, image/jpeg", "image/jpeg"),
        (b"image/jpeg;q=0.5, image/png", "image/png"),
        (b"image/jpeg; q=0.5 ,image/png;q=0.6", "image/png"),
        (b"image/jpeg;q=0, image/*", "image/png"),
        (b"application/json;q=0, */*;q=0.1", "image/jpeg"),
        (b"*/*;q=0.9, image/png;Q=1.000", "image/png"),
        (b"image/png;level=1;q=0.2, */*;q=0.1", "image/png"),
        # What browsers send for a page, for a picture and with fetch().
        (b"text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8", "application/json"),
        (b"image/avif,image/webp,image/apng,image/svg+xml,image/*,*/*;q=0.8", "image/jpeg"),
        (b"text/html", None),
        (b"image/webp, text/html;q=0.5", None),
        (b"*/*;q=0", None),
        (b"application/json;q=0", None),
    ],
)
def test_the_type_with_the_highest_quality_is_chosen(accept: bytes, chosen: str | None) -> None:
    """The most specific range counts; of several with equal quality, the first type that is available (RFC 9110, 12.5.1)."""
    assert best(accept, TYPES) == chosen


@pytest.mark.parametrize("accept", [b"", b" , ", b"json", b"image/jpeg image/png", b"\xff\xfe", b";q=1", b"/", b"\x00"])
def test_a_header_without_a_media_type_asks_for_nothing(accept: bytes) -> None:
    assert best(accept, TYPES) == "application/json"


@given(st.binary(max_size=200))
def test_any_bytes_are_read(accept: bytes) -> None:
    assert best(accept, TYPES) in {*TYPES, None}


def test_a_header_of_many_types_is_not_read_to_its_end() -> None:
    """No program needs more than fifty types."""
    assert best(b"text/html," * 49 + b"image/png", TYPES) == "image/png"
    assert best(b"text/html," * 50 + b"image/png", TYPES) is None


@pytest.mark.parametrize("header", [b"", b"*/*", b"application/json", b"application/json, text/plain, */*"])
def test_the_usual_headers_get_json(header: bytes) -> None:
    assert select(DETECTIONS, None, header).name == "json"


def test_classes_have_no_picture() -> None:
    assert select(CLASSIFICATIONS, None, b"image/png, application/json;q=0.1").name == "json"
    with pytest.raises(NotAcceptable, match="none of application/json;"):
        select(CLASSIFICATIONS, None, b"image/png")


def test_a_header_that_allows_nothing_is_an_error() -> None:
    with pytest.raises(NotAcceptable, match="none of application/json, image/jpeg, image/png;"):
        select(DETECTIONS, None, b"image/webp")
