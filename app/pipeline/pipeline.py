"""Answer a question about an encoded image: admission, decoding, inference, and reading of the result."""

import asyncio
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from app.errors import CircuitOpen, DeadlinePassed, InvalidParameter, ModelNotReady, UnknownModel
from app.expected import suggestion
from app.imaging.header import PixelLimits, count_pixels, is_decoded_apart
from app.model.heads import Task
from app.model.reference import refer_to, split_reference
from app.model.spec import InputFormat, ModelSpec
from app.pipeline import saturation
from app.pipeline.batch import PendingImage
from app.pipeline.batcher import Batchers
from app.pipeline.call import CallContext, Question, Reader, Result, trivial_question
from app.pipeline.decode_threads import DecodeThreads
from app.pipeline.preprocess import Workspace, fill_input, is_quick_to_check
from app.pipeline.probe import BLANK_IMAGE
from app.pipeline.triton_calls import TritonCalls
from app.remote.fetcher import Fetcher
from app.resilience.admission import Admission
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import LARGE_PIXELS
from app.resilience.model_queue import Permit
from app.telemetry.timing import Timing
from app.triton.config_file import Unloadable
from app.triton.status import ModelReplaced

# How often a request starts over because its model has been replaced.
_MAX_REPLACEMENTS = 2
# With the default limits, a batch of 61 images has the maximum deadline, for which proxies and service managers are set up.
_MORE_PER_IMAGE = 1 / 20


class Models(NamedTuple):
    """Names of models from the settings and the list of models."""

    default: str
    """The default model; the gateway is ready if this model is."""
    by_task: Mapping[Task, str] = MappingProxyType({})
    """Default models of tasks for which it is another one."""
    pullable: frozenset[str] = frozenset()
    """Models that `pull` can download."""
    unloadable: Callable[[Container[str]], Mapping[str, Unloadable]] = lambda _: {}
    """Reads the model repository for models that Triton cannot load, except those that it has loaded."""
    last_change: Callable[[], int] = int
    """Returns when models were last changed, in nanoseconds."""


class Limits(NamedTuple):
    """Limits of one worker and its requests."""

    decode_threads: int
    pixels: PixelLimits
    """Maximum sizes of images."""
    timeout_seconds: float
    """Time from the end of a request's body to its response."""
    max_timeout_seconds: float
    """Maximum of the time that a caller may ask for."""

    def timeout(self, timeout_ms: int | None, images: int = 1) -> float:
        """Return how many seconds a request with this number of images has from the end of its body to its response.

        Raises:
            InvalidParameter: The caller asks for too much time.
        """
        if timeout_ms is None:
            grown = self.timeout_seconds * (1 + (images - 1) * _MORE_PER_IMAGE)
            return max(self.timeout_seconds, min(grown, self.max_timeout_seconds))
        if timeout_ms > self.max_timeout_seconds * 1e3:
            raise InvalidParameter(f"timeout_ms: the maximum is {self.max_timeout_seconds * 1e3:g}")
        return timeout_ms / 1e3


