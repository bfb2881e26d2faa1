"""The list of errors is complete and consistent; names that are misspelt get a suggestion."""

import re

import pytest

from app import errors
from app.errors import GatewayError
from app.expected import suggestion

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, GatewayError) and value is not GatewayError
]


def test_errors_are_in_order_of_their_status_with_a_code_and_a_title_of_their_own() -> None:
    """A title is a sentence without its full stop. Only a temporary failure says when to retry."""
    assert len({error.code for error in ERRORS}) == len(ERRORS) == 34
    assert [error.code for error in ERRORS if error.repeats_request] == ["invalid_parameter", "unsupported_media_type"]
    statuses = [error.status for error in ERRORS]
    assert statuses == sorted(statuses)
    assert 400 <= statuses[0] < statuses[-1] <= 599
    for error in ERRORS:
        assert error.code == re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()
        assert re.fullmatch(r"[A-Z][^\n]*[^.\s]", error.title)
        assert (error.retry_after_seconds is not None) == (error.status in {429, 503})


@pytest.mark.parametrize(
    ("name", "meant"), [("yolo11", "yolo11n"), ("yolo", ""), ("yolo11n" * 1000, ""), ("N_yolox_nano", "yolox_nano")]
)
def test_the_most_similar_name_is_suggested(name: str, meant: str) -> None:
    question = suggestion(name, ["yolox_nano", "yolo11n"], 0.75, prefix="N_")
    assert question == (f"; did you mean N_{meant}?" if meant else "")
