"""The choice of a format: by name, by `Accept`, or none at all."""

import pytest

from app.api.answering import format as accept
from app.api.parameters.tasks import CLASSIFICATIONS, DETECTIONS
from app.errors import NotAcceptable


def test_a_name_counts_more_than_accept() -> None:
    assert DETECTIONS.choose("image", b"application/json").name == "image"
    assert DETECTIONS.choose("json", b"image/png").name == "json"
    assert DETECTIONS.choose("coco-results", b"text/html").name == "coco-results"


@pytest.mark.parametrize(
    ("header", "name"), [(b"", "json"), (b"*/*", "json"), (b"application/json", "json"), (b"image/png", "image")]
)
def test_accept_chooses_by_type(header: bytes, name: str) -> None:
    assert DETECTIONS.choose(None, header).name == name


def test_an_accept_that_allows_nothing_is_an_error() -> None:
    with pytest.raises(NotAcceptable, match="none of application/json, image/jpeg, image/png;"):
        DETECTIONS.choose(None, b"image/webp")


@pytest.mark.parametrize("header", [b"", b"*/*", b"application/json", b"application/json, text/plain, */*"])
def test_the_usual_headers_are_not_parsed(header: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accept.best(header, DETECTIONS.media_types) == "application/json"
    monkeypatch.delattr("app.api.answering.format.negotiate")
    assert DETECTIONS.choose(None, header).name == "json"


def test_names_and_types_are_unique() -> None:
    assert DETECTIONS.names == ("json", "image", "image_and_json", "coco-results")
    assert DETECTIONS.media_types == ("application/json", "image/jpeg", "image/png")


def test_classes_have_no_picture() -> None:
    assert CLASSIFICATIONS.choose(None, b"image/png, application/json;q=0.1").name == "json"
    with pytest.raises(NotAcceptable, match="none of application/json;"):
        CLASSIFICATIONS.choose(None, b"image/png")
