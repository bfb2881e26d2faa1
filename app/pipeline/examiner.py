"""Find models that a Triton answers for wrongly, or with nothing but errors, by asking about the golden picture.

What a model finds there is compared with what `add` has found, and with the first answer of this Triton. A model that is wrong
twice is left out there: its circuit opens in all workers, and asks on.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic

import msgspec
import structlog

from app.errors import (
    GatewayError,
    InferenceFailed,
    InvalidImage,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
    UnknownModel,
    UnsupportedModel,
)
from app.model.golden import SAMPLE, Golden
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.golden import added_values, golden_input, read_golden
from app.resilience.circuit_breaker import CircuitBreaker
from app.telemetry.metrics import Metrics
from app.triton.backend import TritonBackend
from app.triton.model_on_server import ModelOnServer
from app.triton.pool import TritonPool
from app.triton.statistics import ModelStatistics, read_statistics
from app.triton.status import ModelDied, ModelReplaced, own_message

EVERY_SECONDS = 60.0
"""Interval of the questions to models that are used."""
_LOOK_SECONDS = 1.0
# Between looks at what Triton has loaded, and between questions after errors.
_LIST_SECONDS, _ERRORS_SECONDS = 2.0, 4.0
# Of questions in a row, where another instance, with another GPU, may answer each of them.
_QUESTIONS = 4
_QUEUE_SECONDS, _STATISTICS_SECONDS = 5.0, 2.0
# An answer that is none, although the picture is well.
_FAILED = (InferenceFailed, InvalidModelOutput, InvalidImage)

LOG = structlog.get_logger()


class _Known:
    def __init__(self, spec: ModelSpec, connection: int, errors: int) -> None:
        self.spec = spec
        self.connection = connection
        self.errors = errors
        """As of the last question, as `note_error` counts."""
        self.images = 0.0
        """Images of all workers until then."""
        self.asked_at = -EVERY_SECONDS
        self.first: Golden | None = None
        """The first answer of this Triton."""
        self.inferences = 0
        """Triton's count at the last right answer, which it begins anew when it loads the model again."""
        self.seen, self.loaded_at = 0, 0.0
        """After the death of a process: Triton's count, and when it was seen to begin anew, on the `time.monotonic` clock."""
        self.was_right = False
        """Whether any answer was right; a restart that was to help and did not makes it forgotten."""
        self.is_counted = False
        """Whether a restart was asked for since the last right answer."""


