"""The headers of a trace, as W3C Trace Context defines them."""

import pytest

from app.telemetry.trace_context import TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", ["00", "01", "02", "03"])
def test_a_header_is_written_as_it_was_read(flags: str) -> None:
    """The ids, and the flags that have a meaning: sampled, and random trace id."""
    header = f"00-{TRACE}-{SPAN}-{flags}"
    context = parse(header)

    assert context == TraceContext(TRACE, SPAN, int(flags, 16))
    assert context.traceparent == header
    assert context.is_sampled is (flags in {"01", "03"})


@pytest.mark.parametrize(("given", "known"), [("ff", "03"), ("08", "00"), ("09", "01")])
def test_flags_without_a_meaning_are_not_passed_on(given: str, known: str) -> None:
    """The flags are reserved and have to be zero."""
    context = parse(f"00-{TRACE}-{SPAN}-{given}")

    assert context
    assert context.traceparent == f"00-{TRACE}-{SPAN}-{known}"


@pytest.mark.parametrize(
    "header", [f"01-{TRACE}-{SPAN}-01", f"cc-{TRACE}-{SPAN}-01-what the future will be like", f"fe-{TRACE}-{SPAN}-01-"]
)
def test_a_later_version_is_read_as_the_first_one(header: str) -> None:
    """It may have more fields at its end, which are ignored; what is written is the first version."""
    context = parse(header)

    assert context
    assert context.traceparent == f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01 ",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN}0-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        f"00-{chr(0x660) * 32}-{SPAN}-01",
        "x" * 100_000,
    ],
)
def test_a_malformed_header_is_none(header: str) -> None:
    assert parse(header) is None


@pytest.mark.parametrize(
    ("state", "passed_on"),
    [("a=1,b=x y", True), ("", False), ("x" * 512, True), ("x" * 513, False), ("a=\n", False), ("ä=1", False)],
)
def test_the_state_is_passed_on_if_it_can_be_a_header(state: str, *, passed_on: bool) -> None:
    """Without the state the trace is still valid."""
    context = parse(f"00-{TRACE}-{SPAN}-01", state)

    assert context is not None
    assert context.headers == (("traceparent", context.traceparent), *([("tracestate", state)] if passed_on else []))
