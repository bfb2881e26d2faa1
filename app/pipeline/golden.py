"""The input tensor of the golden picture, and what a model has found in it."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.detection.nms import Candidates
from app.imaging.transform import ImageTransform
from app.model.golden import MAX_BOXES, MIN_SCORE, SAMPLE, Golden, picture
from app.model.heads import DetectionHead, OutputFormat
from app.model.outputs import take_outputs
from app.model.spec import ModelSpec
from app.pipeline.call import decode
from app.pipeline.preprocess import write_pixels
from app.pipeline.probe import file_input, smallest_size
from app.text.outputs import TextSteps
from app.triton.messages import InferResult

_BLOCKS = 8
_NOWHERE = ImageTransform(0, 0, 1, 1, 1, 1)


def golden_input(spec: ModelSpec) -> NDArray[Any]:
    """Make the input tensor of the golden picture."""
    pixels = picture(*smallest_size(spec))
    if spec.dtype is None:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "PNG", compress_level=1)
        return file_input(file.getvalue())
    tensor = np.empty(spec.shape_of(smallest_size(spec)), spec.dtype)
    write_pixels(pixels, spec, tensor)
    return tensor


def read_golden(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]], version: str = "") -> Golden:
    """Read what a model has found in the golden picture; raise what `decode` raises."""
    found = decode(spec, InferResult(dict(outputs), version), _NOWHERE).found
    if isinstance(found, Candidates):
        best = found.take(np.argsort(-found.scores, kind="stable")[:MAX_BOXES])
        rows = zip(best.boxes.tolist(), best.scores.tolist(), best.class_ids.tolist(), strict=True)
        boxes = tuple((*_round(box), *_round([score]), class_id) for box, score, class_id in rows if score >= MIN_SCORE)
        sample = outputs.get(SAMPLE)
        if sample is None and isinstance(spec.head, DetectionHead) and spec.head.output_format is not OutputFormat.END_TO_END:
            return Golden(_round(_summarize(take_outputs(spec, outputs)[0])), boxes)
        return Golden(() if sample is None else _round(sample.ravel().tolist()), boxes)
    return Golden(_round(_summarize(found.scores if isinstance(found, TextSteps) else found)))


def _summarize(values: NDArray[Any]) -> list[float]:
    if values.ndim == 1:
        return [float(part.sum(dtype=np.float64)) for part in np.array_split(values, _BLOCKS**2)]
    rows = np.array_split(values, _BLOCKS)
    return [float(part.mean(dtype=np.float64)) for row in rows for part in np.array_split(row, _BLOCKS, 1) if part.size]


def _round(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{value:.4g}") for value in values)


@lru_cache(64)
def parse(golden: str) -> dict[str, Golden]:
    """Return what `add` has found in the golden picture with each version of a model, which its config has as JSON."""
    with suppress(msgspec.DecodeError):  # such as of nothing
        return msgspec.json.decode(golden, type=dict[str, Golden])
    return {}


def added_values(spec: ModelSpec) -> Golden | None:
    """Return what `add` has found with the version of a spec; None if that is nothing."""
    golden = parse(spec.golden).get(spec.version)
    return None if golden == Golden() else golden
