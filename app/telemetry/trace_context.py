"""The place of a request in a distributed trace, as the header `traceparent` carries it: W3C Trace Context, level 2."""

import re
import secrets
from typing import NamedTuple, Self

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_VERSION = "00"
_INVALID_VERSION = "ff"
_SAMPLED = 0x01
_RANDOM_TRACE_ID = 0x02


class TraceContext(NamedTuple):
    """A span of a trace: the one that called, or the one that is called."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    flags: int

    @property
    def is_sampled(self) -> bool:
        """Whether the spans of the trace are to be exported."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """The value of the header."""
        return f"{_VERSION}-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def next_span(self) -> Self:
        """Return a new span of the same trace."""
        return self._replace(span_id=secrets.token_hex(8))


def parse(traceparent: str) -> TraceContext | None:
    """Parse the header; None if it is not well formed, and thus to be ignored. Later versions may append fields."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == _INVALID_VERSION or (version == _VERSION and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16) & (_SAMPLED | _RANDOM_TRACE_ID))  # the others have no meaning yet
