"""The models of the registry: their generated configs agree with each other and with the model's file.

For models that take encoded files, that is one contract in production, where DALI decodes, and in the embedded Triton.
"""

import re
import stat
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from google.protobuf import json_format, text_format
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2

from app.model.spec import DECODED, InputFormat, ModelSpec, from_triton_config
from app.triton.config_file import read_config_file
from app.triton.repository import CONFIG_NAME, loadable_models
from app.zoo import configs, registry
from app.zoo.description import Description
from app.zoo.graph import OPSET
from app.zoo.recipe import EmbeddingRecipe, TextDetectionRecipe
from tests.support import REPOSITORY

ENTRIES = registry.load()
FILE_MODELS = [name for name, entry in ENTRIES.items() if entry.pixel_model]
NAMES = sorted(ENTRIES.keys() - set(FILE_MODELS))
PRODUCTION, EMBEDDED = "config.pbtxt", f"configs/{CONFIG_NAME}.pbtxt"
KINDS = {TensorProto.UINT8: "TYPE_UINT8", TensorProto.INT32: "TYPE_INT32", TensorProto.FLOAT: "TYPE_FP32"}
UNNAMED = (TextDetectionRecipe, EmbeddingRecipe)
"""Recipes of models without classes."""
Groups = model_config_pb2.ModelInstanceGroup

each = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize(("name", "file"), list(product(NAMES, [PRODUCTION, EMBEDDED])))
of_files = pytest.mark.parametrize("name", FILE_MODELS)


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


@pytest.mark.parametrize("name", [*NAMES, *FILE_MODELS])
def test_production_and_embedded_configs_give_the_same_spec(name: str) -> None:
    """The gateway treats a model the same way wherever it runs; device, instances and shapes differ, and what DALI can decode."""
    production, embedded = spec_of(name, PRODUCTION), spec_of(name, EMBEDDED)
    assert (production.device, embedded.device) == ("gpu", "cpu")
    assert production.parallel_images >= embedded.parallel_images
    others: dict[str, Any] = {"max_batch": embedded.max_batch, "instances": embedded.instances}
    if name in FILE_MODELS:
        assert (production.formats, embedded.formats) == ("JPEG,PNG,WEBP,BMP", "")
        others |= {"backend": embedded.backend, "formats": "", "priority_levels": embedded.priority_levels}
    assert msgspec.structs.replace(production, device="cpu", **others) == msgspec.structs.replace(embedded, shapes=())


