"""The model repository: two configs of one model that agree with each other and with the model's file."""

from pathlib import Path

import msgspec
import onnx
import pytest
from google.protobuf import json_format, text_format
from onnx import TensorProto
from tritonclient.grpc import model_config_pb2

from app import catalogue, contract
from app.compose import OPSET
from app.contract import Contract, Form, Layout
from app.embedded import CONFIG_NAME
from tests.conftest import REPOSITORY

NAMES = sorted(catalogue.load(REPOSITORY / "models.toml"))
PRODUCTION = "config.pbtxt"
EMBEDDED = f"configs/{CONFIG_NAME}.pbtxt"
KINDS = {TensorProto.UINT8: "TYPE_UINT8", TensorProto.INT32: "TYPE_INT32", TensorProto.FLOAT: "TYPE_FP32"}

pytestmark = pytest.mark.parametrize("name", NAMES)
both = pytest.mark.parametrize("file", [PRODUCTION, EMBEDDED])


def parsed(name: str, file: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse((REPOSITORY / name / file).read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def told(name: str, file: str) -> Contract:
    """Read the contract the way the gateway does, from Triton's JSON."""
    return contract.read(json_format.MessageToDict(parsed(name, file), preserving_proto_field_name=True), "1")


def pulled(repository: Path, name: str) -> onnx.ModelProto:
    path = repository / name / "1" / "model.onnx"
    if not path.is_file():
        pytest.skip(f"{name} has not been pulled")
    return onnx.load(path)


@both
def test_the_folder_names_the_model(name: str, file: str) -> None:
    """Triton refuses a model whose config says another name than its folder."""
    assert parsed(name, file).name == name


def test_both_configs_make_the_same_contract(name: str) -> None:
    """The gateway treats a model the same way, wherever it runs; only the device differs."""
    production, embedded = told(name, PRODUCTION), told(name, EMBEDDED)

    assert production.device == "gpu"
    assert embedded.device == "cpu"
    assert msgspec.structs.replace(production, device="cpu") == embedded


@both
def test_the_contract_is_picture_in_and_detections_out(name: str, file: str) -> None:
    """A pulled model takes bytes as they are and needs no post-processing."""
    recipe = catalogue.load(REPOSITORY / "models.toml")[name].recipe
    known = told(name, file)

    assert known.form is Form.HWC
    assert known.layout is Layout.END_TO_END
    assert known.batched
    assert known.frame == (recipe.square, recipe.square)
    assert known.outputs == ("num_dets", "det_boxes", "det_scores", "det_classes")


@both
def test_the_licence_and_the_source_are_those_of_the_catalogue(name: str, file: str) -> None:
    """Who lists the models is told what `pull` told."""
    entry = catalogue.load(REPOSITORY / "models.toml")[name]
    known = told(name, file)

    assert (known.licence, known.source) == (entry.licence, entry.source)


@both
def test_the_config_has_the_tensors_of_the_file(name: str, file: str, repository: Path) -> None:
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
def test_there_is_a_label_for_every_class(name: str, file: str, repository: Path) -> None:
    """The model distinguishes as many classes as the config names, and no two have one name."""
    model = pulled(repository, name)
    depths = [node.input[1] for node in model.graph.node if node.op_type == "OneHot"]
    constants = {node.output[0]: node.attribute[0].ints for node in model.graph.node if node.op_type == "Constant"}
    labels = told(name, file).labels

    assert [list(constants[depth]) for depth in depths] == [[len(labels)]]
    assert len(set(labels)) == len(labels)
    assert all(label == label.strip() != "" for label in labels)


@both
def test_requests_are_batched_and_the_queue_is_bounded(name: str, file: str) -> None:
    """A full queue refuses at once, and a caller's own deadline is heeded."""
    config = parsed(name, file)
    policy = config.dynamic_batching.default_queue_policy

    assert config.max_batch_size > 1
    assert config.HasField("dynamic_batching")
    assert policy.max_queue_size > 0
    assert policy.allow_timeout_override
    assert policy.default_timeout_microseconds > 0
    assert policy.timeout_action == model_config_pb2.ModelQueuePolicy.REJECT


@both
def test_the_first_caller_does_not_pay_for_the_start(name: str, file: str) -> None:
    """The model is warmed up with a picture of its own size; TensorRT also with the largest batch, which it builds for."""
    config = parsed(name, file)
    (picture,) = config.input

    assert [warmup.batch_size for warmup in config.model_warmup] == ([1, config.max_batch_size] if file == PRODUCTION else [1])
    for warmup in config.model_warmup:
        assert list(warmup.inputs) == [picture.name]
        assert warmup.inputs[picture.name].data_type == picture.data_type
        assert list(warmup.inputs[picture.name].dims) == list(picture.dims)


def test_production_runs_on_every_gpu(name: str) -> None:
    """Triton's own ONNX backend executes the file, on the GPUs of the machine."""
    config = parsed(name, PRODUCTION)
    (group,) = config.instance_group

    assert config.backend == "onnxruntime"
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    assert not group.gpus


def test_embedded_runs_on_the_cpu(name: str) -> None:
    """Two instances share the two cores of a small machine."""
    config = parsed(name, EMBEDDED)
    (group,) = config.instance_group

    assert config.backend == "onnxruntime"
    assert group.kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert group.count == 2


def test_the_file_is_of_our_opset(name: str, repository: Path) -> None:
    """What has been pulled is valid and can be read by the TensorRT of the container."""
    model = pulled(repository, name)
    onnx.checker.check_model(model, full_check=True)

    assert {entry.version for entry in model.opset_import} == {OPSET}