class Examiner:
    """Asks Tritons about the golden picture. One worker of a host does so, and every worker where it leaves a model out."""

    def __init__(self, pool: TritonPool, metrics: Metrics, circuit: Callable[[ModelOnServer, ModelSpec], CircuitBreaker]) -> None:
        self._pool = pool
        self._metrics = metrics
        self._circuit = circuit
        self._known: dict[tuple[TritonBackend, str], _Known] = {}
        self._listed: dict[TritonBackend, tuple[object, float, set[str]]] = {}
        """By Triton its connection and loaded versions, when they were read, and the references of models that can be asked."""
        self.tasks: dict[tuple[TritonBackend, str], asyncio.Task[None]] = {}
        """What is being asked, by Triton and reference; by Triton alone what finds out what is due."""

    async def run(self, defaults: Callable[[], Collection[str]]) -> None:
        """Look every second for what is to be asked; `defaults` returns the names of the default models. Never returns."""
        try:
            while True:
                self._look(defaults())
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            for task in self.tasks.values():
                task.cancel()
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)

    def note_error(self, served: ModelOnServer, spec: ModelSpec) -> None:
        """Tell the worker that asks of an error of a model."""
        self._metrics.table.add(self._errors_column(served, spec), 1)

    def note_death(self, served: ModelOnServer, spec: ModelSpec) -> None:
        """Leave a model out until it is loaded again, because Triton takes one of its processes for dead.

        If the process was only silent for a second, Triton reads its late results as those of the next requests.
        """
        self._metrics.model_deaths.add(1, spec.reference)
        self._circuit(served, spec).open_for_death()

    async def probe(self, served: ModelOnServer, spec: ModelSpec) -> None:
        """Ask a model that is left out once; raises GatewayError if the answer is not right, or there is none."""
        spec = served.server.specs.peek(spec.reference) or spec
        known = self._know(served, spec)
        if await self._has_dead_process(served, known):
            raise TritonUnavailable("a process of the model has died")
        if not (self._metrics.table.is_first or added_values(spec)):
            if self._circuit(served, spec).is_wrong_for_first:
                raise TritonUnavailable("the worker that asks has what to compare the answer with")
            return
        try:
            for _ in range(_count_questions(spec)):
                if reason := await self._why_wrong(served, known):
                    self._count(known)
                    raise InferenceFailed(reason)
        except ModelDied:
            self.note_death(served, spec)
            raise
        except (UnknownModel, ModelNotReady):  # it is asked anew when it is loaded
            known.asked_at = -EVERY_SECONDS

    def _look(self, defaults: Collection[str]) -> None:
        servers = self._pool.servers
        self._known = {key: known for key, known in self._known.items() if key[0] in servers}
        self._listed = {server: listed for server, listed in self._listed.items() if server in servers}
        self.tasks = {key: task for key, task in self.tasks.items() if not task.done()}
        for server in servers:
            for name in defaults:
                if (spec := server.specs.peek(name)) is not None:
                    self._circuit(server.model(spec.reference), spec)  # other workers may have opened it
            if self._metrics.table.is_first and server.client.server is not None and (server, "") not in self.tasks:
                self.tasks[server, ""] = asyncio.create_task(self._ask_all(server, defaults))

    async def _ask_all(self, server: TritonBackend, defaults: Collection[str]) -> None:
        try:
            for spec in await self._specs(server, defaults):
                served, key = server.model(spec.reference), (server, spec.reference)
                known = self._know(served, spec)
                is_due = key not in self.tasks and self._is_due(served, known, is_default=spec.name in defaults)
                if is_due and not served.is_wrong:
                    self.tasks[key] = asyncio.create_task(self._ask(served, known))
                    await asyncio.wait({self.tasks[key]}, timeout=_LIST_SECONDS)  # it may hang
        except Exception:
            LOG.exception("the golden picture could not be asked about", triton=server.address)

    async def _specs(self, server: TritonBackend, defaults: Collection[str]) -> list[ModelSpec]:
        before, listed_at, references = self._listed.get(server, (None, 0.0, set()))
        if monotonic() - listed_at >= _LIST_SECONDS:
            used = {split_reference(each)[0] for each in server.specs.models}
            versions: dict[str, frozenset[str]] = dict.fromkeys((*defaults, *used), frozenset())
            with suppress(GatewayError):  # Triton may restrict its repository
                versions = {name: state.versions for name, state in (await server.client.list_models()).items() if state.is_ready}
            state = server.client.connection, versions
            if state != before:
                references = {*versions}
            references |= {each for each in server.specs.models if split_reference(each)[0] in versions}
            self._listed[server] = state, monotonic(), references
        specs: dict[str, ModelSpec] = {}
        for reference in list(references):
            try:
                spec = server.specs.peek(reference) or await server.specs.get(reference)
            except UnsupportedModel:
                references.discard(reference)
            except GatewayError:
                continue
            else:
                specs[spec.reference] = spec
        return list(specs.values())

    def _know(self, served: ModelOnServer, spec: ModelSpec) -> _Known:
        """Return what is known of a model; what is known of its answers only if it is still the same."""
        key, connection = (served.server, spec.reference), served.server.client.connection
        known = self._known.get(key)
        if known is None or known.spec != spec or known.connection != connection:
            new = self._known[key] = _Known(spec, connection, self._errors(served, spec))
            if known is not None:
                new.seen, new.loaded_at = known.seen, known.loaded_at
            if known is not None and known.spec.version == spec.version:
                new.was_right = known.was_right and not known.is_counted
                if known.spec == spec or added_values(spec):  # others have been loaded again
                    new.first, new.inferences = known.first, known.inferences
            return new
        return known

    def _is_due(self, served: ModelOnServer, known: _Known, *, is_default: bool) -> bool:
        waited = monotonic() - known.asked_at
        if waited < EVERY_SECONDS:
            return self._errors(served, known.spec) != known.errors and waited >= _ERRORS_SECONDS
        return is_default or not known.was_right or self._metrics.count_images(known.spec.reference) > known.images

    async def _ask(self, served: ModelOnServer, known: _Known) -> None:
        known.asked_at, known.errors = monotonic(), self._errors(served, known.spec)
        known.images = self._metrics.count_images(known.spec.reference)
        try:
            if not await self._why_wrong(served, known):
                return
            for _ in range(_count_questions(known.spec)):
                if reason := await self._why_wrong(served, known):
                    self._count(known)
                    self._metrics.wrong_episodes.add(1, known.spec.reference)
                    self._circuit(served, known.spec).open_for_wrong_answers(reason)
                    return
        except ModelDied:
            self.note_death(served, known.spec)
        except GatewayError:  # it says nothing of the model
            known.asked_at += _ERRORS_SECONDS - EVERY_SECONDS
        except Exception:
            LOG.exception("the golden picture could not be asked about", triton=served.server.address, model=known.spec.reference)

    async def _has_dead_process(self, served: ModelOnServer, known: _Known) -> bool:
        if max(served.server.client.connected_at, known.loaded_at) > self._circuit(served, known.spec).died_at:
            return False
        before, known.seen = known.seen, await _count_inferences(served.server, known.spec, known.seen)
        if known.seen < before:
            known.loaded_at = monotonic()
        return known.seen >= before

    def _errors(self, served: ModelOnServer, spec: ModelSpec) -> int:
        return self._metrics.table.total(self._errors_column(served, spec))

    def _errors_column(self, served: ModelOnServer, spec: ModelSpec) -> int:
        table = self._metrics.table
        return table.column(f"errors:{table.alias(served.server.address)}:{spec.reference}")

    def _count(self, known: _Known) -> None:
        if known.was_right:
            known.is_counted = True
            self._metrics.wrong_answers.add(1, known.spec.reference)

    async def _why_wrong(self, served: ModelOnServer, known: _Known) -> str:
        """Return why a model's answer is wrong; empty if it is right, or there is nothing to compare it with."""
        spec, added = known.spec, added_values(known.spec)
        values = [golden for golden in (added, known.first) if golden is not None]
        try:
            answer = await _infer(served, spec)
            if not values and (await _infer(served, spec)).difference(answer):
                return ""  # it says something else each time
            reason = next(filter(None, (golden.difference(answer) for golden in values)), "")
            if served.is_wrong and not values and answer.is_zero:  # of what was known before, an ended worker has taken along
                reason = "zeros"
        except _FAILED as error:
            if not values and not served.is_wrong:
                return ""
            answer, reason = Golden(), own_message(error)
        count = 0 if added else await _count_inferences(served.server, spec, known.inferences)
        if reason:
            if await served.server.specs.read(spec.reference) != spec or count < known.inferences:
                known.first = None
                raise ModelReplaced("the model has been loaded again")
            return reason
        known.was_right, known.is_counted, known.inferences = True, False, count
        known.first = known.first or (added.keep(answer) if added else answer)
        return ""


def _count_questions(spec: ModelSpec) -> int:
    return _QUESTIONS if spec.instances > 1 or spec.device == "gpu" else 1


async def _count_inferences(server: TritonBackend, spec: ModelSpec, before: int) -> int:
    try:
        statistics = await read_statistics(server.client, _STATISTICS_SECONDS)
    except GatewayError:
        return before
    return statistics.get((spec.name, spec.version), ModelStatistics()).inferences


async def _infer(served: ModelOnServer, spec: ModelSpec) -> Golden:
    asked = msgspec.structs.replace(spec, output_names=(*spec.output_names, SAMPLE)) if spec.gives_sample else spec
    tensor = await asyncio.to_thread(golden_input, spec)  # takes tens of milliseconds
    result = await served.server.client.infer(asked, [tensor], timeout_seconds=_QUEUE_SECONDS, request_id="golden")
    if result.version != spec.version:
        await served.server.specs.read(spec.reference)
        raise ModelReplaced("another version has answered")
    return await asyncio.to_thread(read_golden, spec, result.outputs, result.version)
