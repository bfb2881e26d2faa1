"""Run a model on an input tensor that a caller has prepared; admission, batches and retries are those of images."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from app.errors import MalformedRequest
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.resilience.model_queue import Permit
from app.telemetry.timing import Timing
from app.triton.messages import InferResult


class TensorRequest:
    """The inference of one input tensor with one or several images. Images of different requests may share a call to Triton."""

    def __init__(self, pipeline: Pipeline, spec: ModelSpec, images: int, call: CallContext) -> None:
        self.spec = spec
        self._pipeline = pipeline
        self._images = images
        self._call = call
        self._parallel_images = pipeline.tritons.parallel_images(spec)
        self._queue = pipeline.admission.batch_queue(spec.name, self._parallel_images, call.caller)

    @classmethod
    async def open(  # noqa: PLR0913, PLR0917 - the parts of a tensor
        cls, pipeline: Pipeline, model: str, version: int | None, name: str, datatype: str, shape: Sequence[int], call: CallContext
    ) -> "TensorRequest":
        """Check that a tensor is the input of a model, before it is read.

        Raises:
            MalformedRequest: Name, type or shape differ from those of the input.
            GatewayError: The model cannot be used.
        """
        reference, call = pipeline.choose(model, version, call)
        pipeline.check_circuit(reference)
        spec = await pipeline.prepare(reference, call.deadline)
        images = shape[0] if spec.has_batch_dimension else 1
        if (
            (name, datatype) != (spec.input_name, spec.datatype)
            or tuple(shape) != spec.batch_shape(images)
            or images > spec.max_batch
        ):
            dims = [f"1 to {spec.max_batch}" if spec.max_batch > 1 else "1"] if spec.has_batch_dimension else []
            expected = ", ".join([*dims, *map(str, spec.image_shape)])
            raise MalformedRequest(f"the input of {spec.name} is {spec.input_name}, {spec.datatype}, of shape [{expected}]")
        return cls(pipeline, spec, images, call)

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return self._images * math.prod(self.spec.image_shape)

    async def run(self, elements: NDArray[np.generic]) -> InferResult:
        """Run the inference of a tensor with these elements (n,); errors are those of `Pipeline.run`."""
        call, tensors = self._call, elements.reshape(self._images, *self.spec.image_shape)
        if self._images == 1:
            return await self._run_image(tensors[0], call)
        self._queue.check(self._images, call.deadline.remaining)
        calls = [
            call._replace(timing=Timing(), request_id=f"{call.request_id}-{index}", is_batch=True) for index in range(self._images)
        ]
        tasks = [asyncio.create_task(self._run_image(tensor, own)) for tensor, own in zip(tensors, calls, strict=True)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            call.timing.lap("infer")
        joined = {name: np.concatenate([result.outputs[name] for result in results]) for name in results[0].outputs}
        return InferResult(joined, results[0].version)

    async def _run_image(self, tensor: NDArray[np.generic], call: CallContext) -> InferResult:
        with await self._admit(call) as permit:
            return await self._pipeline.run_tensor(tensor, self.spec, call, permit)

    async def _admit(self, call: CallContext) -> Permit:
        admission = self._pipeline.admission
        with ExitStack() as stack:
            memory = stack.enter_context(admission.memory.reserve(call.caller))
            memory.add(self.spec.image_bytes)
            if call.is_batch:
                permit = await self._queue.admit(call.deadline)
                permit.on_release(memory.release)
            else:
                permit = await admission.admit(self.spec.name, self._parallel_images, memory, call.deadline, call.caller)
            stack.pop_all()
        call.timing.lap("model")
        return permit
