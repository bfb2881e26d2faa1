"""The Tritons in use: which models, given by reference, they have, and which Triton gets the next call."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion, UnsupportedModel
from app.model.spec import ModelSpec
from app.triton.backend import TritonBackend
from app.triton.model_on_server import ModelOnServer
from app.triton.server_info import ModelState, join_states
from app.triton.transport import Transport

T = TypeVar("T")

# Types of errors for a model that no Triton can run, the most informative one first.
_BY_IMPORTANCE = (ModelNotReady, UnsupportedModel, TritonUnavailable, UnknownVersion, UnknownModel)


class TritonPool:
    """The Tritons in use, which may be added and removed. Closing the pool closes them."""

    def __init__(self, transport: Transport, servers: Iterable[TritonBackend] = ()) -> None:
        self.transport = transport
        self.servers: list[TritonBackend] = []
        self.leaving: list[TritonBackend] = []
        """Removed Tritons whose calls have not ended."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        """Tasks that close Tritons, which takes seconds if a Triton does not answer any more."""
        for server in servers:
            self.add(server)

    def add(self, server: TritonBackend) -> None:
        """Add a Triton."""
        self.servers.append(server)
        self.transport.attach(server.regions)

    def remove(self, server: TritonBackend) -> None:
        """Make no more calls to a Triton, and close it when its in-flight calls have ended."""
        self.servers.remove(server)
        self.leaving.append(server)

    def cached(self, model: str) -> ModelSpec | None:
        """Return the known spec of a model from the first Triton that runs it, or else the first that has it; None if unknown."""
        if len(self.servers) == 1:
            return self.servers[0].specs.cached(model)
        first = None
        for server in self.servers:
            spec = server.specs.cached(model)
            if spec is not None and server.is_usable(model):
                return spec
            first = first or spec
        return first

    def default(self, name: str) -> ModelSpec | None:
        """Return the spec of a model's default version; None if it is unknown or differs between Tritons."""
        if len(self.servers) == 1:
            return self.servers[0].specs.cached(name)
        known = [spec for server in self.servers if (spec := server.specs.cached(name)) is not None]
        return known[0] if len({spec.version for spec in known}) == 1 else None

    async def spec(self, model: str) -> ModelSpec:
        """Return the spec of a model; ask all Tritons if it is not known. Raises the most informative error of `SpecCache.get`."""
        spec = self.cached(model)
        if spec is not None:
            return spec
        failed: list[GatewayError] = []
        for answer in asyncio.as_completed([self._start(server.specs.get(model)) for server in self.servers]):
            try:
                return await answer
            except GatewayError as error:
                failed.append(error.with_traceback(None))  # it refers to the task, and to frames with an image
        try:
            raise min(failed, key=_rank, default=TritonUnavailable("no Triton is known"))
        finally:
            failed.clear()  # break the reference cycle: errors, tracebacks, this frame

    def has_had(self, model: str) -> bool:
        """Return whether any Triton has or had a model of this name."""
        return any(server.specs.has_had(model) for server in self.servers)

    def forget(self, served: ModelOnServer, model: str) -> None:
        """Forget a Triton's spec of a model after a failed inference: the model may have changed."""
        served.server.forget(model)
        if len(self.servers) > 1:  # the next request may read the spec of another Triton only
            self._ask(served.server, model)

    def is_usable(self, model: str) -> bool:
        """Return whether any Triton runs a model, as far as is known."""
        servers = self.servers
        if len(servers) == 1:
            served = servers[0].models.get(model)
            return served is None or served.is_usable
        servers = [server for server in servers if server.specs.has(model)] or servers
        return not servers or any(server.is_usable(model) for server in servers)

    def is_wrong(self, model: str) -> bool:
        """Return whether any Triton answers for a model, but wrongly."""
        return any(server.is_wrong(model) for server in self.servers)

    def is_silent(self, model: str) -> bool:
        """Return whether each Triton that has a model answers nothing, or is known not to run its default version."""
        model = default.reference if (default := self.default(model)) else model
        servers = [server for server in self.servers if server.specs.has(model)] or self.servers
        return all(server.silence.missed or not server.is_usable(model) for server in servers)

    def find(self, spec: ModelSpec, max_calls: Callable[[ModelSpec], float], more_calls: int = 0) -> ModelOnServer | None:
        """Choose the Triton for a call; None if all have the calls that `max_calls` allows for their own spec, and `more_calls`."""
        if len(self.servers) == 1:
            served = self.servers[0].model(spec.reference)
            return served if served.calls < max_calls(spec) + more_calls else None
        having = self._having(spec)
        found = [served for served in having if served.is_usable]
        if not found:  # a failing Triton: its error is the answer to the requests
            found = having or [server.model(spec.reference) for server in self.servers]
        free = [served for served in found if served.calls < max_calls(served.server.specs.known(spec)) + more_calls]
        return choose(free) if free else None

    def find_other(self, failed: ModelOnServer, spec: ModelSpec, images: int = 1) -> ModelOnServer | None:
        """Choose another Triton that runs the model and accepts batches of this size; None if there is none."""
        others = [served for served in self._having(spec) if served is not failed and served.is_usable]
        found = [served for served in others if served.server.specs.known(spec).max_batch >= images]
        return choose(found) if found else None

    def find_silent(self, answered: ModelOnServer, model: str, hang_seconds: float) -> list[ModelOnServer]:
        """Find the other Tritons that should have answered for a model by now, according to `ModelOnServer.is_silent`."""
        if len(self.servers) == 1:
            return []
        others = [server.model(model) for server in self.servers if server is not answered.server]
        return [other for other in others if other.is_usable and other.is_silent(hang_seconds)]

    def parallel_images(self, spec: ModelSpec) -> int:
        """Return how many images all Tritons that have a model process in parallel."""
        if len(self.servers) == 1:
            return spec.parallel_images
        return sum(server.specs.known(spec).parallel_images for server in self.servers if server.specs.has(spec.reference))

    async def is_ready(self, model: str) -> bool:
        """Return whether a model is ready at any Triton that runs it, as far as is known."""
        usable = [server for server in self.servers if server.is_usable(model)]
        for answer in asyncio.as_completed([self._start(server.client.is_ready(model)) for server in usable]):
            if await answer:
                return True
        return False

    async def describe(self, method: str, model: str) -> Any:  # noqa: ANN401 - as there
        """Ask a Triton, if possible one that has the model, as `TritonClient.describe` does."""
        for server in sorted(self.servers, key=lambda server: not server.specs.has(model)):
            with suppress(TritonUnavailable):
                return await server.client.describe(method, model)
        raise TritonUnavailable("no Triton answers")

    async def list_models(self) -> dict[str, ModelState]:
        """Return the models of all Tritons by name; raises the most informative error if none lists its models."""
        answers = await asyncio.gather(*(server.client.list_models() for server in self.servers), return_exceptions=True)
        states = join_states(item for answer in answers if isinstance(answer, dict) for item in answer.items())
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(failed) == len(answers):
            raise min(failed, key=_rank, default=TritonUnavailable("no Triton is known"))
        return states

    def read_again(self) -> None:
        """Read all known specs again, in the background: models have been changed."""
        for specs in [server.specs for server in self.servers]:
            for model in list(specs.models):
                specs.expire(model)
                specs.cached(model)

    async def refresh(self) -> None:
        """Look for models that Tritons did not have, and close removed Tritons; to be called once a second."""
        models = {model for server in self.servers for model in server.specs.models}
        for server in self.servers:
            server.forget_images()
            for model in models:
                self._ask(server, model)
        for server in [server for server in self.leaving if not server.is_busy]:
            self.leaving.remove(server)
            closing = asyncio.create_task(self._close(server))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def stop_probing(self) -> None:
        """Stop probing all Tritons."""
        await asyncio.gather(*(server.stop_probing() for server in [*self.servers, *self.leaving]))

    async def close(self) -> None:
        """Cancel the tasks, and close all Tritons."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._closing, *map(self._close, [*self.servers, *self.leaving]))

    def _having(self, spec: ModelSpec) -> list[ModelOnServer]:
        having = [server for server in self.servers if server.takes(spec) and self.transport.reaches(server.regions)]
        return [server.model(spec.reference) for server in having]

    def _ask(self, server: TritonBackend, model: str) -> None:
        if server.is_due(model):
            _ = self._start(server.look_for(model))

    async def _close(self, server: TritonBackend) -> None:
        await self.transport.detach(server.regions)
        await server.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # otherwise asyncio would report it


def choose(candidates: Sequence[ModelOnServer]) -> ModelOnServer:
    """Choose between two random candidates the one that would finish one more image first. There must be a candidate.

    If all candidates were compared, all workers would choose the same one at the same time.
    """
    if len(candidates) == 1:
        return candidates[0]
    one, other = random.sample(candidates, 2)
    speed, other_speed = one.speed, other.speed
    if not speed or not other_speed:  # an unknown speed counts as equal to the other one
        speed = other_speed = 1.0
    load, other_load = (one.images + 1) / speed, (other.images + 1) / other_speed
    if one.images == other.images == 0 or load == other_load:  # sometimes try the slower one: it may be faster by now
        return one if random.random() * (speed + other_speed) < speed else other  # noqa: S311 - not a secret
    return one if load < other_load else other


def _rank(error: BaseException) -> int:
    return next((rank for rank, kind in enumerate(_BY_IMPORTANCE) if isinstance(error, kind)), len(_BY_IMPORTANCE))
