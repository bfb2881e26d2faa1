"""Answer a question about an encoded image: admission, decoding, inference, and reading of the result."""

import asyncio
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from app.errors import CircuitOpen, DeadlinePassed, GatewayError, ModelNotReady, UnknownModel
from app.expected import suggestion
from app.imaging.header import count_pixels, is_decoded_apart
from app.imaging.patch import Patch
from app.imaging.transform import ImageTransform
from app.model.heads import HEADS, Task
from app.model.reference import refer_to, split_reference
from app.model.spec import InputFormat, ModelSpec
from app.pipeline import preprocess, saturation
from app.pipeline.batch import PendingImage
from app.pipeline.batcher import Batchers
from app.pipeline.call import CallContext, Decoded, Question, Reader, Result, decode, question_for
from app.pipeline.decode_threads import DecodeThreads
from app.pipeline.hooks import Choice, Finder, Router
from app.pipeline.limits import Limits
from app.pipeline.preprocess import Source, Workspace
from app.pipeline.probe import BLANK_IMAGE
from app.pipeline.triton_calls import WRONG, TritonCalls
from app.remote.fetcher import Fetcher
from app.resilience.admission import Admission
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import LARGE_PIXELS
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.lease import Lease
from app.resilience.memory import Reservation
from app.resilience.model_queue import Permit
from app.telemetry.timing import Timing
from app.triton.config_file import Unloadable
from app.triton.messages import InferResult
from app.triton.on_demand import ModelsOnDemand
from app.triton.status import ModelReplaced
from app.triton.transport import InputBuffer

# How often a request starts over because its model has been replaced.
_MAX_REPLACEMENTS = 2

# Part of its time that a request waits until a model is loaded; the rest is for the inference.
_LOADING_PART = 0.8
_NOTHING = nullcontext()

T = TypeVar("T")


