"""Checks of the default model: its state in Triton, its config, and test inferences."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from app.detection import evidence
from app.doctor import batching, inference
from app.doctor.finding import Finding, count, failure, ok, warning
from app.errors import GatewayError, UnsupportedModel
from app.host import cores
from app.model.heads import DetectionHead, EmbeddingHead, TextDetectionHead
from app.model.spec import ModelSpec, from_triton_config
from app.settings.schema import Settings
from app.triton.client import TritonClient
from app.triton.config_file import ConfigFileError, read_config_file
from app.triton.repository import DESCRIPTION, config_path
from app.triton.server_info import ModelState
from app.triton.status import own_message
from app.zoo.configs import HALF

_FIRST_PYTHON_WITHOUT_BYTES = (3, 13)
_HEADS = {
    **dict.fromkeys((evidence.CORNERS, evidence.IS_CLASS), ("deepstream",)),
    evidence.DECODED: ("yolov5", "yolo"),
    evidence.IN_CELLS: ("yolox",),
    evidence.OBJECTNESS: ("yolov5",),
}


def _import_completion() -> ModuleType | None:
    try:
        from app.pipeline import completion  # noqa: PLC0415 - its dependencies may be missing
    except ImportError:  # reported by the checks of the machine
        return None
    return completion


async def examine(
    client: TritonClient, settings: Settings, state: ModelState | None, *, is_here: bool
) -> tuple[list[Finding], ModelSpec | None]:
    """Examine the default model on a Triton that responds. The spec is None if the model cannot be used."""
    try:
        config, version = await client.read_config(settings.model)
    except GatewayError as error:
        return [_not_ready(settings, state, error), *check_file(settings)], None
    model, file = batching.read(config), str(_config_path(settings)) if not settings.triton_endpoints else "its config.pbtxt"
    findings = list(batching.check(model, file))
    if is_here:
        findings += batching.check_instances(model, file, cores.available(), is_embedded=not settings.triton_endpoints)
    completion = _import_completion()
    try:
        if completion is not None:
            config = completion.name_classes(config, Path(settings.model_repository))
        spec = from_triton_config(config, version)
    except UnsupportedModel as error:
        fix = "`nereid pull` and `nereid add` compose a model with supported tensors from a network"
        return [failure("model", error.detail, fix), *findings], None
    if completion is not None:
        with suppress(GatewayError):  # the inferences say why
            spec = await completion.decide_units(client, spec)
    formats = f"takes {spec.input_format.value} as {spec.datatype}, and returns {spec.head.description}"
    formats += ", with boxes as fractions of the input" if spec.box_units == "normalized" else ""
    checks = (
        *_check_labels(spec, file),
        *_check_checked(spec, file),
        *_check_input(spec, file),
        *_check_precision(spec, config, settings),
    )
    findings = [ok("model", f"{spec.name} is ready, {formats}"), *checks, *findings]
    is_own = not settings.triton_endpoints and config.get("backend") == "python"
    if spec.dtype is None and is_own and sys.version_info >= _FIRST_PYTHON_WITHOUT_BYTES:
        text = "a Python model of the embedded Triton cannot read encoded files under this Python: nothing was measured"
        findings.append(warning("inference", text, "use Python 3.12, or a Triton of your own"))
    else:
        measured = inference.measure(client, spec, model, file, settings.timeout_seconds)
        findings += [finding async for finding in measured]
        if settings.frigate_zmq and isinstance(spec.head, DetectionHead):
            findings.append(await inference.measure_for_frigate(client, spec))
    return findings, spec


def check_file(settings: Settings) -> Iterator[Finding]:
    """Check the default model's config in the model repository, if it exists; used when Triton does not return the config."""
    try:
        path = _config_path(settings)
        if not path.is_file():
            return
        model: dict[str, Any] = {**read_config_file(path), "name": settings.model}
    except ConfigFileError as error:
        yield failure("model_config", str(error), "correct it, as Triton's documentation of model configurations says")
        return
    except OSError:  # reported by the check of the repository
        return
    yield from batching.check(batching.read(model), str(path))
    yield batching.check_delay(batching.read(model), str(path), None)


