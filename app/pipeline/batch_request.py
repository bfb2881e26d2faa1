"""Detect objects in several images of one request: each image succeeds or fails alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from app.errors import GatewayError, GatewayFull
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.call import CallContext, Detections, DetectOptions
from app.pipeline.download import Download
from app.pipeline.pipeline import Pipeline
from app.remote.address import ImageAddress
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.model_queue import Permit
from app.telemetry.timing import FETCH, Timing

# After which an image is tried again for which there was no room.
_PAUSE_SECONDS = 0.05

T = TypeVar("T")

Image = bytes | str | ImageAddress | GatewayError
"""An encoded image, its address, as the caller wrote it or as a trusted origin has parsed it, or why there is none."""
Report = Callable[[int, Detections | Exception, Timing], T]
"""Gets the place of an image, what was found or why it failed, and how long its stages took; may not raise."""


class BatchRequest:
    """The images of one request, which are detected side by side, each in its turn."""

    def __init__(  # noqa: PLR0913, PLR0917 - what they have in common, and they themselves
        self, pipeline: Pipeline, spec: ModelSpec, options: DetectOptions, call: CallContext, images: list[Image], memory: Lease
    ) -> None:
        self.url_hosts: list[str] = []
        """Names of the hosts from which images were to be fetched."""
        self._pipeline = pipeline
        self._spec = spec
        self._options = options
        self._call = call
        self._queue = pipeline.admission.batch_queue(spec.reference, pipeline.tritons.parallel_images(spec), call.share)
        self._images = images
        self._memory = memory
        """Of the encoded images that came with the request."""

    @classmethod
    async def open(cls, pipeline: Pipeline, images: list[Image], options: DetectOptions, call: CallContext) -> "BatchRequest":
        """Count the memory of the images, and check what they have in common; to be followed by `run`, which gives it back.

        Args:
            pipeline: Detects objects in each of them.
            images: At least one. `run` empties the list, so that the memory of an image is free once it is done.
            options: What to look for.
            call: What goes with the request.

        Raises:
            GatewayFull: There is no memory for the images now.
            GatewayError: The model cannot be used, or does not have these classes.
        """
        model = pipeline.refer_to(options.model or pipeline.default_for(options.task), options.version)
        pipeline.check_circuit(model)
        memory = Lease()
        try:
            nbytes = sum(len(image) for image in images if isinstance(image, bytes | str))
            reservation = pipeline.admission.reserve_for_batch("the images of this batch")
            memory.on_release(reservation.release)
            reservation.add(nbytes)
            spec = await pipeline.prepare(model, call.deadline)
            options.reader(spec)  # is rejected early if the model does not have what is asked for
            return cls(pipeline, spec, options, call.pinned_to(options.version), images, memory)
        except BaseException:
            memory.release()
            raise

    @asynccontextmanager
    async def run(self, report: Report[T]) -> AsyncIterator[Iterator[Awaitable[T]]]:
        """Begin; images that are not done at the end of the block are abandoned.

        Args:
            report: Called for each image when it is done.

        Yields:
            What `report` returns, in the order in which the images are done.

        Raises:
            GatewayFull: There is no room for the whole batch now.
        """
        with self._memory:
            self._queue.check(len(self._images), self._call.deadline.remaining)
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
            return report(index, image, timing)
        request_id = f"{self._call.request_id}-{index}"
        call = self._call._replace(timing=timing, request_id=request_id, semaphore=self._pipeline.batch_semaphore)
        # No variable may refer to an error: its traceback refers to this frame, and to others with the image.
        try:
            found = await (self._try(image, call, self._memory) if isinstance(image, bytes) else self._fetch(image, call))
        except Exception as error:  # noqa: BLE001 - `report` logs those that are unexpected
            return report(index, error, timing)
        return report(index, found, timing)

    async def _fetch(self, image: str | ImageAddress, call: CallContext) -> Detections:
        """Fetch an image in its turn, which lasts until it is done, so that few images are fetched ahead of their detection."""
        fetcher = self._pipeline.fetcher
        address = fetcher.parse(image) if isinstance(image, str) else image
        if address.name not in self.url_hosts:
            self.url_hosts.append(address.name)
        with Lease() as memory:
            await fetcher.batch_semaphore.acquire(call.deadline)
            memory.on_release(fetcher.batch_semaphore.release)
            reservation = self._pipeline.admission.reserve_for_batch("an image of this size")
            memory.on_release(reservation.release)
            call.timing.begin(FETCH)
            content = await _retry(Download(fetcher, address, reservation, call.deadline).attempt, call.deadline)
            call.timing.lap(FETCH)
            return await self._try(content, call, memory)

    async def _try(self, image: bytes, call: CallContext, memory: Lease) -> Detections:
        """Detect objects in an image, whose bytes are counted by a lease, as soon as there is room for it."""
        return await _retry(partial(self._detect_in_turn, image, call, memory), call.deadline)

    async def _detect_in_turn(self, image: bytes, call: CallContext, memory: Lease) -> Detections:
        with await self._queue.admit(call.deadline) as permit:
            _keep(memory, permit)
            if self._spec.input_format is not InputFormat.FILE:
                tensor = self._pipeline.admission.memory.reserve()
                tensor.add(self._spec.image_bytes)
                permit.on_release(tensor.release)
            return await self._pipeline.process(image, self._spec, self._options, call, permit)


def _keep(memory: Lease, permit: Permit) -> None:
    """Count memory as long as a thread or Triton may use an image in it."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    memory.keep_for(ended)
    permit.on_release(partial(ended.set_result, None))


async def _retry(attempt: Callable[[], Awaitable[T]], deadline: Deadline) -> T:
    """Try until there is memory for an image, and not too much to decode or to fetch before it."""
    while True:
        try:
            return await attempt()
        except GatewayFull:
            if deadline.remaining < _PAUSE_SECONDS:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
