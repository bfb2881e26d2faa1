"""The Triton configs of a model, generated from its description."""

import json
from collections.abc import Iterable
from pathlib import Path

import msgspec

from app.host.program import CommandError
from app.model.spec import DECODED
from app.triton.repository import CONFIG_NAME
from app.zoo.description import Description, Serving
from app.zoo.recipe import DETECTIONS, ClassificationRecipe, DetectionRecipe, EmbeddingRecipe, PoseRecipe

HALF = "model_fp16.onnx"
"""The graph of a version whose network computes in FP16."""
GENERATED = "# Generated from model.toml; do not edit."
"""First line of each generated config."""

_TENSORS = """{generated}
name: {name}
max_batch_size: {max_batch}
version_policy {{ all {{}} }}
input {{ name: "{key}" data_type: {tensor} }}
"""
# Triton's ONNX backend demands the dimensions of the file, -1 only where this has no number.
_DETECTIONS = {name: f"TYPE_{kind} dims: [ {', '.join(map(str, dims))} ]" for name, (kind, dims) in DETECTIONS.items()}
# No preferred sizes: a batch is whatever has queued while the instances were busy, so a single request never waits for others. They
# only help where some sizes have an engine of their own; TensorRT builds one for all sizes here.
# A full queue refuses at once; each request brings its own timeout. The gateway sends a caller that has waited for others with
# priority 1.
_INSTANCES = """backend: "onnxruntime"
instance_group [ {{ count: {serving.instances} kind: {kind} }} ]
dynamic_batching {{
  max_queue_delay_microseconds: {serving.delay_us}
  priority_levels: 2
  default_priority_level: 2
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
  inputs {{ key: "{key}" value {{ data_type: {tensor} zero_data: true }} }}
}} ]
"""
# TensorRT takes minutes to build an engine, and builds one again for each size that it has not seen: not for inputs whose size
# follows the image's. An engine contains code that Triton runs, so nobody else may write to the cache.
_TENSORRT = """optimization {
  execution_accelerators {
    gpu_execution_accelerator {
      name: "tensorrt"
      parameters { key: "trt_engine_cache_enable" value: "true" }
      parameters { key: "trt_engine_cache_path" value: "/var/cache/nereid" }
    }
  }
}
"""
_ENSEMBLE = """platform: "ensemble"
ensemble_scheduling {{
  step {{ model_name: "letterbox_{width}" model_version: -1 {drawn} }}
  step {{ model_name: "{pixel_model}" model_version: -1 {found} }}
}}
"""


def runs_half(folder: Path, description: Description) -> bool:
    """Return whether production runs a model in FP16: if each version has the graph, because all have the same config."""
    # Triton also loads versions that the description does not name, such as one that is being added.
    versions = {*description.versions, *(path.parent.name for path in folder.glob("[0-9]*/*.onnx"))}
    return all((folder / version / HALF).is_file() for version in versions)


def generate(name: str, description: Description, *, is_half: bool = False) -> dict[Path, str]:
    """Return the texts of the configs for the embedded and another Triton, by their paths in the model's folder."""
    file = f'default_model_filename: "{HALF}"\n' if is_half else ""
    return {
        Path("config.pbtxt"): _config(name, description, description.production, is_embedded=False) + file,
        Path("configs", f"{CONFIG_NAME}.pbtxt"): _config(name, description, description.embedded, is_embedded=True),
    }


def outdated(folder: Path, name: str, description: Description, *, is_half: bool | None = None) -> dict[Path, str]:
    """Return the texts of the configs that a model's folder has in another form; raise CommandError if one was written by hand."""
    texts, is_half = {}, runs_half(folder, description) if is_half is None else is_half
    for path, text in generate(name, description, is_half=is_half).items():
        target = folder / path
        before = target.read_text(encoding="utf-8", errors="replace") if target.is_file() else GENERATED
        if not before.startswith(GENERATED):
            raise CommandError(f"{target} is not generated from model.toml, and stays as it is; remove one of the two")
        if before != text:
            texts[path] = text
    return texts