def _config_path(settings: Settings) -> Path:
    return config_path(Path(settings.model_repository, settings.model), is_embedded=not settings.triton_endpoints)


def _not_ready(settings: Settings, state: ModelState | None, error: GatewayError) -> Finding:
    if state is None:
        fix = f"nereid pull {settings.model}, then start Triton again; or NEREID_MODEL=NAME of a model that is ready"
        return failure("model", f"Triton does not have {settings.model}: {own_message(error)}", fix)
    reason = state.reason or "Triton's log has the reason"
    fix = "mend the model or its config as the reason says, then start Triton again"
    return failure("model", f"{settings.model} is in Triton's repository, but is not ready: {reason}", fix)


def _check_labels(spec: ModelSpec, file: str) -> Iterator[Finding]:
    if spec.labels:
        yield ok("labels", f"{spec.name} has {count(len(spec.labels), 'class name')}")
    elif not isinstance(spec.head, TextDetectionHead | EmbeddingHead):
        text = f"{spec.name} has no class names: classes are named by their ids"
        yield warning("labels", text, f'add to {file}:\nparameters {{ key: "labels" value {{ string_value: "person,bicycle" }} }}')


def _check_checked(spec: ModelSpec, file: str) -> Iterator[Finding]:
    if spec.doubt:
        yield warning("head", spec.doubt, _how_to_mend(spec.doubt, file))
    elif spec.box_units is None:
        text = f"nothing tells whether the boxes of {spec.name} are pixels or fractions of its input; pixels are assumed"
        yield warning("box_units", text, f'add to {file}:\nparameters {{ key: "box_units" value {{ string_value: "pixels" }} }}')
    if spec.is_checked is False:
        text = f"{spec.reference} found nothing when it was added, so that nobody knows whether its boxes are right"
        yield warning("checked", text, "add it again with --samples FOLDER of pictures with its objects")


def _how_to_mend(doubt: str, file: str) -> str:
    if evidence.LOGITS in doubt:
        return "export it again with its sigmoid"
    heads = next((heads for reason, heads in _HEADS.items() if reason in doubt), ())
    lines = [f'parameters {{ key: "head" value {{ string_value: "{head}" }} }}' for head in heads]
    if not lines:
        return f"add to {file} a `head` of the page `Serve a model with a config of your own` with such rows"
    return f"add to {file}:\n" + ", or without an objectness:\n".join(lines)


def _check_input(spec: ModelSpec, file: str) -> Iterator[Finding]:
    if spec.dtype is None:
        return
    width, height = spec.input_size
    kilobytes, parts = spec.image_bytes / 1e3, np.dtype(spec.dtype).itemsize
    takes = "an image takes up to" if spec.is_sized_by_image else "an image takes"
    if parts == 1:
        yield ok("input_type", f"{takes} {kilobytes:.0f} kB on its way to Triton")
        return
    text = f"{takes} {kilobytes:.0f} kB as {spec.datatype} on its way to Triton, but {kilobytes / parts:.0f} kB as UINT8"
    fix = f"begin the model's graph with a cast, division and transposition, and declare in {file}: "
    yield warning(
        "input_type", text, fix + f"data_type: TYPE_UINT8 dims: [ {height}, {width}, 3 ]; `nereid pull` composes such models"
    )


def _check_precision(spec: ModelSpec, config: Mapping[str, Any], settings: Settings) -> Iterator[Finding]:
    # TensorRT takes the precision from the graph.
    if not os.path.isfile(Path(settings.model_repository) / spec.name / DESCRIPTION):  # noqa: PTH113 - Path's raises if it is not readable
        return
    match config:
        case {"optimization": {"execution_accelerators": {"gpu_execution_accelerator": [{"name": "tensorrt"}, *_]}}}:
            if config.get("default_model_filename") == HALF:
                yield ok("precision", f"{spec.name} computes in FP16 on the GPU")
            else:
                text = f"{spec.name} computes in FP32 on the GPU, which takes about twice the time of FP16"
                yield warning(
                    "precision", text, "pull it, or add its network, again with --production, then let Triton load it again"
                )
