"""What is known of a request travels in its scope."""

from typing import Any

import pytest

from app.api.context import RequestContext, attach, context_of


def test_a_context_starts_empty() -> None:
    """A new context has no status and no log fields, and its clock runs."""
    context = RequestContext("r1", "image/png")

    assert (context.request_id, context.content_type) == ("r1", "image/png")
    assert (context.status, context.is_client_gone, context.log_fields, context.timing.stages) == (0, False, {}, {})
    assert (context.trace, context.request_bytes, context.response_bytes) == (None, 0, 0)
    assert context.timing.total >= 0


@pytest.mark.parametrize("scope", [{}, {"state": {"other": 1}}])
def test_an_attached_context_is_found_in_its_scope(scope: dict[str, Any]) -> None:
    """It is found whether or not the server has put state of its own into the scope, and that state stays."""
    context = RequestContext("r1", "image/png")
    before = dict(scope.get("state", {}))
    attach(context, scope)  # type: ignore[arg-type]

    assert context_of(scope) is context  # type: ignore[arg-type]
    assert before.items() <= scope["state"].items()


def test_two_requests_share_nothing() -> None:
    first, second = RequestContext("r1", ""), RequestContext("r2", "")
    first.log_fields["model"] = "a"
    first.timing.lap("read")

    assert second.log_fields == {}
    assert second.timing.stages == {}