class Models(NamedTuple):
    """Names of models from the settings and the list of models."""

    default: str
    """The default model; the gateway is ready if this model is."""
    by_task: Mapping[Task, str] = MappingProxyType({})
    """Default models of tasks for which it is another one."""
    pullable: Mapping[str, str] = MappingProxyType({})
    """What `pull` takes for the models that it can download: their names, or those of their sets."""
    unloadable: Callable[[Container[str]], Mapping[str, Unloadable]] = lambda _: {}
    """Reads the model repository for models that Triton cannot load, except those that it has loaded."""
    last_change: Callable[[], int] = int
    """Returns when models were last changed, in nanoseconds."""


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
        self.finder: Finder | None = None
        self.router: Router | None = None
        self.on_demand: ModelsOnDemand | None = None

    def default_for(self, task: Task) -> str:
        """Return the name of the default model for a task."""
        return self._task_models.get(task, self.default_model)

    @property
    def default_reference(self) -> str:
        """Reference of the default model; of that for which it stands, if it is a route."""
        return self.refer_to(self.default_model, None)

    async def read_default_reference(self) -> str:
        """Return `default_reference`, whose version circuits need; after a failure, the spec that was forgotten is read again."""
        with suppress(GatewayError):  # Triton does not run the model
            await self.tritons.spec(self.default_reference)
        return self.default_reference

    def default_models(self) -> set[str]:
        """Return the names of the default models, or of those for which they stand now."""
        return {split_reference(self.refer_to(name, None))[0] for name in self._default_names}

    def refer_to(self, name: str, version: int | str | None) -> str:
        """Return a reference to a version of a model, or to its default version: the name alone if that is the newest one."""
        if self.router is not None:
            name, version = split_reference(self.router.target(name, version))
        default = self.tritons.default(name)
        return default.reference if default and (not version or default.version == str(version)) else refer_to(name, version)

    def choose(self, name: str, version: int | None, call: CallContext) -> tuple[str, CallContext]:
        """Return the reference of a version of a model, or of that for which a name stands now, and the call to it."""
        return self.refer_to(name, version), call if version is None else call._replace(is_pinned=True)

    def choose_of_route(self, question: Question[Any], call: CallContext) -> Choice | None:
        """Choose the model for a question, or for a batch, whose model is a route; return None for others, and with a version."""
        if self.router is None or question.version:
            return None
        return self.router.choose(question.model or self.default_for(question.task), call)

    def check_circuit(self, model: str) -> None:
        """Raise CircuitOpen for a model that no Triton can run at the moment."""
        if not self.tritons.is_usable(model):
            if self.tritons.is_wrong(model):
                raise CircuitOpen(WRONG)
            raise CircuitOpen("Triton failed repeatedly with this model, and has not recovered yet")

    def is_known(self, name: str) -> bool:
        """Return whether a model with this name exists or has existed, in any version."""
        is_route = self.router is not None and self.router.handles(name)
        return is_route or name in self._default_names or name in self.pullable or self.tritons.has_had(name)

    def log_fields(self, name: str) -> dict[str, str]:
        """Return the log fields of a model or route that a request names; none if there is none of this name."""
        if self.router is not None and self.router.handles(name):
            return {"route_name": name, "model": self.router.target(name, None)}
        return {"model": name} if self.is_known(name) else {}

    async def spec(self, model: str) -> ModelSpec:
        """Return the spec of a model; ask Triton if necessary."""
        try:
            return await self.tritons.spec(model)
        except UnknownModel as error:
            name, detail = split_reference(model)[0], ""
            if name in self._default_names:
                if self.tritons.has_had(name):
                    raise ModelNotReady("the model is not loaded any more") from None
                detail = f", a default model of the settings; it has {', '.join(error.models) or 'none that is ready'}"
            if name in self.pullable:
                detail += f"; {self.how_to_pull(name)}"
            elif name in {self._task_models.get(task) for task in HEADS}:
                detail += f"; add it: `yolo export model={name}.pt format=onnx dynamic=True`, then `nereid add {name}.onnx`"
            if detail:
                raise UnknownModel(f"Triton does not have {name}{detail}") from None
            similar = suggestion(name, [*error.models, *self.pullable]) or ";"
            raise UnknownModel(f"{error.detail}{similar} GET /models lists those that exist") from None

    def how_to_pull(self, name: str) -> str:
        """Tell how to get a model that can be pulled."""
        return f"get it with `nereid pull {self.pullable[name]}` or `./just pull {self.pullable[name]}`"

    def using(self, model: str) -> AbstractContextManager[None]:
        """Keep a model loaded that may be unloaded when no request uses it."""
        return _NOTHING if self.on_demand is None else self.on_demand.using(split_reference(model)[0])

    async def prepare(self, model: str, deadline: Deadline, caller: Caller = ANYBODY) -> ModelSpec:
        """Return the spec of a model, and create slots for its input tensors; load it on demand if the caller may."""
        spec = self.tritons.cached(model)
        is_loaded = self.on_demand is None or self.on_demand.has(split_reference(model)[0])
        if spec is not None and is_loaded and self._transport.is_prepared(spec.image_bytes):
            return spec
        if self.on_demand is not None:
            await self.on_demand.load(split_reference(model)[0], _LOADING_PART * deadline.remaining, caller)
        try:
            async with asyncio.timeout(deadline.remaining):
                spec = await self.spec(model)
                await self._transport.prepare(spec.image_bytes)
        except TimeoutError as error:
            raise DeadlinePassed("Triton did not answer in time") from error
        if spec.reference != model:  # until now it was not known whose circuit counts
            self.check_circuit(spec.reference)
        return spec

    def batch_queue(self, spec: ModelSpec, caller: Caller) -> BatchQueue:
        """Return the queue in which a caller's images of batches wait for their turn at a model."""
        return self.admission.batch_queue(spec.name, self.tritons.parallel_images(spec), caller)

    def sample(self) -> None:
        """Set the gauges of this worker. Call this about once a second."""
        saturation.sample(self._metrics, self.admission, self.tritons, self.threads, self._batchers)

    async def refresh(self) -> None:
        """Update admission, Tritons, shared memory and routes. Call this about once a second."""
        self.admission.refresh()
        changed_at = await asyncio.to_thread(self._last_change)  # the disk may be that of a network
        if self._changed_at not in {None, changed_at}:
            self.tritons.read_again()
        self._changed_at = changed_at
        await self.tritons.refresh()
        await self._transport.refresh()
        self._batchers.send()
        if self.router is not None:
            await self.router.refresh()

    async def warm_up(self) -> None:
        """Run one inference with the default model, to measure its speed before the first request."""
        call = CallContext(Deadline.after(self.limits.timeout_seconds), Timing(), "warm-up")
        spec = await self.prepare(self.default_reference, call.deadline)
        await self.run_model(self.default_reference, BLANK_IMAGE, question_for(spec, 1.0), call)

    async def run(self, data: Source, question: Question[Result], call: CallContext) -> Result:
        """Answer a question about one encoded image, or a part of a decoded one; the message of DeadlinePassed names the step."""
        if (choice := self.choose_of_route(question, call)) is not None:
            return await choice.run(data, question, call, lambda model, own_call: self.run_model(model, data, question, own_call))
        model, call = self.choose(question.model or self.default_for(question.task), question.version, call)
        return await self.run_model(model, data, question, call)

    async def run_model(
        self, model: str, data: Source, question: Question[Result], call: CallContext, held: Lease | None = None
    ) -> Result:
        """Answer a question about an image by this model, whichever one it names, or from the cache.

        Whoever decoded an image holds its memory meanwhile; a thread that draws a patch of it keeps it even if this is cancelled.
        `held` holds the memory of an encoded image of a batch, and is kept as long as a thread or a Triton reads the image.
        """
        self.check_circuit(model)
        with self.using(model), self.admission.memory.reserve(call.caller) as memory:
            memory.add(len(data) if held is None and isinstance(data, bytes) else 0)
            spec = await self.prepare(model, call.deadline, call.caller)
            reader = question.reader(spec)  # rejects invalid parameters before admission

            async def ask(read: Callable[[Reader[Result], Decoded], T]) -> T:
                admitting = self._admit(spec, memory, call, held, is_refused=isinstance(data, bytes))
                with await admitting as permit:
                    own, own_reader, result, transform = await self._infer(data, spec, question, reader, call, permit)
                    reading = lambda: read(own_reader, decode(own, result, transform))  # noqa: E731
                    return await self._read(reading, own_reader, transform, call, permit)

            if self.finder is None or isinstance(data, Patch) or not self.finder.takes(spec, call):
                answer = await ask(lambda own, decoded: own.read(decoded, call.deadline))
            else:
                found = await self.finder.find(data, spec, call, lambda: ask(lambda _, decoded: decoded))
                usual = reader if found.spec is spec else question.reader(found.spec)
                with Lease() as lease:
                    answer = await self._read(lambda: usual.read(found, call.deadline), usual, found.transform, call, lease)
            call.timing.lap("post")
            return answer

    async def _admit(
        self, spec: ModelSpec, memory: Reservation, call: CallContext, held: Lease | None = None, *, is_refused: bool = True
    ) -> Permit:
        nbytes = 0 if spec.input_format is InputFormat.FILE else spec.image_bytes
        parallel = self.tritons.parallel_images(spec)
        if not call.is_batch and not call.stream:
            memory.add(nbytes, is_refused=is_refused)
            is_later = call.is_later_step
            return await self.admission.admit(spec.name, parallel, memory, call.deadline, call.caller, is_later_step=is_later)
        if call.stream and not call.is_batch:
            queue = self.admission.queue(spec.name, parallel)
            permit = await queue.admit_frame(call.caller, call.stream, call.timing.began, call.deadline, parallel)
        else:
            permit = await self.batch_queue(spec, call.caller).admit(call.deadline, is_later_step=call.is_later_step)
        if held is not None:
            held.keep_until_release(permit)
        try:  # not before it is admitted: images of batches and streams wait for long
            memory.add(nbytes, is_refused=is_refused)
        except BaseException:
            permit.release()
            raise
        memory.move_to(permit)
        return permit

    @asynccontextmanager
    async def decoded(self, data: bytes, call: CallContext) -> AsyncIterator[Patch]:
        """Decode an image at its full size; its memory is held until the `with` block and all threads that read it have ended."""
        with Lease() as lease:
            memory = self.admission.memory.reserve(call.caller)
            lease.on_release(memory.release)
            memory.add(len(data))
            pixels = count_pixels(data, self.limits.pixels)
            decoding = partial(preprocess.decode_image, data, pixels, self._workspace, call, memory)
            with self.admission.decode_backlog.add(pixels, call.deadline, call.caller) as counted:
                cost = pixels + LARGE_PIXELS if is_decoded_apart(data) else pixels
                patch = await self.threads.run(decoding, call.deadline, lease, counted, turn=call.turn(cost))
            call.timing.lap("decode")
            yield patch._replace(memory=lease)

    async def run_tensor(self, tensor: NDArray[Any], spec: ModelSpec, call: CallContext) -> InferResult:
        """Run the inference of an image that is an input tensor already; errors are those of `run`, and ModelReplaced."""
        with self.admission.memory.reserve(call.caller) as memory:
            permit = await self._admit(spec, memory, call)
        with permit:
            buffer = self._transport.allocate(tensor.shape, tensor.dtype.type, spec.image_bytes, permit)
            await self.threads.run(partial(np.copyto, buffer.tensor, tensor), call.deadline, permit, turn=call.turn())
            call.timing.lap("queue")
            result = await self._batchers[spec.reference].run(PendingImage(spec, buffer, call, permit))
            call.timing.lap("infer")
        return result

    async def _infer(  # noqa: PLR0913, PLR0917 - the parts of a request
        self, data: Source, spec: ModelSpec, question: Question[Result], reader: Reader[Result], call: CallContext, permit: Permit
    ) -> tuple[ModelSpec, Reader[Result], InferResult, ImageTransform]:
        replaced = ModelReplaced if self.on_demand is None else ModelNotReady  # it was unloaded: it is loaded again
        for _ in range(_MAX_REPLACEMENTS):
            with suppress(replaced):
                return spec, reader, *await self._attempt(data, spec, call, permit)
            reference = self.refer_to(spec.name, spec.version if call.is_pinned else None)
            spec = await self.prepare(reference, call.deadline, call.caller)
            reader = question.reader(spec)
        return spec, reader, *await self._attempt(data, spec, call, permit)

    async def _attempt(
        self, data: Source, spec: ModelSpec, call: CallContext, permit: Permit
    ) -> tuple[InferResult, ImageTransform]:
        call.timing.lap("model")
        buffer, transform = await self._fill(data, spec, call, permit)
        call.timing.lap("decode")
        # No variable may refer to the pending image: it refers to its error, whose traceback refers to this frame.
        result = await self._batchers[spec.reference].run(PendingImage(spec, buffer, call, permit))
        call.timing.lap("infer")
        return result, transform

    async def _fill(self, data: Source, spec: ModelSpec, call: CallContext, permit: Permit) -> tuple[InputBuffer, ImageTransform]:
        if isinstance(data, Patch):
            draw = partial(preprocess.fill_from_patch, data, spec, self._workspace, call, permit)
            leases = [permit] if data.memory is None else [permit, data.memory]
            return await self.threads.run(draw, call.deadline, *leases, turn=call.turn(spec.input_size[0] * spec.input_size[1]))
        takes_file = spec.input_format is InputFormat.FILE
        # Finding the size takes microseconds, reading the whole header may take milliseconds.
        pixels = 0 if takes_file else count_pixels(data, self.limits.pixels)
        fill = partial(preprocess.fill_input, data, pixels, spec, self._workspace, call, permit)
        if takes_file and preprocess.is_quick_to_check(data):
            return fill()
        with self.admission.decode_backlog.add(pixels, call.deadline, call.caller) as counted:
            is_slow = not takes_file and is_decoded_apart(data)  # a second or more, even if it is small
            cost = pixels + LARGE_PIXELS if is_slow else pixels
            return await self.threads.run(fill, call.deadline, permit, counted, turn=call.turn(cost))

    async def _read(
        self, read: Callable[[], T], reader: Reader[Any], transform: ImageTransform, call: CallContext, lease: Lease
    ) -> T:
        if reader.is_heavy:
            drawn = transform.image_width * transform.image_height if reader.pixel_bytes else 0

            def read_in_thread() -> T:
                with self.admission.memory.reserve(call.caller) as memory:
                    memory.add(reader.pixel_bytes * drawn)
                    return read()

            return await self.threads.run(read_in_thread, call.deadline, lease, turn=call.turn(drawn))
        return read()

    async def close(self) -> None:
        """Wait for images that are being decoded, and for calls that requests have abandoned."""
        self.threads.close()
        self.apart_threads.close()
        await self._batchers.close(max(self.limits.timeout_seconds, self.limits.max_timeout_seconds))
