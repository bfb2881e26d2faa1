"""The models of the registry: their generated configs agree with each other and with the model's file."""

import re
import stat
from collections import Counter
from itertools import product
from pathlib import Path

import msgspec
import onnx
import pytest
from google.protobuf import json_format, text_format
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2

from app.model.heads import DetectionHead, OutputFormat
from app.model.spec import ModelSpec, from_triton_config
from app.triton.config_file import read_config_file
from app.triton.repository import CONFIG_NAME
from app.zoo import configs, registry
from app.zoo.description import Description
from app.zoo.graph import OPSET
from app.zoo.recipe import ClassificationRecipe, DetectionRecipe, EmbeddingRecipe, TextDetectionRecipe

ENTRIES = registry.load()
FILE_MODELS = [name for name, entry in ENTRIES.items() if entry.pixel_model]
"""Those that take encoded files; tests/test_file_models.py is about them."""
NAMES = sorted(ENTRIES.keys() - set(FILE_MODELS))
PRODUCTION = "config.pbtxt"
EMBEDDED = f"configs/{CONFIG_NAME}.pbtxt"
KINDS = {TensorProto.UINT8: "TYPE_UINT8", TensorProto.INT32: "TYPE_INT32", TensorProto.FLOAT: "TYPE_FP32"}

DETECTIONS = "num_dets", "det_boxes", "det_scores", "det_classes"
UNNAMED = (TextDetectionRecipe, EmbeddingRecipe)
"""Recipes of models without classes."""
REPEATED_LABELS = {"efficientnet_lite0": ["missile", "sunglasses"]}
"""Labels of which the model has two classes, as published."""

each = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize(("name", "file"), list(product(NAMES, [PRODUCTION, EMBEDDED])))


def generated(name: str, file: str) -> str:
    """Return a config as `pull` writes it; the names of COCO stand for those in a network."""
    entry = ENTRIES[name]
    described = Description(
        labels=entry.class_names or (() if isinstance(entry.recipe, UNNAMED) else ENTRIES["yolox_nano"].class_names),
        default_version=1,
        pixel_model=entry.pixel_model,
        recipe=entry.recipe,
        versions={"1": entry.sha256},
        last_version=1,
    )
    return configs.generate(name, described)[Path(file)]


def parsed(name: str, file: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(generated(name, file), model_config_pb2.ModelConfig())


def spec_of(name: str, file: str) -> ModelSpec:
    """Derive the spec as the gateway does, from Triton's JSON."""
    return from_triton_config(json_format.MessageToDict(parsed(name, file), preserving_proto_field_name=True), "1")


@each
def test_production_and_embedded_configs_give_the_same_spec(name: str) -> None:
    """The gateway treats a model the same way wherever it runs; only the device and the instances differ."""
    production, embedded = spec_of(name, PRODUCTION), spec_of(name, EMBEDDED)

    assert (production.device, embedded.device) == ("gpu", "cpu")
    assert production.parallel_images >= embedded.parallel_images
    assert msgspec.structs.replace(production, device="cpu", max_batch=embedded.max_batch, instances=embedded.instances) == embedded


@both
def test_spec_is_that_of_the_recipe(name: str, file: str) -> None:
    spec, recipe = spec_of(name, file), ENTRIES[name].recipe

    assert spec.input_is_canvas
    assert spec.has_batch_dimension
    assert spec.is_sized_by_image or spec.input_size == recipe.size
    if isinstance(recipe, ClassificationRecipe):
        assert spec.output_names == ("probabilities",)
    else:
        assert spec.output_names == (*(DETECTIONS if isinstance(recipe, DetectionRecipe) else ()), *recipe.outputs)
    assert (recipe.widths or spec.widths, recipe.pad or spec.pad) == (spec.widths, spec.pad)
    assert (spec.resize, spec.placement, spec.interpolation) == (recipe.resize, recipe.placement, recipe.interpolation)
    assert recipe.crop in {None, spec.crop}
    if isinstance(recipe, DetectionRecipe):
        assert isinstance(spec.head, DetectionHead)
        assert spec.head.output_format is OutputFormat.END_TO_END
        assert spec.head.max_iou == recipe.iou


@pytest.mark.parametrize("file", [PRODUCTION, EMBEDDED])
@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].group is None])
def test_pulled_model_is_described_by_its_config(name: str, file: str, repository: Path) -> None:
    """Tensors have the dimensions of the file, which Triton demands, and every class has a name."""
    if not (repository / name).is_dir():
        pytest.skip(f"{name} has not been pulled")
    config, model = read_config_file(repository / name / file), onnx.load(repository / name / "1" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    wanted = {
        value.name: (KINDS[value.type.tensor_type.elem_type], [dim.dim_value for dim in value.type.tensor_type.shape.dim][1:])
        for value in (*model.graph.input, *model.graph.output)
    }
    spec, entry = from_triton_config(config, "1"), ENTRIES[name]

    assert {
        tensor["name"]: (tensor["data_type"], list(map(int, tensor["dims"]))) for tensor in (*config["input"], *config["output"])
    } == wanted
    assert {entry.version for entry in model.opset_import} == {OPSET}  # which the container's TensorRT reads
    assert spec.labels == (entry.class_names or ENTRIES["yolox_nano"].class_names)
    assert [label for label, count in Counter(spec.labels).items() if count > 1] == REPEATED_LABELS.get(name, [])
    assert (spec.licence, spec.source, spec.default_version) == (entry.licence, entry.source, 1)


@both
def test_requests_are_batched_and_the_queue_is_bounded(name: str, file: str) -> None:
    config = parsed(name, file)
    policy = config.dynamic_batching.default_queue_policy

    assert config.max_batch_size > 1
    assert policy.max_queue_size > 0
    assert policy.allow_timeout_override
    assert policy.default_timeout_microseconds > 0
    assert policy.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT


@both
def test_model_is_warmed_up(name: str, file: str) -> None:
    config = parsed(name, file)
    (image,) = config.input

    assert [warmup.batch_size for warmup in config.model_warmup] == ([1, config.max_batch_size] if file == PRODUCTION else [1])
    for warmup in config.model_warmup:
        assert list(warmup.inputs) == [image.name]
        assert warmup.inputs[image.name].data_type == image.data_type
        assert all(size in {due, -1} and due > 0 for size, due in zip(image.dims, warmup.inputs[image.name].dims, strict=True))


@both
def test_model_runs_on_every_gpu_or_on_the_cpu(name: str, file: str) -> None:
    """Triton's own ONNX backend executes the file; two embedded instances share the two cores of a small machine."""
    config = parsed(name, file)
    (group,) = config.instance_group
    kinds = model_config_pb2.ModelInstanceGroup

    assert config.backend == "onnxruntime"
    assert (group.kind, group.count, list(group.gpus)) == (kinds.KIND_GPU if file == PRODUCTION else kinds.KIND_CPU, 2, [])


@each
def test_engines_are_cached_where_nobody_else_can_write(name: str) -> None:
    """Triton runs them. A relative path would depend on the current folder."""
    config = parsed(name, PRODUCTION)
    if -1 in config.input[0].dims:
        assert not config.HasField("optimization")  # TensorRT would build an engine for each size
        return
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    path = Path(accelerator.parameters["trt_engine_cache_path"])
    folders = [folder for folder in (path, *path.parents) if folder.is_dir()]

    assert accelerator.parameters["trt_engine_cache_enable"] == "true"
    assert path.is_absolute()
    assert re.findall(r'"(/[^"]*)"', generated(name, PRODUCTION) + generated(name, EMBEDDED)) == [str(path)]
    assert not [folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH]
