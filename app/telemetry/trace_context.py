"""Distributed tracing headers, according to W3C Trace Context, level 2."""

import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
# The standard asks for at least 512 characters; longer values are dropped.
_STATE = re.compile(r"[\x20-\x7e]{0,512}")
_VERSION = "00"
_INVALID_VERSION = "ff"
_SAMPLED = 0x01
_RANDOM_TRACE_ID = 0x02


class TraceContext(NamedTuple):
    """A span of a trace: the caller's or the callee's."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: int
    state: str = ""
    """The header `tracestate`, with vendor-specific data; propagated unchanged."""

    @property
    def is_sampled(self) -> bool:
        """Whether the spans of the trace are exported."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the header `traceparent`."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The headers of a request within the span."""
        headers = (("traceparent", self.traceparent),)
        return (*headers, ("tracestate", self.state)) if self.state else headers


def parse(traceparent: str, state: str = "") -> TraceContext | None:
    """Parse the two headers; return None, to ignore them, if `traceparent` is not well formed. Later versions may append fields."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _INVALID_VERSION or (version == _VERSION and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    known = int(flags, 16) & (_SAMPLED | _RANDOM_TRACE_ID)  # the other flags are undefined
    return TraceContext(trace_id, span_id, known, state if _STATE.fullmatch(state) else "")
