"""Ask about the images of a batch request; each image succeeds or fails on its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from app.errors import DeadlinePassed, GatewayError, GatewayFull
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, Question
from app.pipeline.hooks import Choice
from app.pipeline.pipeline import Pipeline
from app.remote.address import ImageAddress
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.memory import Reservation
from app.telemetry.timing import FETCH, Timing

# Delay before another attempt with an image for which the gateway was full.
_PAUSE_SECONDS = 0.05

R = TypeVar("R")
T = TypeVar("T")

Image = bytes | str | GatewayError
"""An encoded image, its URL, or the error that occurred instead."""
Ask = Callable[[bytes, CallContext, Lease], Awaitable[R]]
"""Answers about an image, whose memory the lease holds as long as whatever is bound to it reads the image."""
Report = Callable[[int, R | Exception, Timing], Awaitable[T]]
"""Called with the index of an image, its answer or its error, and the durations of its stages; again if it fails itself."""


class BatchRequest(Generic[R]):
    """Asks about the images of one request concurrently."""

    def __init__(  # noqa: PLR0913, PLR0917 - see `open_with`
        self,
        pipeline: Pipeline,
        images: list[Image],
        ask: Ask[R],
        call: CallContext,
        memory: Lease,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self.url_hosts: list[str] = []
        """Host names of the URLs that have been or are being fetched."""
        self._pipeline = pipeline
        self._images = images
        self._ask = ask
        self._call = call
        self._memory = memory
        """Holds the memory of the encoded images in the request's body."""
        self._slots = slots

    @classmethod
    async def open(cls, pipeline: Pipeline, images: list[Image], options: Question[R], call: CallContext) -> "BatchRequest[R]":
        """Open a batch whose images one model is asked about; as `open_with`."""
        model, call = pipeline.choose(options.model or pipeline.default_for(options.task), options.version, call)
        choice: Choice | None = None

        async def ask(image: bytes, own_call: CallContext, memory: Lease) -> R:
            def answer(name: str, attempt: CallContext) -> Awaitable[R]:
                return pipeline.run_model(name, image, options, attempt, memory)

            return await (answer(model, own_call) if choice is None else choice.run(image, options, own_call, answer))

        batch = await cls.open_with(pipeline, images, model, ask, call, check=options.reader)
        choice = pipeline.choose_of_route(options, call)  # of a batch that is not rejected
        return batch

    @classmethod
    async def open_with(  # noqa: PLR0913 - the parts of a batch
        cls,
        pipeline: Pipeline,
        images: list[Image],
        model: str,
        ask: Ask[R],
        call: CallContext,
        *,
        check: Callable[[ModelSpec], object] = lambda _: None,
        slots: asyncio.Semaphore | None = None,
    ) -> "BatchRequest[R]":
        """Reserve memory for the images, of which there is at least one, and check that `model`, which is asked first, can be used.

        Call `run` afterwards, which empties the list and releases the memory. `ask` is called again while the gateway is full.
        `check` raises what would be the error of each image. `slots` limit the images under way if their permits do not.
        """
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
            check(spec)
            pipeline.batch_queue(spec, call.caller).check(len(images), call.deadline.remaining)
            return cls(pipeline, images, ask, call, memory, slots)
        except BaseException:
            memory.release()
            raise

    @asynccontextmanager
    async def run(self, report: Report[R, T]) -> AsyncIterator[Iterator[Awaitable[T]]]:
        """Yield what `report` returns, in order of completion; what is not done at the end of the `with` block is abandoned."""
        with self._memory:
            tasks = [asyncio.create_task(self._ask_about(index, image, report)) for index, image in enumerate(self._images)]
            self._images.clear()
            for task in tasks:
                self._memory.keep_for(task)
        try:
            yield asyncio.as_completed(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask_about(self, index: int, image: Image, report: Report[R, T]) -> T:
        timing = Timing()
        if isinstance(image, GatewayError):
            return await report(index, image, timing)
        request_id = f"{self._call.request_id}-{index}"
        call = self._call._replace(timing=timing, request_id=request_id, is_batch=True, image_index=index)
        # No variable may refer to an error: its traceback refers to this frame and to frames with the image.
        try:
            found = await (self._try(image, call, self._memory) if isinstance(image, bytes) else self._fetch(image, call))
            return await report(index, found, timing)
        except Exception as error:  # noqa: BLE001 - `report` logs unexpected errors
            return await report(index, error, timing)

    async def _fetch(self, image: str, call: CallContext) -> R:
        """Fetch an image and ask about it, in a slot for batches, so that few fetched images wait for their turn."""
        fetcher = self._pipeline.fetcher
        address = fetcher.parse(image)
        if address.name not in self.url_hosts:
            self.url_hosts.append(address.name)
        with Lease() as memory:
            await _take(fetcher.batch_slots, memory, call.deadline)
            reservation = self._pipeline.admission.reserve_for_batch(call.caller, "an image of this size")
            memory.on_release(reservation.release)
            call.timing.begin(FETCH)
            content = await _retry(Download(fetcher, address, reservation, call.deadline).attempt, call.deadline)
            call.timing.lap(FETCH)
            return await self._try(content, call, memory)

    async def _try(self, image: bytes, call: CallContext, memory: Lease) -> R:
        with Lease() as slot:
            if self._slots is not None:
                await _take(self._slots, slot, call.deadline)
            return await _retry(partial(self._ask, image, call, memory), call.deadline)


class Download:
    """Fetches an image in several attempts, each of which first reserves twice the bytes that were received so far."""

    def __init__(self, fetcher: Fetcher, address: ImageAddress, memory: Reservation, deadline: Deadline) -> None:
        self._fetcher = fetcher
        self._address = address
        self._memory = memory
        self._deadline = deadline
        self._needed = self._received = 0

    async def attempt(self) -> bytes:
        """Fetch the image; if this raises `GatewayFull`, another attempt may succeed."""
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


async def _take(slots: asyncio.Semaphore, lease: Lease, deadline: Deadline) -> None:
    try:
        async with asyncio.timeout(deadline.remaining):
            await slots.acquire()
    except TimeoutError:
        raise DeadlinePassed("the images before it took too long") from None
    lease.on_release(slots.release)


async def _retry(attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
    while True:
        try:
            return await attempt()
        except GatewayFull:
            if deadline.remaining < _PAUSE_SECONDS:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
