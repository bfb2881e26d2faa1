"""What can be put into the pipeline: a cache of results, and routes between models. Without them, requests pass it as they are."""

from collections.abc import Awaitable, Callable
from typing import Protocol

from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, Decoded, Question, Result


class Cache(Protocol):
    """A cache of what models have found in images."""

    def takes(self, spec: ModelSpec, call: CallContext) -> bool:
        """Return whether what this model finds may be cached, and the request allows it."""

    async def get(self, data: bytes, spec: ModelSpec, call: CallContext, find: Callable[[], Awaitable[Decoded]]) -> Decoded:
        """Return what a model finds in an encoded image, from the cache, from the same question under way, or from `find`.

        Raises the errors of `find`, and DeadlinePassed.
        """


class Router(Protocol):
    """Names that stand for models."""

    def target(self, name: str) -> str:
        """Return the reference of the model for which a name stands now; a name that is no route stands for itself."""

    def handles(self, name: str) -> bool:
        """Return whether a name is that of a route."""

    async def run(self, data: bytes, question: Question[Result], call: CallContext) -> Result:
        """Answer a question whose model is a route; errors are those of `Pipeline.run`."""

    def choose(self, name: str, call: CallContext) -> str:
        """Return the reference of the model that answers the images of a batch; a name that is no route stands for itself."""
