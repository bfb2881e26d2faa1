"""Detect objects in the images of a batch request; each image succeeds or fails on its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from app.errors import DeadlinePassed, GatewayError, GatewayFull
from app.model.spec import InputFormat
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.remote.address import ImageAddress
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.memory import Reservation
from app.resilience.model_queue import Permit
from app.telemetry.timing import FETCH, Timing

# Delay before another attempt with an image for which the gateway was full.
_PAUSE_SECONDS = 0.05

T = TypeVar("T")

Image = bytes | str | ImageAddress | GatewayError
"""An encoded image, its URL (unparsed or parsed), or the error that occurred instead."""
Report = Callable[[int, Detections | Exception, Timing], Awaitable[T]]
"""Called with the index of an image, its detections or its error, and the durations of its stages; again if it fails itself."""


class BatchRequest:
    """Detects objects in the images of one request concurrently."""

    def __init__(  # noqa: PLR0913, PLR0917 - see `open`
        self, pipeline: Pipeline, model: str, options: DetectOptions, call: CallContext, images: list[Image], memory: Lease
    ) -> None:
        self.url_hosts: list[str] = []
        """Host names of the URLs that have been or are being fetched."""
        self._pipeline = pipeline
        self._model = model
        self._options = options
        self._call = call
        self._images = images
        self._memory = memory
        """Holds the memory of the encoded images in the request's body."""
        self._choice = pipeline.choose_of_route(options, call)

    @classmethod
    async def open(cls, pipeline: Pipeline, images: list[Image], options: DetectOptions, call: CallContext) -> "BatchRequest":
        """Reserve memory for the images and check the options. Call `run` afterwards, which releases the memory.

        There is at least one image. `run` empties the list, so that each image can be freed when it is done.

        Raises:
            GatewayFull: There is not enough memory for the images now, or the batch would miss its deadline.
            GatewayError: The model cannot be used, or the options do not fit it.
        """
        model, call = pipeline.choose(options.model or pipeline.default_for(options.task), options.version, call)
        pipeline.check_circuit(model)
        memory, use = Lease(), ExitStack()
        memory.on_release(use.close)
        try:
            use.enter_context(pipeline.using(model))
            nbytes = sum(len(image) for image in images if isinstance(image, bytes | str))
            reservation = pipeline.admission.reserve_for_batch(call.caller, "the images of this batch")
            memory.on_release(reservation.release)
            reservation.add(nbytes)
            spec = await pipeline.prepare(model, call.deadline, call.caller)
            options.reader(spec)  # rejects invalid options before anything is processed
            pipeline.batch_queue(spec, call.caller).check(len(images), call.deadline.remaining)
            return cls(pipeline, model, options, call, images, memory)
        except BaseException:
            memory.release()
            raise

    @asynccontextmanager
    async def run(self, report: Report[T]) -> AsyncIterator[Iterator[Awaitable[T]]]:
        """Process the images; those that are not done at the end of the `with` block are abandoned.

        Yields:
            The return values of `report`, in order of completion.
        """
        with self._memory:
            tasks = [asyncio.create_task(self._detect(index, image, report)) for index, image in enumerate(self._images)]
            self._images.clear()
            for task in tasks:
                self._memory.keep_for(task)
        try:
            yield asyncio.as_completed(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _detect(self, index: int, image: Image, report: Report[T]) -> T:
        timing = Timing()
        if isinstance(image, GatewayError):
            return await report(index, image, timing)
        request_id = f"{self._call.request_id}-{index}"
        call = self._call._replace(timing=timing, request_id=request_id, is_batch=True)
        # No variable may refer to an error: its traceback refers to this frame and to frames with the image.
        try:
            found = await (self._try(image, call, self._memory) if isinstance(image, bytes) else self._fetch(image, call))
            return await report(index, found, timing)
        except Exception as error:  # noqa: BLE001 - `report` logs unexpected errors
            return await report(index, error, timing)

    async def _fetch(self, image: str | ImageAddress, call: CallContext) -> Detections:
        """Fetch an image and detect objects in it, in a slot for batches, so that few fetched images wait for detection."""
        fetcher = self._pipeline.fetcher
        address = fetcher.parse(image) if isinstance(image, str) else image
        if address.name not in self.url_hosts:
            self.url_hosts.append(address.name)
        with Lease() as memory:
            try:
                async with asyncio.timeout(call.deadline.remaining):
                    await fetcher.batch_slots.acquire()
            except TimeoutError:
                raise DeadlinePassed("the images before it took too long") from None
            memory.on_release(fetcher.batch_slots.release)
            reservation = self._pipeline.admission.reserve_for_batch(call.caller, "an image of this size")
            memory.on_release(reservation.release)
            call.timing.begin(FETCH)
            content = await _retry(Download(fetcher, address, reservation, call.deadline).attempt, call.deadline)
            call.timing.lap(FETCH)
            return await self._try(content, call, memory)

    async def _try(self, image: bytes, call: CallContext, memory: Lease) -> Detections:
        """Detect objects in an image whose memory the lease holds; retry while the gateway is full."""
        return await _retry(partial(self._detect_in_turn, image, call, memory), call.deadline)

    async def _detect_in_turn(self, image: bytes, call: CallContext, memory: Lease) -> Detections:
        if self._choice is None:
            return await self._answer(image, memory, self._model, call)
        return await self._choice.run(image, self._options, call, partial(self._answer, image, memory))

    async def _answer(self, image: bytes, memory: Lease, model: str, call: CallContext) -> Detections:
        """Answer by a model, which a route may have chosen instead of that of the request."""
        pipeline = self._pipeline
        pipeline.check_circuit(model)
        with pipeline.using(model):
            spec = await pipeline.prepare(model, call.deadline, call.caller)

            async def admit() -> Permit:
                permit = await pipeline.batch_queue(spec, call.caller).admit(call.deadline)
                with ExitStack() as failed:
                    failed.callback(permit.release)
                    memory.keep_until_release(permit)  # then no thread and no Triton uses the image any more
                    if spec.input_format is not InputFormat.FILE:
                        tensor = pipeline.admission.memory.reserve(call.caller)
                        permit.on_release(tensor.release)
                        tensor.add(spec.image_bytes)
                    failed.pop_all()
                return permit

            return await pipeline.answer(image, spec, self._options, self._options.reader(spec), call, admit)


class Download:
    """Fetches an image in several attempts, if there is not enough memory for its bytes.

    Before another request to the host, the attempt reserves twice the bytes received so far. This limits the number of requests.
    """

    def __init__(self, fetcher: Fetcher, address: ImageAddress, memory: Reservation, deadline: Deadline) -> None:
        """Start with an empty reservation."""
        self._fetcher = fetcher
        self._address = address
        self._memory = memory
        self._deadline = deadline
        self._needed = self._received = 0

    async def attempt(self) -> bytes:
        """Fetch the image.

        Raises:
            GatewayFull: There is not enough memory now; the memory reserved so far is released.
            GatewayError: See `Fetcher.fetch`.
        """
        self._received = 0
        try:
            self._memory.add(self._needed)
            image = await self._fetcher.fetch(self._address, self._count, self._deadline)
        except BaseException:
            self._memory.keep(0)
            self._needed = max(self._needed, 2 * self._received)
            raise
        self._memory.keep(len(image))
        return image

    def _count(self, nbytes: int) -> None:
        self._received += nbytes
        if self._received > self._needed:
            self._memory.add(min(nbytes, self._received - self._needed))


async def _retry(attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
    """Retry while the gateway is full, until shortly before the deadline."""
    while True:
        try:
            return await attempt()
        except GatewayFull:
            if deadline.remaining < _PAUSE_SECONDS:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
