"""What can be put into the pipeline: a cache of results, and routes between models. Without them, requests pass it as they are."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, Decoded, Question, Result
from app.pipeline.preprocess import Source

T = TypeVar("T")


Attempt = Callable[[str, CallContext], Awaitable[T]]
"""Answers a question by the model with a reference."""


class Finder(Protocol):
    """Finds in an image what a model finds, perhaps without asking it: a cache of results."""

    def takes(self, spec: ModelSpec, call: CallContext) -> bool:
        """Return whether what this model finds may be cached, and the request allows it."""

    async def find(self, data: bytes, spec: ModelSpec, call: CallContext, infer: Callable[[], Awaitable[Decoded]]) -> Decoded:
        """Return what a model finds in an image: from the cache, the same question under way, or `infer`, with its errors."""


class Choice(Protocol):
    """The model that a route has chosen for a request, or for the images of a batch."""

    async def run(self, data: Source, question: Question[Result], call: CallContext, attempt: Attempt[Result]) -> Result:
        """Answer a question by the chosen model, or by another one if that fails; errors about the model name the route."""


class Router(Protocol):
    """Names that stand for models."""

    def handles(self, name: str) -> bool:
        """Return whether a name is that of a route."""

    def target(self, name: str, version: int | str | None) -> str:
        """Return the reference of the model, in a version, for which a name stands now; that of no route stands for itself."""

    def choose(self, name: str, call: CallContext) -> Choice | None:
        """Choose a model for a request, or for a batch, that names no version; return None for a name that is no route."""

    async def refresh(self) -> None:
        """Follow changes of the routes. Call this about once a second."""
