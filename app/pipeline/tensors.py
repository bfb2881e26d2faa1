"""Run a model on an input tensor that a caller has prepared; its images are admitted, batched and retried as others are."""

import asyncio
import math
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.errors import MalformedRequest
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.telemetry.timing import Timing
from app.triton.messages import InferResult


class TensorRequest(NamedTuple):
    """The inference of an input tensor of one or several images, which has not been read yet."""

    pipeline: Pipeline
    spec: ModelSpec
    images: int
    call: CallContext

    @classmethod
    async def open(
        cls, pipeline: Pipeline, model: str, version: int | None, tensor: tuple[str, str, list[int]], call: CallContext
    ) -> "TensorRequest":
        """Check name, datatype and shape of a tensor; raise MalformedRequest unless they are those of the model's input."""
        name, datatype, shape = tensor
        reference, call = pipeline.choose(model, version, call)
        pipeline.check_circuit(reference)
        spec = await pipeline.prepare(reference, call.deadline)
        images = shape[0] if spec.has_batch_dimension else 1
        if (
            (name, datatype) != (spec.input_name, spec.datatype)
            or images > spec.max_batch
            or tuple(shape) != spec.batch_shape(images)
        ):
            batch = [f"1 to {spec.max_batch}"] if spec.has_batch_dimension else []
            expected = ", ".join([*batch, *map(str, spec.image_shape)])
            raise MalformedRequest(f"the input of {spec.name} is {spec.input_name}, {spec.datatype}, of shape [{expected}]")
        return cls(pipeline, spec, images, call)

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return self.images * math.prod(self.spec.image_shape)

    async def run(self, elements: NDArray[np.generic]) -> InferResult:
        """Run the inference of a tensor with these elements (n,); errors are those of `Pipeline.run`."""
        call, tensors = self.call, elements.reshape(self.images, *self.spec.image_shape)
        if self.images == 1:
            return await self._run_image(tensors[0], call)
        calls = [call._replace(timing=Timing(), is_batch=True) for _ in tensors]
        tasks = [asyncio.create_task(self._run_image(tensor, own)) for tensor, own in zip(tensors, calls, strict=True)]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        call.timing.lap("infer")
        outputs = {name: np.concatenate([result.outputs[name] for result in results]) for name in results[0].outputs}
        return InferResult(outputs, results[0].version)

    async def _run_image(self, tensor: NDArray[np.generic], call: CallContext) -> InferResult:
        admission, spec = self.pipeline.admission, self.spec
        parallel = self.pipeline.tritons.parallel_images(spec)
        with ExitStack() as stack:
            memory = stack.enter_context(admission.memory.reserve(call.caller))
            memory.add(spec.image_bytes)
            if call.is_batch:
                permit = await admission.batch_queue(spec.name, parallel, call.caller).admit(call.deadline)
                permit.on_release(memory.release)
            else:
                permit = await admission.admit(spec.name, parallel, memory, call.deadline, call.caller)
            stack.pop_all()  # the permit releases the memory
        with permit:
            return await self.pipeline.run_tensor(tensor, spec, call, permit)
