"""What is known of a request travels in its scope."""

from typing import Any

import pytest

from app.api.context import RequestContext, attach, context_of


def test_a_context_starts_empty() -> None:
    """Nothing is sent, nobody has left, and the clock runs."""
    context = RequestContext("r1")

    assert context.request_id == "r1"
    assert (context.status, context.is_client_gone, context.log_fields, context.timing.stages) == (0, False, {}, {})
    assert context.timing.total >= 0


@pytest.mark.parametrize("scope", [{}, {"state": {"other": 1}}])
def test_an_attached_context_is_found_in_its_scope(scope: dict[str, Any]) -> None:
    """Whether or not the server has put state of its own there, which stays."""
    context = RequestContext("r1")
    before = dict(scope.get("state", {}))
    attach(context, scope)  # type: ignore[arg-type]

    assert context_of(scope) is context  # type: ignore[arg-type]
    assert before.items() <= scope["state"].items()


def test_two_requests_share_nothing() -> None:
    """What one of them logs is not in the other's line."""
    first, second = RequestContext("r1"), RequestContext("r2")
    first.log_fields["model"] = "a"
    first.timing.lap("read")

    assert second.log_fields == {}
    assert second.timing.stages == {}
