"""What the config of a model leaves open, found out when it is loaded: class names beside it, and the unit of its boxes."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from app.detection.evidence import LOGITS, BoxFormat, are_fractions, contradict
from app.detection.outputs import raw_rows
from app.errors import InvalidModelOutput, UnsupportedModel
from app.imaging.photos import PHOTOS, draw_on_canvas
from app.model.heads import DetectionHead, OutputFormat
from app.model.names import parse_names
from app.model.spec import ModelSpec, from_triton_config
from app.model.triton_config import ModelConfig
from app.pipeline.golden import golden_input
from app.pipeline.preprocess import write_pixels
from app.pipeline.probe import file_input
from app.triton.client import TritonClient
from app.triton.status import ModelFailed, ModelReplaced

_QUEUE_SECONDS = 2.0
_FORMATS: dict[OutputFormat, BoxFormat] = {
    **dict.fromkeys((OutputFormat.END_TO_END, OutputFormat.SIX_COLUMNS, OutputFormat.DEEPSTREAM), "corners"),
    **dict.fromkeys((OutputFormat.YOLO_HEAD, OutputFormat.YOLOV5_HEAD), "centres"),
    OutputFormat.YOLOX_HEAD: "cells",
}

LOG = structlog.get_logger()


def name_classes(config: dict[str, Any], repository: Path) -> dict[str, Any]:
    """Return a config, as Triton's JSON, with the names that lie beside it as its `labels`, if it has none and they can be read.

    Their file is that of `label_filename`, or `labels.txt`. Names that the model cannot have are left out, and logged.
    """
    try:
        model = msgspec.convert(config, ModelConfig, strict=False)
    except msgspec.ValidationError:  # who reads the whole config says why
        return config
    if model.parameters.keys() & {"labels", "metadata"}:
        return config
    name = next((tensor.label_filename for tensor in model.output if tensor.label_filename), "labels.txt")
    path = repository / model.name / Path(name).name
    try:
        names = parse_names(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return config
    labels = {"labels": {"string_value": json.dumps(names)}} if names else {}
    named = {**config, "parameters": {**config.get("parameters", {}), **labels}}
    try:
        from_triton_config(named, "1")
    except UnsupportedModel as error:
        _warn(str(path), error.detail)
        return config
    return named


@cache  # once, although configs are read again and again
def _warn(file: str, reason: str) -> None:
    LOG.warning("the class names beside a model are not used", file=file, reason=reason)


async def decide_units(client: TritonClient, spec: ModelSpec) -> ModelSpec:
    """Return a spec with the unit of its boxes, as the rows for some pictures tell it, pixels if none does, and its `doubt`.

    A model that fails with all pictures gets neither. Raises GatewayError if it cannot answer now.
    """
    if spec.box_units is not None or not isinstance(spec.head, DetectionHead):
        return spec
    units: Literal["pixels", "normalized"] | None = None
    doubt, pictures = "", _pictures(spec)
    while units is None and not doubt and (tensor := await asyncio.to_thread(next, pictures, None)) is not None:
        try:
            result = await client.infer(spec, [tensor], timeout_seconds=_QUEUE_SECONDS, request_id="unit")
        except ModelFailed:  # it may bear the next picture
            continue
        if result.version not in {"", spec.version}:
            raise ModelReplaced("another version has answered")
        try:
            doubt, has_fractions = await asyncio.to_thread(_judge, spec, spec.head.output_format, result.outputs)
        except InvalidModelOutput:  # requests are told
            return spec
        units = None if has_fractions is None else "normalized" if has_fractions else "pixels"
    head = msgspec.structs.replace(spec.head, has_normalized_boxes=units == "normalized")
    shapes = () if units == "normalized" else spec.shapes  # fractions would be those of one size
    return msgspec.structs.replace(spec, head=head, box_units=units, doubt=doubt, shapes=shapes)


def _judge(spec: ModelSpec, output_format: OutputFormat, outputs: Mapping[str, NDArray[Any]]) -> tuple[str, bool | None]:
    # What the rows for a picture tell against the head, and whether its boxes are fractions of the input.
    rows = raw_rows(spec, outputs)
    find_little = output_format is OutputFormat.YOLO_HEAD
    doubt = contradict(rows, _FORMATS[output_format], are_always_fractions=False, find_little=find_little)
    if doubt:
        advice = "" if LOGITS in doubt else "; its config must say another `head`"
        doubt = f"the model is read as {output_format.value}, but {doubt}{advice}"
    return doubt, False if output_format is OutputFormat.YOLOX_HEAD else are_fractions(rows.boxes)


def _pictures(spec: ModelSpec) -> Iterator[NDArray[Any]]:
    yield golden_input(spec)
    for path in sorted(PHOTOS.glob("*.jpg")):
        data = path.read_bytes()
        if spec.dtype is None:
            yield file_input(data)
            continue
        canvas = draw_on_canvas(data, spec)
        tensor = np.empty(spec.shape_of((canvas.shape[1], canvas.shape[0])), spec.dtype)
        write_pixels(canvas, spec, tensor)
        yield tensor
