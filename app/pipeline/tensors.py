"""Run a model on an input tensor that a caller has prepared, or a text; both are admitted, batched and retried as images are."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from app.embedding.outputs import decode_vector, to_unit
from app.errors import MalformedRequest, UnsupportedModel
from app.model.heads import EmbeddingHead
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext
from app.pipeline.pipeline import Pipeline
from app.pipeline.probe import file_input
from app.pipeline.results import Embedding
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from app.triton.status import ModelReplaced

Declared = tuple[str, str, tuple[int, ...]]
"""Name, datatype and shape of a tensor."""
Read = Callable[[np.dtype[np.generic], int], Awaitable[NDArray[np.generic]]]
"""Reads the elements of a tensor, as many of this type."""
T = TypeVar("T")


async def run_tensor(  # noqa: PLR0913, PLR0917 - the parts of a request
    pipeline: Pipeline, model: str, version: int | None, declared: Declared, read: Read, call: CallContext
) -> tuple[ModelSpec, InferResult]:
    """Run the inference of a tensor of one or several images, which is read once name, datatype and shape are checked."""

    async def ask(spec: ModelSpec, own_call: CallContext) -> tuple[ModelSpec, InferResult]:
        count = _count_images(spec, declared)
        elements = await read(np.dtype(spec.dtype), count * math.prod(spec.image_shape))
        return spec, await _run_images(pipeline, spec, elements.reshape(count, *spec.image_shape), own_call)

    return await _ask(pipeline, model, version, call, ask)


async def run_text(pipeline: Pipeline, model: str, version: int | None, text: bytes, call: CallContext) -> Embedding:
    """Ask a model whose input is one text, of type BYTES and in UTF-8, for the vector that describes it."""

    async def ask(spec: ModelSpec, own_call: CallContext) -> Embedding:
        spec.expect_head(EmbeddingHead)
        if spec.dtype is not None:
            raise UnsupportedModel(f"{spec.name} takes no text: its input is no tensor of type BYTES")
        result = await pipeline.run_tensor(file_input(text), spec, own_call)
        return Embedding(*to_unit(decode_vector(spec, result.outputs)), 0, 0, spec, result.version)

    return await _ask(pipeline, model, version, call, ask)


async def _ask(
    pipeline: Pipeline, model: str, version: int | None, call: CallContext, ask: Callable[[ModelSpec, CallContext], Awaitable[T]]
) -> T:

    async def attempt() -> T:
        reference, own_call = pipeline.choose(model, version, call)
        pipeline.check_circuit(reference)
        with pipeline.using(reference):
            return await ask(await pipeline.prepare(reference, call.deadline, call.caller), own_call)

    with suppress(ModelReplaced):
        return await attempt()
    return await attempt()


def _count_images(spec: ModelSpec, declared: Declared) -> int:
    count = declared[2][0] if spec.has_batch_dimension else 1
    if count > spec.max_batch or declared != (spec.input_name, spec.datatype, spec.batch_shape(count)):
        batch = [f"1 to {spec.max_batch}"] if spec.has_batch_dimension else []
        expected = ", ".join([*batch, *map(str, spec.image_shape)])
        raise MalformedRequest(f"the input of {spec.name} is {spec.input_name}, {spec.datatype}, of shape [{expected}]")
    return count


async def _run_images(pipeline: Pipeline, spec: ModelSpec, images: NDArray[np.generic], call: CallContext) -> InferResult:
    if len(images) == 1:
        return await pipeline.run_tensor(images[0], spec, call)
    calls = [call._replace(timing=Timing(), is_batch=True) for _ in images]
    tasks = [asyncio.create_task(pipeline.run_tensor(image, spec, own)) for image, own in zip(images, calls, strict=True)]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    call.timing.lap("infer")
    try:
        outputs = {name: np.concatenate([result.outputs[name] for result in results]) for name in results[0].outputs}
    except ValueError as error:
        raise MalformedRequest("the outputs for these images differ in shape; send one image per request") from error
    return InferResult(outputs, results[0].version)
