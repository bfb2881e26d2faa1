"""The Triton configs of a model, generated from its description."""

import json
from pathlib import Path

from app.detection.nms import MAX_DETECTIONS
from app.host.program import CommandError
from app.model.spec import DECODED
from app.triton.repository import CONFIG_NAME
from app.zoo.description import Description, Serving
from app.zoo.recipe import DetectionRecipe

GENERATED = "# Generated from model.toml; do not edit."
"""First line of each generated config."""

_TENSORS = """{generated}
name: {name}
max_batch_size: {max_batch}
input {{ name: "{input}" data_type: {type} dims: [ {dims} ] }}
"""
# Triton's ONNX backend demands the dimensions of the file, -1 only where this has no number.
_DETECTIONS = f"""output {{ name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "det_boxes" data_type: TYPE_FP32 dims: [ {MAX_DETECTIONS}, 4 ] }}
output {{ name: "det_scores" data_type: TYPE_FP32 dims: [ {MAX_DETECTIONS} ] }}
output {{ name: "det_classes" data_type: TYPE_INT32 dims: [ {MAX_DETECTIONS} ] }}
"""
_PROBABILITIES = """output {{ name: "probabilities" data_type: TYPE_FP32 dims: [ {classes} ] }}
"""
_DECODED = f"""output {{ name: "{DECODED}" data_type: TYPE_INT32 dims: [ 1 ] }}
"""
# No preferred sizes: a batch is whatever has queued while the instances were busy, so a single request never waits for others.
# A full queue refuses at once; each request brings its own timeout.
_INSTANCES = """backend: "onnxruntime"
version_policy {{ all {{}} }}
instance_group [ {{ count: {serving.instances} kind: {kind} }} ]
dynamic_batching {{
  max_queue_delay_microseconds: {serving.delay_us}
  default_queue_policy {{
    timeout_action: REJECT
    default_timeout_microseconds: 600000000
    allow_timeout_override: true
    max_queue_size: 256
  }}
}}
"""
_WARM_UP = """model_warmup [ {{
  name: "batch of {images}"
  batch_size: {images}
  inputs {{ key: "{input}" value {{ data_type: {type} dims: [ {dims} ] zero_data: true }} }}
}} ]
"""
# TensorRT takes minutes to build an engine. An engine contains code that Triton runs, so nobody else may write to the cache.
_TENSORRT = """optimization {
  execution_accelerators {
    gpu_execution_accelerator {
      name: "tensorrt"
      parameters { key: "precision_mode" value: "FP16" }
      parameters { key: "trt_engine_cache_enable" value: "true" }
      parameters { key: "trt_engine_cache_path" value: "/var/cache/nereid" }
    }
  }
}
"""
_ENSEMBLE = """platform: "ensemble"
version_policy {{ all {{}} }}
ensemble_scheduling {{
  step {{
    model_name: "letterbox_{width}"
    model_version: -1
    input_map {{ key: "file" value: "file" }}
    output_map {{ key: "image" value: "image" }}
    output_map {{ key: "decoded" value: "decoded" }}
  }}
  step {{
    model_name: "{pixel_model}"
    model_version: -1
    input_map {{ key: "image" value: "image" }}
    output_map {{ key: "num_dets" value: "num_dets" }}
    output_map {{ key: "det_boxes" value: "det_boxes" }}
    output_map {{ key: "det_scores" value: "det_scores" }}
    output_map {{ key: "det_classes" value: "det_classes" }}
  }}
}}
"""


def generate(name: str, description: Description) -> dict[Path, str]:
    """Return the texts of the configs for the embedded and another Triton, by their paths in the model's folder."""
    return {
        Path("config.pbtxt"): _config(name, description, description.production, is_embedded=False),
        Path("configs", f"{CONFIG_NAME}.pbtxt"): _config(name, description, description.embedded, is_embedded=True),
    }


def outdated(folder: Path, name: str, description: Description) -> dict[Path, str]:
    """Return the texts of the configs that a model's folder has in another form.

    Raises:
        CommandError: One of them was written by hand.
    """
    texts = {}
    for path, text in generate(name, description).items():
        target = folder / path
        before = target.read_text(encoding="utf-8", errors="replace") if target.is_file() else GENERATED
        if not before.startswith(GENERATED):
            raise CommandError(f"{target} is not generated from model.toml, and stays as it is; remove one of the two")
        if before != text:
            texts[path] = text
    return texts


def _config(name: str, description: Description, serving: Serving, *, is_embedded: bool) -> str:
    recipe, is_detector = description.recipe, isinstance(description.recipe, DetectionRecipe)
    takes_files, is_ensemble = bool(description.pixel_model), bool(description.pixel_model) and not is_embedded
    width, height = recipe.size
    image = {"input": "image", "type": "TYPE_UINT8", "dims": f"{height}, {width}, 3"}
    tensor = {"input": "file", "type": "TYPE_STRING", "dims": "1"} if takes_files else image
    text = _TENSORS.format(generated=GENERATED, name=_quote(name), max_batch=serving.max_batch, **tensor)
    text += _DETECTIONS if is_detector else _PROBABILITIES.format(classes=len(description.labels))
    text += _DECODED if takes_files else ""
    if is_ensemble:
        text += _ENSEMBLE.format(width=width, pixel_model=description.pixel_model)
    else:
        text += _INSTANCES.format(serving=serving, kind="KIND_CPU" if is_embedded else "KIND_GPU")
        text += "" if is_embedded else _TENSORRT
        # TensorRT builds an engine for the smallest and the largest batch that it has seen.
        for images in [1] if is_embedded else sorted({1, serving.max_batch}):
            text += _WARM_UP.format(images=images, **tensor)
    parameters = {
        "labels": json.dumps(description.labels, ensure_ascii=False),
        "square": width if takes_files else None,
        "resize": recipe.resize,
        "placement": recipe.placement,
        "crop": recipe.crop,
        "interpolation": recipe.interpolation,
        "iou": recipe.iou if isinstance(recipe, DetectionRecipe) else None,
        "scores": None if is_detector else "probabilities",
        "device": "gpu" if is_ensemble else None,
        "formats": "JPEG,PNG,WEBP,BMP" if is_ensemble else None,
        "default_version": description.default_version,
        "source": description.source,
        "licence": description.licence,
        "intra_op_thread_count": serving.threads if is_embedded else None,
    }
    for key, value in parameters.items():
        if value not in {None, ""}:
            text += f'parameters {{ key: "{key}" value {{ string_value: {_quote(str(value))} }} }}\n'
    return text


def _quote(text: str) -> str:
    """Return a string of protobuf's text format, which has the same escape sequences as JSON."""
    return json.dumps(text, ensure_ascii=False)
