"""The Tritons that the gateway uses: which models they have, and which of them gets the next call.

Models are named by their references.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from app.errors import GatewayError, ModelNotReady, TritonUnavailable, UnknownModel, UnknownVersion, UnsupportedModel
from app.model.spec import ModelSpec
from app.triton.backend import TritonBackend
from app.triton.endpoint import Endpoint
from app.triton.model_on_server import ModelOnServer
from app.triton.server_info import ModelState, join_states
from app.triton.transport import Transport

T = TypeVar("T")

# What says most of a model that cannot be used.
_BY_IMPORTANCE = (ModelNotReady, UnsupportedModel, TritonUnavailable, UnknownVersion, UnknownModel)


class TritonPool:
    """Any number of Tritons, of which some may come or go."""

    def __init__(self, transport: Transport, servers: Iterable[TritonBackend] = ()) -> None:
        """Start with some Tritons.

        Args:
            transport: Has the arenas that those on this host map.
            servers: The Tritons, closed with the pool.
        """
        self.transport = transport
        self.servers: list[TritonBackend] = []
        self.leaving: list[TritonBackend] = []
        """Those that get no more calls, until theirs have ended."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        """Connections that are being closed, which takes seconds if a Triton does not answer any more."""
        for server in servers:
            self.add(server)

    def add(self, server: TritonBackend) -> None:
        """Use one more Triton."""
        self.servers.append(server)
        self.transport.attach(server.regions)

    def remove(self, server: TritonBackend) -> None:
        """Make no more calls to a Triton; it is closed when those that are under way have ended."""
        self.servers.remove(server)
        self.leaving.append(server)

    def cached(self, model: str) -> ModelSpec | None:
        """Return the spec of a model, if it is known: that of the first Triton that has it, if possible of one that runs it."""
        if len(self.servers) == 1:
            return self.servers[0].specs.cached(model)
        first = None
        for server in self.servers:
            spec = server.specs.cached(model)
            if spec is not None and server.is_usable(model):
                return spec
            first = first or spec
        return first

    def newest(self, model: str) -> str | None:
        """Return the newest version of a model, by its name; None if that is not known, or not the same for all Tritons."""
        known = [server.specs.cached(model) for server in self.servers]
        versions = {spec.version for spec in known if spec is not None}
        return versions.pop() if len(versions) == 1 else None

    async def spec(self, model: str) -> ModelSpec:
        """Return the spec of a model; ask all Tritons if it is not known.

        Raises:
            GatewayError: None of them has it, as `SpecCache.get` says.
        """
        spec = self.cached(model)
        if spec is not None:
            return spec
        if len(self.servers) == 1:
            return await self.servers[0].specs.get(model)
        failed: list[GatewayError] = []
        for answer in asyncio.as_completed([self._start(server.specs.get(model)) for server in self.servers]):
            try:
                return await answer
            except GatewayError as error:
                failed.append(error)
        try:
            raise min(failed, key=_rank, default=TritonUnavailable("no Triton is known"))
        finally:
            failed.clear()  # their tracebacks refer to this frame

    def has_had(self, model: str) -> bool:
        """Return whether any Triton has, or had, a model."""
        return any(server.specs.has_had(model) for server in self.servers)

    def forget(self, served: ModelOnServer, model: str) -> None:
        """Have a spec read again: an inference failed, so the model may have changed."""
        served.server.forget(model)
        if len(self.servers) > 1:  # the next request may go elsewhere
            self._ask(served.server, model)

    def is_usable(self, model: str) -> bool:
        """Return whether any Triton runs a model, as far as is known."""
        servers = self.servers
        if len(servers) == 1:
            return servers[0].is_usable(model)
        servers = [server for server in servers if server.specs.has(model)] or servers
        return not servers or any(server.is_usable(model) for server in servers)

    def is_silent(self, model: str) -> bool:
        """Return whether each Triton that has a model has stopped to answer anything, or is known not to run it."""
        servers = [server for server in self.servers if server.specs.has(model)] or self.servers
        return all(server.silence.missed or not server.is_usable(model) for server in servers)

    def find(
        self, spec: ModelSpec, max_calls: Callable[[ModelSpec], float], besides: ModelOnServer | None = None
    ) -> ModelOnServer | None:
        """Find the Triton for a call; None if those that could take it have as many as they may have.

        Args:
            spec: Spec of the model.
            max_calls: How many calls one Triton may have.
            besides: One that has just failed: only another one that works is of use.
        """
        if len(self.servers) == 1 and besides is None:
            served = self.servers[0].model(spec.reference)
            return served if served.calls < max_calls(spec) else None
        having = [server for server in self.servers if server.takes(spec) and self.transport.reaches(server.regions)]
        found = [served for server in having if (served := server.model(spec.reference)).is_usable and served is not besides]
        if not found and besides is None:  # its error is what the callers must be told
            found = [server.model(spec.reference) for server in having or self.servers]
        free = [served for served in found if served.calls < max_calls(served.server.specs.known(spec))]
        return choose(free) if free else None

    def find_silent(self, answered: ModelOnServer, model: str, hang_seconds: float) -> list[ModelOnServer]:
        """Find the Tritons that should have answered for a model, too, as `ModelOnServer.is_silent` says."""
        if len(self.servers) == 1:
            return []
        others = [server.model(model) for server in self.servers if server is not answered.server]
        return [other for other in others if other.is_usable and other.is_silent(hang_seconds)]

    def parallel_images(self, spec: ModelSpec) -> int:
        """Return how many images all Tritons that have a model can process at a time."""
        if len(self.servers) == 1:
            return spec.parallel_images
        return sum(server.specs.known(spec).parallel_images for server in self.servers if server.specs.has(spec.reference))

    async def is_ready(self, model: str) -> bool:
        """Return whether any Triton has a model ready, and runs it as far as is known."""
        usable = [server for server in self.servers if server.is_usable(model)]
        for answer in asyncio.as_completed([self._start(server.client.is_ready(model)) for server in usable]):
            if await answer:
                return True
        return False

    async def list_models(self) -> dict[str, ModelState]:
        """List the models in the repositories of all Tritons that answer; one is ready if any of them has it ready.

        Raises:
            GatewayError: None of them answers, as `TritonClient.list_models` says.
        """
        answers = await asyncio.gather(*(server.client.list_models() for server in self.servers), return_exceptions=True)
        states = join_states(item for answer in answers if isinstance(answer, dict) for item in answer.items())
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(failed) == len(answers):
            raise min(failed, key=_rank, default=TritonUnavailable("no Triton is known"))
        return states

    async def refresh(self) -> None:
        """Look for models that a Triton did not have, and close those that are not used any more; to be called regularly."""
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
        """Leave circuits as they are."""
        await asyncio.gather(*(server.stop_probing() for server in [*self.servers, *self.leaving]))

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*self._closing, *map(self._close, [*self.servers, *self.leaving]))

    def _ask(self, server: Endpoint, model: str) -> None:
        """Ask a Triton for a model, if it may have it by now."""
        if server.is_due(model):
            _ = self._start(server.look_for(model))

    async def _close(self, server: TritonBackend) -> None:
        await self.transport.detach(server.regions)
        await server.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start something whose end nobody may wait for."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget_task)
        return task

    def _forget_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio would report it


def choose(candidates: Sequence[ModelOnServer]) -> ModelOnServer:
    """Choose, of two drawn at random, the one that would be done with one more image first; at least one is given.

    To compare all would let every worker choose the same one at the same moment.
    """
    if len(candidates) == 1:
        return candidates[0]
    one, other = random.sample(candidates, 2)
    speed, other_speed = one.speed, other.speed
    if not speed or not other_speed:  # one that has shown nothing is taken to be as fast as the other
        speed = other_speed = 1.0
    load, other_load = (one.images + 1) / speed, (other.images + 1) / other_speed
    if one.images == other.images == 0 or load == other_load:  # the slower one is tried now and then, as it may be faster by now
        return one if random.random() * (speed + other_speed) < speed else other  # noqa: S311 - not a secret
    return one if load < other_load else other


def _rank(error: BaseException) -> int:
    """Return where an error is in the order of importance."""
    return next((rank for rank, kind in enumerate(_BY_IMPORTANCE) if isinstance(error, kind)), len(_BY_IMPORTANCE))