def _config(name: str, description: Description, serving: Serving, *, is_embedded: bool) -> str:
    recipe = description.recipe if is_embedded else msgspec.structs.replace(description.recipe, shapes=())  # an engine has one size
    pixel_model = description.pixel_model
    is_ensemble, (width, height) = bool(pixel_model) and not is_embedded, recipe.size
    key, tensor = ("file", "TYPE_STRING dims: [ 1 ]") if pixel_model else ("image", _pixels(*recipe.input_shape))
    blank = tensor if pixel_model else _pixels(height, width)
    outputs = {output: f"TYPE_{kind} dims: {[*dims]}" for output, (kind, dims) in recipe.outputs.items()}
    if isinstance(recipe, DetectionRecipe):
        outputs = _DETECTIONS | outputs
        if description.golden.keys() >= description.versions.keys() and not is_ensemble:  # older versions have no sample
            outputs |= {name: f"TYPE_{kind} dims: {[*dims]}" for name, (kind, dims) in recipe.sample.items()}
    elif isinstance(recipe, ClassificationRecipe):
        outputs = {"probabilities": f"TYPE_FP32 dims: [ {len(description.labels)} ]"}
    outputs |= {DECODED: "TYPE_INT32 dims: [ 1 ]"} if pixel_model else {}
    text = _TENSORS.format(generated=GENERATED, name=_quote(name), max_batch=serving.max_batch, key=key, tensor=tensor)
    text += "".join(f'output {{ name: "{output}" data_type: {kind} }}\n' for output, kind in outputs.items())
    if is_ensemble:
        drawn, found = _maps(["file"], ["image", DECODED]), _maps(["image"], _DETECTIONS)
        text += _ENSEMBLE.format(width=width, pixel_model=pixel_model, drawn=drawn, found=found)
    else:
        text += _INSTANCES.format(serving=serving, kind="KIND_CPU" if is_embedded else "KIND_GPU")
        text += "" if is_embedded or -1 in recipe.input_shape else _TENSORRT
        # TensorRT builds an engine for the smallest and the largest batch that it has seen.
        for images in [1] if is_embedded else sorted({1, serving.max_batch}):
            text += _WARM_UP.format(images=images, key=key, tensor=blank)
    names = recipe.keypoint_names if isinstance(recipe, PoseRecipe) else ()
    parameters = {
        "labels": json.dumps(description.labels, ensure_ascii=False) if description.labels else None,
        "task": recipe.task if recipe.outputs else None,
        "keypoints": json.dumps(names, ensure_ascii=False) if names else None,
        "square": width if pixel_model or recipe.resize == "text" or recipe.shapes else None,
        "resize": recipe.resize,
        "placement": recipe.placement,
        "crop": recipe.crop,
        "interpolation": recipe.interpolation,
        "pad": recipe.pad,
        "shapes": ",".join(f"{across}x{down}" for across, down in recipe.shapes),
        "widths": ",".join(map(str, recipe.widths or ())),
        "landmarks": ",".join(map(str, recipe.landmarks)) if isinstance(recipe, EmbeddingRecipe) else None,
        "match_distance": recipe.match_distance if isinstance(recipe, EmbeddingRecipe) else None,
        "iou": recipe.iou if isinstance(recipe, DetectionRecipe) else None,
        "scores": "probabilities" if isinstance(recipe, ClassificationRecipe) else None,
        "device": "gpu" if is_ensemble else None,
        "formats": "JPEG,PNG,WEBP,BMP" if is_ensemble else None,
        "default_version": description.default_version,
        "golden": msgspec.json.encode(description.golden).decode() if description.golden else None,
        "unchecked": ",".join(description.unchecked),
        "source": description.source,
        "licence": description.licence,
        "intra_op_thread_count": serving.threads if is_embedded else None,
    }
    for key, value in parameters.items():
        if value not in {None, ""}:
            text += f'parameters {{ key: "{key}" value {{ string_value: {_quote(str(value))} }} }}\n'
    return text


def _pixels(height: int, width: int) -> str:
    return f"TYPE_UINT8 dims: [ {height}, {width}, 3 ]"


def _maps(inputs: Iterable[str], outputs: Iterable[str]) -> str:
    # The tensors of a step of an ensemble have the same names everywhere.
    tensors = [("input", name) for name in inputs] + [("output", name) for name in outputs]
    return " ".join(f'{kind}_map {{ key: "{name}" value: "{name}" }}' for kind, name in tensors)


def _quote(text: str) -> str:
    # Protobuf's text format has the same escape sequences as JSON.
    return json.dumps(text, ensure_ascii=False)
