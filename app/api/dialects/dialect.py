"""What a dialect is, and the parameters that all of them have."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import HTTPScope
from msgspec import Meta

from app.api.parameters import Parameters
from app.api.schema import Problem
from app.pipeline.call import DetectOptions

AnyRequest = Request[Any, Any, Any]

MAX_OBJECTS = 300
"""In an answer about an image, unless a request asks for fewer."""


def write_detail(problem: Problem) -> dict[str, str]:
    """Write an error as an object that has nothing but its text."""
    return {"error": problem.detail}


class Dialect(NamedTuple):
    """The interface of another detection service."""

    name: str
    """As `dialect_names` has it."""
    handlers: Sequence[HTTPRouteHandler]
    """Their paths are those of the other service."""
    write_error: Callable[[Problem], Any] = write_detail
    """Makes of an error what the body of the response has as JSON."""
    statuses: Mapping[int, int] = {}
    """By the gateway's status of an error: that of the other service, where its clients would not understand the gateway's."""
    callers: Mapping[str, Callable[[HTTPScope], bool]] = {}
    """By path that the gateway or another dialect has, too: whether a request there is for this dialect."""


class DialectParameters(Parameters, frozen=True, kw_only=True):
    """Those of every dialect. Clients send others, too, which are ignored."""

    ignores_unknown: ClassVar[bool] = True
    has_key_in_body: ClassVar[bool] = False
    """Whether a request without a key in headers and query may have one in its body, which is received then."""

    api_key: Annotated[str | None, Meta(description="The API key, if no header has it.")] = None

    @property
    def options(self) -> DetectOptions:
        """What they ask of the model."""
        raise NotImplementedError
