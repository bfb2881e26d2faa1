"""The model repository: the two configs of a model agree with each other and with the model's file."""

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
from app.model.spec import InputFormat, ModelSpec, from_triton_config
from app.model.triton_config import ModelParameters
from app.triton.repository import CONFIG_NAME
from app.zoo import registry
from app.zoo.graph import OPSET
from app.zoo.recipe import ClassificationRecipe, DetectionRecipe
from tests.support import REPOSITORY

FILE_MODELS = ["yolo11n_file"]
"""Those that take encoded files; tests/test_file_models.py is about them."""
ENTRIES = registry.load(REPOSITORY / "models.toml")
NAMES = sorted(ENTRIES.keys() - set(FILE_MODELS))
DETECTORS = [name for name in NAMES if isinstance(ENTRIES[name].recipe, DetectionRecipe)]
PRODUCTION = "config.pbtxt"
EMBEDDED = f"configs/{CONFIG_NAME}.pbtxt"
KINDS = {TensorProto.UINT8: "TYPE_UINT8", TensorProto.INT32: "TYPE_INT32", TensorProto.FLOAT: "TYPE_FP32"}

OUTPUTS = {DetectionRecipe: ["num_dets", "det_boxes", "det_scores", "det_classes"], ClassificationRecipe: ["probabilities"]}
REPEATED_LABELS = {"efficientnet_lite0": ["missile", "sunglasses"]}
"""Labels of which the model has two classes, as published."""

each = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize(("name", "file"), list(product(NAMES, [PRODUCTION, EMBEDDED])))
both_of_a_detector = pytest.mark.parametrize(("name", "file"), list(product(DETECTORS, [PRODUCTION, EMBEDDED])))


