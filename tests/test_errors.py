"""The list of errors is complete and consistent."""

import re

import pytest

from app import errors
from app.errors import GatewayError

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, GatewayError) and value is not GatewayError
]


def test_errors_are_in_order_of_status() -> None:
    statuses = [error.status for error in ERRORS]

    assert statuses == sorted(statuses)


def test_codes_are_unique() -> None:
    assert len({error.code for error in ERRORS}) == len(ERRORS) == 34


@pytest.mark.parametrize("error", ERRORS)
def test_code_is_the_name_of_the_class(error: type[GatewayError]) -> None:
    assert error.code == re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).lower()


@pytest.mark.parametrize("error", ERRORS)
def test_error_has_the_status_of_an_error_and_a_title(error: type[GatewayError]) -> None:
    """The status is 4xx or 5xx, and the title is a sentence without its full stop."""
    assert 400 <= error.status <= 599
    assert re.fullmatch(r"[A-Z][^\n]*[^.\s]", error.title)


@pytest.mark.parametrize("error", ERRORS)
def test_only_a_temporary_failure_says_when_to_retry(error: type[GatewayError]) -> None:
    """An error with status 429 or 503 has a Retry-After, the others have none."""
    assert (error.retry_after_seconds is not None) == (error.status in {429, 503})


def test_a_full_gateway_says_how_long_it_will_be_full() -> None:
    assert errors.GatewayFull("full", "requests").retry_after_seconds == 1
    assert errors.GatewayFull("full", "requests", 7).retry_after_seconds == 7


def test_detail_is_the_message() -> None:
    error = errors.InvalidImage("the PNG data is truncated")

    assert (error.detail, str(error)) == ("the PNG data is truncated", "the PNG data is truncated")
