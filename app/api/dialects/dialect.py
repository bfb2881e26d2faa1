"""Interface of a dialect, and the parameters that all dialects share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.types import HTTPScope, Scope
from msgspec import Meta

from app.api.answering import problems
from app.api.answering.problems import WriteError, WrittenError
from app.api.answering.schema import Problem
from app.api.parameters.parse import Parameters
from app.api.receiving.content_type import JSON
from app.pipeline.call import DetectOptions

AnyRequest = Request[Any, Any, Any]


def write_detail(problem: Problem) -> dict[str, str]:
    """Convert a problem to an object that contains only its detail."""
    return {"error": problem.detail}


class Dialect(NamedTuple):
    """The interface of another detection service."""

    name: str
    """Name in the setting `dialects`."""
    handlers: Sequence[HTTPRouteHandler]
    """Route handlers, with the paths of the other service."""
    write_error: Callable[[Problem], Any] = write_detail
    """Converts a problem to the object that the response contains as JSON."""
    statuses: Mapping[int, int] = {}
    """Replacements of the gateway's error statuses that clients of the other service would not understand."""
    applies: Mapping[str, Callable[[HTTPScope], bool]] = {}
    """Predicates, by path that the gateway or another dialect also has: whether a request belongs to this dialect."""


def load(names: Iterable[str]) -> list[Dialect]:
    """Return the dialects of these names."""
    return [import_module(f"app.api.dialects.{name.replace('-', '_')}").DIALECT for name in names]


def error_writer(dialects: Sequence[Dialect]) -> WriteError:
    """Return a function that encodes a problem in the format of the request's dialect, or in the gateway's own format."""
    by_name = {dialect.name: dialect for dialect in dialects}

    def write(problem: Problem, scope: Scope) -> WrittenError:
        dialect = by_name.get(scope["path"].removeprefix("/").partition("/")[0])
        if dialect is None:
            return problems.write(problem)
        problem = msgspec.structs.replace(problem, status=dialect.statuses.get(problem.status, problem.status))
        return WrittenError(problem.status, JSON, msgspec.json.encode(dialect.write_error(problem)))

    return write


class DialectParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of every dialect. Unknown parameters are ignored."""

    ignores_unknown: ClassVar[bool] = True
    api_key: Annotated[str | None, Meta(description="The API key, if no header has it.")] = None

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        raise NotImplementedError