@pytest.mark.parametrize("name", [name for name in NAMES if ENTRIES[name].group is None])
def test_pulled_model_is_described_by_its_config(name: str, repository: Path) -> None:
    """Tensors have the dimensions of the file where it has numbers, which Triton demands, and every class has a name."""
    if not (repository / name).is_dir():
        pytest.skip(f"{name} has not been pulled")
    config, model = read_config_file(repository / name / PRODUCTION), onnx.load(repository / name / "1" / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    wanted = {
        value.name: (KINDS[value.type.tensor_type.elem_type], [dim.dim_value for dim in value.type.tensor_type.shape.dim][1:])
        for value in (*model.graph.input, *model.graph.output)
    }
    spec, entry = from_triton_config(config, "1"), ENTRIES[name]
    sizes = {"image": ("TYPE_UINT8", [*entry.recipe.size[::-1], 3])} if entry.recipe.shapes else {}  # of the square in production
    described = (*config["input"], *config["output"])
    assert {tensor["name"]: (tensor["data_type"], list(map(int, tensor["dims"]))) for tensor in described} == wanted | sizes
    assert {entry.version for entry in model.opset_import} == {OPSET}  # which the container's TensorRT reads
    assert spec.labels == (entry.class_names or ENTRIES["yolox_nano"].class_names)
    assert (spec.licence, spec.source, spec.default_version) == (entry.licence, entry.source, 1)


@both
def test_model_is_warm_batched_with_a_bounded_queue_and_on_every_gpu_or_the_cpu(name: str, file: str) -> None:
    """Triton's own ONNX backend executes the file; two embedded instances share the two cores of a small machine."""
    config = parsed(name, file)
    policy, (image,), (group,) = config.dynamic_batching.default_queue_policy, config.input, config.instance_group
    assert config.backend == "onnxruntime"
    assert (group.kind, group.count, list(group.gpus)) == (Groups.KIND_GPU if file == PRODUCTION else Groups.KIND_CPU, 2, [])
    assert min(config.max_batch_size - 1, policy.max_queue_size, policy.default_timeout_microseconds) > 0
    assert (policy.allow_timeout_override, policy.timeout_action) == (True, model_config_pb2.ModelQueuePolicy.REJECT)
    assert [warmup.batch_size for warmup in config.model_warmup] == ([1, config.max_batch_size] if file == PRODUCTION else [1])
    for warmup in config.model_warmup:
        assert list(warmup.inputs) == [image.name]
        assert warmup.inputs[image.name].data_type == image.data_type
        assert all(size in {due, -1} and due > 0 for size, due in zip(image.dims, warmup.inputs[image.name].dims, strict=True))


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
    assert (accelerator.parameters["trt_engine_cache_enable"], path.is_absolute()) == ("true", True)
    assert re.findall(r'"(/[^"]*)"', generated(name, PRODUCTION) + generated(name, EMBEDDED)) == [str(path)]
    assert not [folder for folder in folders if folder.stat().st_mode & stat.S_IWOTH]


def steps(name: str) -> list[tuple[model_config_pb2.ModelEnsembling.Step, model_config_pb2.ModelConfig]]:
    drawing, finding = parsed(name, PRODUCTION).ensemble_scheduling.step
    text = (REPOSITORY / drawing.model_name / PRODUCTION).read_text(encoding="utf-8")
    return [(drawing, text_format.Parse(text, model_config_pb2.ModelConfig())), (finding, parsed(finding.model_name, PRODUCTION))]


@of_files
def test_model_of_files_is_that_of_pixels_and_tells_which_it_could_not_decode(name: str) -> None:
    network = str(steps(name)[-1][0].model_name)
    square = msgspec.structs.replace(ENTRIES[network].recipe, shapes=())
    of_network = msgspec.structs.replace(ENTRIES[network], title="", recipe=square)
    assert msgspec.structs.replace(ENTRIES[name], title="", pixel_model=None) == of_network
    for file in (PRODUCTION, EMBEDDED):
        spec, of_pixels = spec_of(name, file), spec_of(network, file)
        own: dict[str, Any] = {"name": name, "input_name": "file", "dtype": None, "input_format": InputFormat.FILE}
        own |= {"tells_decoded": True, "shapes": ()}
        same = ("backend", "formats", "max_batch", "instances", "priority_levels")
        assert spec.requested_names == (*of_pixels.output_names, DECODED)
        assert spec == msgspec.structs.replace(of_pixels, **own, **{each: getattr(spec, each) for each in same})
    config, config_of_network = parsed(name, EMBEDDED), parsed(network, EMBEDDED)
    for part in ("backend", "max_batch_size", "dynamic_batching", "instance_group"):
        assert getattr(config, part) == getattr(config_of_network, part)
    assert [dict(warmup.inputs).keys() for warmup in config.model_warmup] == [{"file"}]


@of_files
def test_letterbox_is_that_of_the_gateway_and_runs_each_request_alone(name: str) -> None:
    """DALI fails for a batch as a whole; the time that this takes is not taken from others. The embedded Triton has no DALI."""
    spec, ((step, letterbox), _) = spec_of(name, PRODUCTION), steps(name)
    width, height = spec.input_size
    parameters = {"placement": spec.placement, "enlarge": str(spec.enlarge).lower(), "pad": str(spec.pad)}
    assert {key: value.string_value for key, value in letterbox.parameters.items()} == parameters
    (image,) = (tensor for tensor in letterbox.output if tensor.name == "image")
    assert (image.data_type, list(image.dims)) == (model_config_pb2.TYPE_UINT8, [height, width, 3])
    assert (letterbox.backend, letterbox.HasField("dynamic_batching")) == ("python", False)
    assert [group.kind for group in letterbox.instance_group] == [Groups.KIND_GPU]
    assert (REPOSITORY / step.model_name / "1" / "model.py").is_file()
    assert step.model_name not in loadable_models(REPOSITORY)
