"""Answer a question about an encoded image: the steps of a request, joined."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from time import thread_time
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

from app.errors import CircuitOpen, DeadlinePassed, InvalidParameter, UnknownModel
from app.imaging.header import PixelLimits, count_pixels
from app.imaging.transform import ImageTransform
from app.model.heads import Task
from app.model.reference import refer_to, split_reference
from app.model.spec import InputFormat, ModelSpec
from app.pipeline import saturation
from app.pipeline.call import CallContext, Question, Reader, Result, trivial_question
from app.pipeline.decode_threads import DecodeThreads
from app.pipeline.inference import InferenceRunner
from app.pipeline.preprocess import Workspace, fill_input, is_quick_to_check
from app.pipeline.probe import BLANK_IMAGE
from app.pipeline.triton_calls import TritonCalls
from app.remote.fetcher import Fetcher
from app.resilience.admission import Admission
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.model_queue import Permit
from app.resilience.semaphore import DeadlineSemaphore
from app.telemetry.timing import Timing
from app.triton.status import ModelReplaced
from app.triton.transport import InputBuffer

# How often a request is begun anew because its model has been replaced.
_MAX_REPLACEMENTS = 2

T = TypeVar("T")


class Models(NamedTuple):
    """The names of models that the settings tell."""

    default: str
    """The model whose state is that of the gateway."""
    by_task: Mapping[Task, str] = MappingProxyType({})
    """Default models of tasks that have another one."""
    pullable: frozenset[str] = frozenset()
    """Models that `pull` could get."""


class Limits(NamedTuple):
    """What one worker allows itself and its callers."""

    decode_threads: int
    pixels: PixelLimits
    """Maximum sizes of images, checked in their headers."""
    timeout_seconds: float
    """Time from the end of a request's body to its response."""
    max_timeout_seconds: float
    """The same at most, if the caller sets it."""

    def timeout(self, timeout_ms: int | None) -> float:
        """Return the time that a request has from the end of its body to its response, seconds.

        Args:
            timeout_ms: What the caller asks for; None for the default.

        Raises:
            InvalidParameter: That is too long.
        """
        if timeout_ms is None:
            return self.timeout_seconds
        if timeout_ms > self.max_timeout_seconds * 1e3:
            raise InvalidParameter(f"timeout_ms: the maximum is {self.max_timeout_seconds * 1e3:g}")
        return timeout_ms / 1e3


