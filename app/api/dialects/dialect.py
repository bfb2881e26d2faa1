"""What a dialect is, and the parameters that all of them have."""

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

MAX_OBJECTS = 300
"""In an answer about an image, unless a request asks for fewer."""


def write_detail(problem: Problem) -> dict[str, str]:
    """Write an error as an object that has nothing but its text."""
    return {"error": problem.detail}


class Dialect(NamedTuple):
    """The interface of another detection service."""

    name: str
    """As the setting `dialects` has it."""
    handlers: Sequence[HTTPRouteHandler]
    """Their paths are those of the other service."""
    write_error: Callable[[Problem], Any] = write_detail
    """Makes of an error what the body of the response has as JSON."""
    statuses: Mapping[int, int] = {}
    """By the gateway's status of an error: that of the other service, where its clients would not understand the gateway's."""
    callers: Mapping[str, Callable[[HTTPScope], bool]] = {}
    """By path that the gateway or another dialect has, too: whether a request there is for this dialect."""


def load(names: Iterable[str]) -> list[Dialect]:
    """Return the dialects of these names."""
    return [import_module(f"app.api.dialects.{name.replace('-', '_')}").DIALECT for name in names]


def error_writer(dialects: Sequence[Dialect]) -> WriteError:
    """Return what writes an error as the dialect does whose request it is; any other as the gateway does."""
    by_name = {dialect.name: dialect for dialect in dialects}

    def write(problem: Problem, scope: Scope) -> WrittenError:
        dialect = by_name.get(scope["path"].removeprefix("/").partition("/")[0])
        if dialect is None:
            return problems.write(problem)
        problem = msgspec.structs.replace(problem, status=dialect.statuses.get(problem.status, problem.status))
        return WrittenError(problem.status, JSON, msgspec.json.encode(dialect.write_error(problem)))

    return write


class DialectParameters(Parameters, frozen=True, kw_only=True):
    """Those of every dialect. Clients send others, too, which are ignored."""

    ignores_unknown: ClassVar[bool] = True
    api_key: Annotated[str | None, Meta(description="The API key, if no header has it.")] = None

    @property
    def options(self) -> DetectOptions:
        """What they ask of the model."""
        raise NotImplementedError