class Pipeline:
    """Runs the steps of a request. Each worker has one pipeline. `model` is a reference, `name` a name without a version."""

    def __init__(
        self, calls: TritonCalls, admission: Admission, models: Models, limits: Limits, fetcher: Fetcher | None = None
    ) -> None:
        """Create the threads and batchers of a worker; without a fetcher, images cannot be given by URL."""
        self.admission = admission
        self.fetcher = fetcher or Fetcher()
        self.limits = limits
        self.tritons = calls.pool
        self.default_model, self._task_models, self.pullable, self.unloadable, self._last_change = models
        self._changed_at: int | None = None
        self._default_names = {self.default_model, *self._task_models.values()}
        self._transport = calls.pool.transport
        self._workspace = Workspace(limits.pixels, admission.memory, admission.decode_backlog, self._transport)
        self._metrics = calls.metrics
        self.threads = DecodeThreads(limits.decode_threads)
        """For blocking work, such as decoding images and parsing large bodies."""
        self.apart_threads = DecodeThreads(1)
        """For blocking work of anonymous requests, so that no other request waits for it."""
        self._batchers = Batchers(calls)

    def default_for(self, task: Task) -> str:
        """Return the name of the default model for a task."""
        return self._task_models.get(task, self.default_model)

    def refer_to(self, name: str, version: int | str | None) -> str:
        """Return a reference to a version of a model, or to its default version: the name alone if that is the newest one."""
        default = self.tritons.default(name)
        return default.reference if default and (not version or default.version == str(version)) else refer_to(name, version)

    def check_circuit(self, model: str) -> None:
        """Reject a request for a model that no Triton can run at the moment.

        Raises:
            CircuitOpen: The model's circuit is open for each Triton that has the model.
        """
        if not self.tritons.is_usable(model):
            raise CircuitOpen("Triton failed repeatedly with this model, and has not recovered yet")

    def is_known(self, name: str) -> bool:
        """Return whether a model with this name exists or has existed, in any version."""
        return name in self._default_names or name in self.pullable or self.tritons.has_had(name)

    async def spec(self, model: str) -> ModelSpec:
        """Return the spec of a model; ask Triton if necessary.

        Raises:
            GatewayError: The model does not exist or cannot be used.
        """
        try:
            return await self.tritons.spec(model)
        except UnknownModel as error:
            name, detail = split_reference(model)[0], ""
            if name in self._default_names:
                if self.tritons.has_had(name):
                    raise ModelNotReady("the model is not loaded any more") from None
                detail = f", a default model of the settings; it has {', '.join(error.models) or 'none that is ready'}"
            if name in self.pullable:
                detail += f"; get it with `nereid pull {name}` or `./just pull {name}`"
            elif name in self._task_models.values():
                detail += f"; add it: `yolo export model={name}.pt format=onnx dynamic=True`, then `nereid add {name}.onnx`"
            if detail:
                raise UnknownModel(f"Triton does not have {name}{detail}") from None
            similar = suggestion(name, [*error.models, *self.pullable]) or ";"
            raise UnknownModel(f"{error.detail}{similar} GET /models lists those that exist") from None

    async def prepare(self, model: str, deadline: Deadline) -> ModelSpec:
        """Return the spec of a model, and create slots for its input tensors.

        Raises:
            DeadlinePassed: Triton did not answer in time.
            GatewayError: The model does not exist or cannot be used.
        """
        spec = self.tritons.cached(model)
        if spec is not None and self._transport.is_prepared(spec.image_bytes):
            return spec
        try:
            async with asyncio.timeout(deadline.remaining):
                spec = await self.spec(model)
                await self._transport.prepare(spec.image_bytes)
        except TimeoutError as error:
            raise DeadlinePassed("Triton did not answer in time") from error
        return spec

    def sample(self) -> None:
        """Set the gauges of this worker. Call this about once a second."""
        saturation.sample(self._metrics, self.admission, self.tritons, self.threads, self._batchers)

    async def refresh(self) -> None:
        """Update admission, Tritons and shared memory. Call this about once a second."""
        self.admission.refresh()
        changed_at = await asyncio.to_thread(self._last_change)  # the disk may be that of a network
        if self._changed_at not in {None, changed_at}:
            self.tritons.read_again()
        self._changed_at = changed_at
        await self.tritons.refresh()
        await self._transport.refresh()
        self._batchers.send()

    async def warm_up(self) -> None:
        """Run one inference with the default model, to measure its speed before the first request.

        Raises:
            GatewayError: The inference failed.
        """
        call = CallContext(Deadline.after(self.limits.timeout_seconds), Timing(), "warm-up")
        spec = await self.prepare(self.default_model, call.deadline)
        await self.run(BLANK_IMAGE, trivial_question(spec), call)

    async def run(self, data: bytes, question: Question[Result], call: CallContext) -> Result:
        """Answer a question about one encoded image.

        Raises:
            DeadlinePassed: The deadline passed; the message names the step.
            GatewayError: A step failed.
        """
        model = self.refer_to(question.model or self.default_for(question.task), question.version)
        self.check_circuit(model)
        call = call.pinned_to(question.version)
        memory = self.admission.memory.reserve(call.caller)
        try:
            memory.add(len(data))
            spec = await self.prepare(model, call.deadline)
            reader = question.reader(spec)  # rejects invalid parameters before admission
            if spec.input_format is not InputFormat.FILE:
                memory.add(spec.image_bytes)
            permit = await self.admission.admit(spec.name, self.tritons.parallel_images(spec), memory, call.deadline, call.caller)
        except BaseException:
            memory.release()
            raise
        with permit:
            return await self.process(data, spec, question, reader, call, permit)

    async def process(  # noqa: PLR0913, PLR0917 - the parts of a request
        self, data: bytes, spec: ModelSpec, question: Question[Result], reader: Reader[Result], call: CallContext, permit: Permit
    ) -> Result:
        """Answer a question about an encoded image that has been admitted; start over if the model is replaced meanwhile.

        Raises the errors of `run`. `reader` is that of the question for this spec.
        """
        for _ in range(_MAX_REPLACEMENTS):
            with suppress(ModelReplaced):
                return await self._attempt(data, spec, reader, call, permit)
            reference = self.refer_to(spec.name, spec.version if call.is_pinned else None)
            spec = await self.prepare(reference, call.deadline)
            reader = question.reader(spec)
        return await self._attempt(data, spec, reader, call, permit)

    async def _attempt(self, data: bytes, spec: ModelSpec, reader: Reader[Result], call: CallContext, permit: Permit) -> Result:
        timing, deadline = call.timing, call.deadline
        timing.lap("model")
        takes_file = spec.input_format is InputFormat.FILE
        # Finding the size takes microseconds, reading the whole header may take milliseconds.
        pixels = 0 if takes_file else count_pixels(data, self.limits.pixels)
        fill = partial(fill_input, data, pixels, spec, self._workspace, call, permit)
        if takes_file and is_quick_to_check(data):
            buffer, transform = fill()
        else:
            with self.admission.decode_backlog.add(pixels, deadline, call.caller) as counted:
                is_slow = not takes_file and is_decoded_apart(data)  # a second or more, even if it is small
                cost = pixels + LARGE_PIXELS if is_slow else pixels
                buffer, transform = await self.threads.run(fill, deadline, permit, counted, turn=call.turn(cost))
        timing.lap("decode")
        # No variable may refer to the pending image: it refers to its error, whose traceback refers to this frame.
        result = await self._batchers[spec.reference].run(PendingImage(spec, buffer, call, permit))
        timing.lap("infer")
        if reader.is_heavy:
            drawn = transform.image_width * transform.image_height if reader.pixel_bytes else 0

            def read() -> Result:
                with self.admission.memory.reserve(call.caller) as memory:
                    memory.add(reader.pixel_bytes * drawn)
                    return reader.read(result, transform, deadline)

            answer = await self.threads.run(read, deadline, permit, turn=call.turn(drawn))
        else:
            answer = reader.read(result, transform, deadline)
        timing.lap("post")
        return answer

    async def close(self) -> None:
        """Wait for images that are being decoded, and for calls that requests have abandoned."""
        self.threads.close()
        self.apart_threads.close()
        await self._batchers.close(max(self.limits.timeout_seconds, self.limits.max_timeout_seconds))
