"""The headers of a trace, as W3C Trace Context defines them."""

import pytest

from app.telemetry.trace_context import TraceContext, parse

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", ["00", "01", "02", "03"])
def test_a_header_is_written_as_it_was_read(flags: str) -> None:
    header = f"00-{TRACE}-{SPAN}-{flags}"
    context = parse(header)

    assert context == TraceContext(TRACE, SPAN, int(flags, 16))
    assert context.traceparent == header
    assert context.is_sampled is (flags in {"01", "03"})


@pytest.mark.parametrize(
    ("version", "given", "known"),
    [
        *(("00", "ff", "03"), ("00", "08", "00"), ("00", "09", "01")),
        *(("01", "01", "01"), ("cc", "01-what the future will be like", "01"), ("fe", "01-", "01")),
    ],
)
def test_unknown_flags_and_fields_are_not_passed_on(version: str, given: str, known: str) -> None:
    context = parse(f"{version}-{TRACE}-{SPAN}-{given}")

    assert context
    assert context.traceparent == f"00-{TRACE}-{SPAN}-{known}"


@pytest.mark.parametrize(
    "header",
    [
        *("", "00", "x" * 100_000, f"00_{TRACE}_{SPAN}_01", f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01"),
        *(f"00-{TRACE}-{SPAN}{flags}" for flags in ("", "-", "-1", "-001", "-0g", "-01-more", "-01 ", "-01\n")),
        *(f"{version}-{TRACE}-{SPAN}-01" for version in (" 00", "ff", "0")),
        *(f"00-{trace}-{SPAN}-01" for trace in (TRACE.upper(), "0" * 32, TRACE[1:], f"{TRACE}0", chr(0x660) * 32)),
        *(f"00-{TRACE}-{span}-01" for span in (SPAN.upper(), "0" * 16, f"{SPAN}0")),
        f"cc-{TRACE}-{SPAN}-01.more",
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
