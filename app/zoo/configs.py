"""The Triton configs of an added model, generated from its description."""

import json
from pathlib import Path

from app.host.program import CommandError
from app.triton.repository import CONFIG_NAME
from app.zoo.description import Description, Serving
from app.zoo.recipe import DetectionRecipe

GENERATED = "# Generated from model.toml; do not edit."
"""First line of each generated config."""

_DETECTIONS = """
output {{ name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "det_boxes" data_type: TYPE_FP32 dims: [ -1, 4 ] }}
output {{ name: "det_scores" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "det_classes" data_type: TYPE_INT32 dims: [ -1 ] }}"""
_CONFIG = """{generated}
name: {name}
backend: "onnxruntime"
max_batch_size: {serving.max_batch}
input {{ name: "image" data_type: TYPE_UINT8 dims: [ {height}, {width}, 3 ] }}{outputs}
version_policy {{ all {{}} }}
instance_group [ {{ count: {serving.instances} kind: {kind} }} ]{optimization}
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
  inputs {{ key: "image" value {{ data_type: TYPE_UINT8 dims: [ {height}, {width}, 3 ] zero_data: true }} }}
}} ]
"""
_TENSORRT = """
optimization {
  execution_accelerators {
    gpu_execution_accelerator {
      name: "tensorrt"
      parameters { key: "precision_mode" value: "FP16" }
      parameters { key: "trt_engine_cache_enable" value: "true" }
      parameters { key: "trt_engine_cache_path" value: "/var/cache/nereid" }
    }
  }
}"""


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
    recipe = description.recipe
    width, height = recipe.size
    outputs = _DETECTIONS.format() if isinstance(recipe, DetectionRecipe) else _probabilities(len(description.labels))
    text = _CONFIG.format(
        generated=GENERATED,
        name=_quote(name),
        serving=serving,
        height=height,
        width=width,
        outputs=outputs,
        kind="KIND_CPU" if is_embedded else "KIND_GPU",
        optimization="" if is_embedded else _TENSORRT,
    )
    # TensorRT builds an engine for the smallest and the largest batch that it has seen.
    for images in [1] if is_embedded else sorted({1, serving.max_batch}):
        text += _WARM_UP.format(images=images, height=height, width=width)
    parameters = {
        "labels": json.dumps(description.labels, ensure_ascii=False),
        "resize": recipe.resize,
        "placement": recipe.placement,
        "crop": recipe.crop,
        "iou": recipe.iou if isinstance(recipe, DetectionRecipe) else None,
        "scores": None if isinstance(recipe, DetectionRecipe) else "probabilities",
        "default_version": description.default_version,
        "source": description.source,
        "licence": description.licence,
        "intra_op_thread_count": serving.threads if is_embedded else None,
    }
    for key, value in parameters.items():
        if value not in {None, ""}:
            text += f'parameters {{ key: "{key}" value {{ string_value: {_quote(str(value))} }} }}\n'
    return text


def _probabilities(classes: int) -> str:
    return f'\noutput {{ name: "probabilities" data_type: TYPE_FP32 dims: [ {classes} ] }}'


def _quote(text: str) -> str:
    """Return a string of protobuf's text format, which has the same escape sequences as JSON."""
    return json.dumps(text, ensure_ascii=False)