class Pipeline:
    """Joins the steps of a request. Each worker has one. Its methods take references of models, unless they say names."""

    def __init__(
        self, calls: TritonCalls, admission: Admission, models: Models, limits: Limits, fetcher: Fetcher | None = None
    ) -> None:
        """Join what a worker has.

        Args:
            calls: To the Tritons.
            admission: Of requests, counted for the whole host.
            models: Which models requests get that name none, and which could be pulled.
            limits: What requests may take.
            fetcher: Fetches images that requests name by their address; None for one without special rights.
        """
        self.admission = admission
        self.fetcher = fetcher or Fetcher()
        self.limits = limits
        self.tritons = calls.pool
        self.default_model, self._task_models, self.pullable = models
        self._default_names = {self.default_model, *self._task_models.values()}
        self._transport = calls.pool.transport
        self._workspace = Workspace(limits.pixels, admission.memory, self._transport)
        self._metrics = calls.metrics
        self._threads = DecodeThreads(limits.decode_threads)
        self._apart_threads = DecodeThreads(1)
        self.batch_semaphore = DeadlineSemaphore(2 * limits.decode_threads)
        """For `CallContext.semaphore`: as many images of batches as keep the threads busy."""
        self._inferences = InferenceRunner(calls)

    @property
    def transport_mode(self) -> Literal["shm", "inline"]:
        """How tensors reach Triton now."""
        return self._transport.active_mode

    def default_for(self, task: Task) -> str:
        """Return the model that is used when a request for this task names none."""
        return self._task_models.get(task, self.default_model)

    def refer_to(self, name: str, version: int | str | None) -> str:
        """Refer to a version of a model: by the name alone if it is the newest, as far as is known."""
        return refer_to(name, version if version and self.tritons.newest(name) != str(version) else None)

    def check_circuit(self, model: str) -> None:
        """Reject a request for a model while Triton is known not to run it.

        Raises:
            CircuitOpen: The circuit of the model is open, at each Triton that has it.
        """
        if not self.is_usable(model):
            raise CircuitOpen("Triton failed repeatedly with this model, and has not recovered yet")

    def is_usable(self, model: str) -> bool:
        """Return whether any Triton runs a model, as far as is known."""
        return self.tritons.is_usable(model)

    def is_known(self, model: str) -> bool:
        """Return whether this is the name of a model, in any version, and not just a word of the caller's."""
        return model in self._default_names or model in self.pullable or self.tritons.has_had(model)

    async def run_in_thread(self, work: Callable[[], T], deadline: Deadline, lease: Lease) -> T:
        """Run something that would block the event loop, such as parsing a large body, where images are decoded.

        The lease is kept until the work has ended, which may be later than this call.

        Raises:
            DeadlinePassed: It took too long.
        """
        return await self._threads.run(work, deadline, lease)

    async def run_apart(self, work: Callable[[], T], deadline: Deadline, lease: Lease) -> T:
        """Do the same in a thread for work of which nobody knows whose it is, so that no other request waits for it."""
        return await self._apart_threads.run(work, deadline, lease)

    def cached(self, model: str) -> ModelSpec | None:
        """Return the spec of a model if Triton need not be asked."""
        return self.tritons.cached(model)

    async def spec(self, model: str) -> ModelSpec:
        """Return what is known of a model.

        Raises:
            GatewayError: There is no such model, or it cannot be used.
        """
        try:
            return await self.tritons.spec(model)
        except UnknownModel as error:
            name, detail = split_reference(model)[0], ""
            if name in self._default_names:
                detail = f", a default model of the settings; it has {', '.join(error.models) or 'none that is ready'}"
            if name in self.pullable:
                detail += f"; get it with `nereid pull {name}` or `./just pull {name}`, then restart Triton"
            raise UnknownModel(f"Triton does not have {name}{detail}" if detail else error.detail) from None

    async def prepare(self, model: str, deadline: Deadline) -> ModelSpec:
        """Return a model's spec, and have slots for its images.

        Raises:
            GatewayError: There is no such model, or it cannot be used.
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
        """Let the metrics show what is in use now; to be called about once a second."""
        saturation.sample(self._metrics, self.admission, self.tritons, self._threads, self._inferences.batchers)

    async def refresh(self) -> None:
        """Keep up with the Tritons that there are; to be called about once a second."""
        self.admission.refresh()
        await self.tritons.refresh()
        await self._transport.refresh()
        self._inferences.send()

    async def warm_up(self) -> None:
        """Run one inference with the default model, so that its speed is known before the first request.

        Raises:
            GatewayError: It failed.
        """
        call = CallContext(Deadline.after(self.limits.timeout_seconds), Timing(), "warm-up")
        spec = await self.prepare(self.default_model, call.deadline)
        await self.run(BLANK_IMAGE, trivial_question(spec), call)

    async def run(self, data: bytes, question: Question[Result], call: CallContext) -> Result:
        """Answer a question about one image.

        Args:
            data: The encoded image.
            question: What the caller asks.
            call: What goes with the request.

        Raises:
            GatewayError: As the steps say; DeadlinePassed if they take too long together.
        """
        model = self.refer_to(question.model or self.default_for(question.task), question.version)
        self.check_circuit(model)
        call = call.pinned_to(question.version)
        memory = self.admission.memory.reserve()
        try:
            memory.add(len(data))
            spec = await self.prepare(model, call.deadline)
            question.reader(spec)  # is rejected early if the model does not have what is asked for
            if spec.input_format is not InputFormat.FILE:
                memory.add(spec.image_bytes)
            permit = await self.admission.admit(
                spec.reference, self.tritons.parallel_images(spec), memory, call.deadline, call.share
            )
        except BaseException:
            memory.release()
            raise
        with permit:
            return await self.process(data, spec, question, call, permit)

    async def process(self, data: bytes, spec: ModelSpec, question: Question[Result], call: CallContext, permit: Permit) -> Result:
        """Answer a question about an image that has been admitted; anew if the model is replaced meanwhile.

        Args:
            data: The encoded image.
            spec: Spec of the model.
            question: What the caller asks.
            call: What goes with the request.
            permit: Admits it to the model.

        Raises:
            GatewayError: As the steps say; DeadlinePassed, which names the step, if they take too long together.
        """
        for _ in range(_MAX_REPLACEMENTS):
            with suppress(ModelReplaced):
                return await self._process(data, spec, question.reader(spec), call, permit)
            reference = self.refer_to(spec.name, spec.version if call.is_pinned else None)
            spec = await self.prepare(reference, call.deadline)
        return await self._process(data, spec, question.reader(spec), call, permit)

    async def _process(self, data: bytes, spec: ModelSpec, reader: Reader[Result], call: CallContext, permit: Permit) -> Result:
        timing = call.timing
        timing.lap("model")
        async with call.semaphore.take(call.deadline) if call.semaphore else nullcontext():
            buffer, transform = await self._fill(data, spec, call, permit)
        timing.lap("decode")
        result = await self._inferences.run(spec, buffer, call, permit)
        timing.lap("infer")
        reading = partial(reader.read, result, transform)
        answer = await self._threads.run(reading, call.deadline, permit) if reader.is_heavy else reading()
        timing.lap("post")
        return answer

    async def close(self) -> None:
        """Wait for images that are being decoded, and for abandoned inferences."""
        self._threads.close()
        self._apart_threads.close()
        await self._inferences.close(max(self.limits.timeout_seconds, self.limits.max_timeout_seconds))

    async def _fill(self, data: bytes, spec: ModelSpec, call: CallContext, permit: Permit) -> tuple[InputBuffer, ImageTransform]:
        """Fill the input tensor, in a thread unless that takes next to no time.

        What large images will take is known before they wait for a thread, from a glance of a few microseconds. The header
        itself, which may take milliseconds, is read in the thread.
        """
        pixels = 0 if spec.input_format is InputFormat.FILE else count_pixels(data, self.limits.pixels)
        backlog = self.admission.decode_backlog

        def fill() -> tuple[InputBuffer, ImageTransform]:
            call.timing.lap("queue")
            start = thread_time()
            filled = fill_input(data, spec, self._workspace, permit)
            backlog.measure(pixels, thread_time() - start)
            return filled

        if spec.input_format is InputFormat.FILE and is_quick_to_check(data):
            return fill()
        with backlog.add(pixels, call.deadline) as counted:
            return await self._threads.run(fill, call.deadline, permit, counted)