def parsed(name: str, file: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse((REPOSITORY / name / file).read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def spec_of(name: str, file: str) -> ModelSpec:
    """Derive the spec as the gateway does, from Triton's JSON."""
    return from_triton_config(json_format.MessageToDict(parsed(name, file), preserving_proto_field_name=True), "1")


def parameters_of(name: str, file: str) -> ModelParameters:
    """Read the parameters as the gateway does."""
    texts = {key: value.string_value for key, value in parsed(name, file).parameters.items()}
    return msgspec.convert(texts, ModelParameters, strict=False)


def pulled(repository: Path, name: str) -> onnx.ModelProto:
    path = repository / name / "1" / "model.onnx"
    if not path.is_file():
        pytest.skip(f"{name} has not been pulled")
    return onnx.load(path)


def classes_in(model: onnx.ModelProto) -> int:
    """Return how many classes a model knows: the depth of a detector's one-hot vectors, or the width of its only output."""
    if len(model.graph.output) == 1:
        return int(model.graph.output[0].type.tensor_type.shape.dim[1].dim_value)
    (depth,) = (node.input[1] for node in model.graph.node if node.op_type == "OneHot")
    constants = {node.output[0]: node.attribute[0].ints for node in model.graph.node if node.op_type == "Constant"}
    return int(constants[depth][0])


@both
def test_model_has_the_name_of_its_folder(name: str, file: str) -> None:
    """Triton rejects a model whose config has another name than its folder."""
    assert parsed(name, file).name == name


@each
def test_both_configs_say_the_same_of_the_model(name: str) -> None:
    """The gateway treats a model the same way wherever it runs; only the device, the batch and the instances differ."""
    production, embedded = parsed(name, PRODUCTION), parsed(name, EMBEDDED)

    for field in ("input", "output"):
        assert list(getattr(production, field)) == list(getattr(embedded, field))
    assert dict(production.parameters) == dict(embedded.parameters)


@pytest.mark.parametrize("name", DETECTORS)
def test_both_configs_give_the_same_spec(name: str) -> None:
    """The gateway treats a model the same way wherever it runs; only the device and the instances differ."""
    production, embedded = spec_of(name, PRODUCTION), spec_of(name, EMBEDDED)

    assert production.device == "gpu"
    assert embedded.device == "cpu"
    assert production.parallel_images >= embedded.parallel_images
    assert msgspec.structs.replace(production, device="cpu", max_batch=embedded.max_batch, instances=embedded.instances) == embedded


@both
def test_model_takes_an_image_and_returns_what_its_task_asks_for(name: str, file: str) -> None:
    """A pulled model takes the canvas as it is and needs no post-processing."""
    config, recipe = parsed(name, file), ENTRIES[name].recipe
    (image,) = config.input

    assert image.data_type == model_config_pb2.TYPE_UINT8
    assert list(image.dims) == [*recipe.size[::-1], 3]
    assert [tensor.name for tensor in config.output] == OUTPUTS[type(recipe)]


@both_of_a_detector
def test_detector_needs_no_post_processing(name: str, file: str) -> None:
    """The gateway recognises the operations that the graph contains."""
    recipe = ENTRIES[name].recipe
    assert isinstance(recipe, DetectionRecipe)
    spec = spec_of(name, file)

    assert spec.input_format is InputFormat.HWC
    assert spec.input_is_canvas
    assert spec.expect_head(DetectionHead).output_format is OutputFormat.END_TO_END
    assert spec.has_batch_dimension
    assert spec.input_size == recipe.size
    assert spec.output_names == tuple(OUTPUTS[DetectionRecipe])
    assert isinstance(spec.head, DetectionHead)
    assert spec.head.max_iou == recipe.iou


@both
def test_licence_and_source_are_those_of_the_registry(name: str, file: str) -> None:
    entry, parameters = ENTRIES[name], parameters_of(name, file)

    assert (parameters.licence, parameters.source) == (entry.licence, entry.source)


@both
def test_config_has_the_tensors_of_the_file(name: str, file: str, repository: Path) -> None:
    """Names, types and dimensions are those of the composed model, without the batch."""
    config, model = parsed(name, file), pulled(repository, name)
    wanted = {
        value.name: (
            KINDS[value.type.tensor_type.elem_type],
            [dim.dim_value for dim in value.type.tensor_type.shape.dim][1:],
        )
        for value in (*model.graph.input, *model.graph.output)
    }
    configured = {
        tensor.name: (model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims))
        for tensor in (*config.input, *config.output)
    }

    assert configured == wanted
    assert [tensor.name for tensor in config.input] == [value.name for value in model.graph.input]


@both
def test_every_class_has_a_label(name: str, file: str, repository: Path) -> None:
    """The model has as many classes as the config has labels, and they are as different as they were published."""
    labels = parameters_of(name, file).class_names()
    repeated = [label for label, count in Counter(labels).items() if count > 1]

    assert len(labels) == classes_in(pulled(repository, name))
    assert repeated == REPEATED_LABELS.get(name, [])
    assert all(label == label.strip() != "" for label in labels)


@both
def test_requests_are_batched_and_the_queue_is_bounded(name: str, file: str) -> None:
    """A full queue rejects requests at once, and a request may bring its own timeout."""
    config = parsed(name, file)
    policy = config.dynamic_batching.default_queue_policy

    assert config.max_batch_size > 1
    assert config.HasField("dynamic_batching")
    assert policy.max_queue_size > 0
    assert policy.allow_timeout_override
    assert policy.default_timeout_microseconds > 0
    assert policy.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT


@both
def test_model_is_warmed_up(name: str, file: str) -> None:
    """The first request finds it ready for one image of its size; TensorRT also for the largest batch, which it builds for."""
    config = parsed(name, file)
    (image,) = config.input

    assert [warmup.batch_size for warmup in config.model_warmup] == ([1, config.max_batch_size] if file == PRODUCTION else [1])
    for warmup in config.model_warmup:
        assert list(warmup.inputs) == [image.name]
        assert warmup.inputs[image.name].data_type == image.data_type
        assert list(warmup.inputs[image.name].dims) == list(image.dims)


@each
def test_production_runs_on_every_gpu(name: str) -> None:
    """Triton's own ONNX backend executes the file, on all GPUs of the machine."""
    config = parsed(name, PRODUCTION)
    (group,) = config.instance_group

    assert config.backend == "onnxruntime"
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert not group.gpus


@both
def test_no_path_leads_through_a_folder_that_everybody_can_write(name: str, file: str) -> None:
    """Another user could put an engine there, and Triton would run it."""
    text = (REPOSITORY / name / file).read_text(encoding="utf-8")
    paths = [Path(path) for path in re.findall(r'"(/[^"]*)"', text)]
    folders = {folder for path in paths for folder in (path, *path.parents) if folder.is_dir()}

    assert len(paths) == (1 if file == PRODUCTION else 0)
    assert not [folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH]


@each
def test_engines_are_cached_wherever_triton_was_started(name: str) -> None:
    """A relative path would depend on the current folder."""
    (accelerator,) = parsed(name, PRODUCTION).optimization.execution_accelerators.gpu_execution_accelerator

    assert accelerator.parameters["trt_engine_cache_enable"] == "true"
    assert Path(accelerator.parameters["trt_engine_cache_path"]).is_absolute()


@each
def test_embedded_runs_on_the_cpu(name: str) -> None:
    """Two instances share the two cores of a small machine."""
    config = parsed(name, EMBEDDED)
    (group,) = config.instance_group

    assert config.backend == "onnxruntime"
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert group.count == 2


@each
def test_file_has_our_opset(name: str, repository: Path) -> None:
    """The container's TensorRT can read this opset."""
    model = pulled(repository, name)
    onnx.checker.check_model(model, full_check=True)

    assert {entry.version for entry in model.opset_import} == {OPSET}
