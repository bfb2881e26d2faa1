"""Compose a Triton model: standard operators from RGB bytes to a network's input, and from its head to the results of its task."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper, version_converter

from app.zoo import heads
from app.zoo.graph import FP32, IR_VERSION, OPSET, Graph, Output, join
from app.zoo.networks import centerface, dlib_resnet, efficientnet
from app.zoo.recipe import ALIASES, SIZES, TENSORS, Architecture, DetectionRecipe, Recipe, SegmentationRecipe

_ARCHITECTURES: dict[Architecture, Callable[[Path], onnx.ModelProto]] = {
    "efficientnet_lite0": efficientnet.load,
    "efficientnet_lite0_features": partial(efficientnet.load, has_classes=False),
    "centerface": centerface.load,
    "dlib_resnet": dlib_resnet.load,
}
_WHOLE = {"dfine": ("labels",), "four_tensors": ("num_dets", "det_classes")}
"""Outputs of heads that are whole numbers."""
_PREFIX = re.compile("network(-[0-9a-f]{8})?/")
_INPUTS = {"before/pixels": "before/pixels", "before/sizes": SIZES}
"""What the network in a composed model takes, and the names for that alone; its own name of the image may be used inside of it."""


def load_network(file: Path, architecture: Architecture | None) -> onnx.ModelProto:
    """Read a network, or build that of an architecture from the file of its weights; raise ValueError if they do not fit."""
    return onnx.load(file) if architecture is None else _ARCHITECTURES[architecture](file)


def missing_weights(file: Path) -> list[str]:
    """Return the names of the files that should lie beside a network, because it has its weights there, and do not."""
    names: set[str] = set()
    with suppress(Exception):  # of a broken file, nothing is known
        for tensor in tensors_in(onnx.load(file, load_external_data=False)):
            names |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    return [name for name in sorted(names) if name and not os.path.isfile(file.parent / name)]  # noqa: PTH113 - or too long


def tensors_in(message: Any) -> Iterator[TensorProto]:  # noqa: ANN401 - any message of ONNX
    """Yield the tensors in a network, also in nested graphs and functions."""
    for field, value in message.ListFields():
        for part in (value if field.is_repeated else [value]) if field.message_type else ():
            if field.message_type.name == "TensorProto":
                yield part
            else:
                yield from tensors_in(part)


def compose_model(
    network: onnx.ModelProto,
    recipe: Recipe,
    *,
    classes: int | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    batch: int | None = None,
) -> onnx.ModelProto:
    """Build the checked model of a recipe around a network, which is changed; raise ValueError if it does not fit.

    The network has one FP32 or FP16 input (1 or batch, 3, height, width), for the head `dfine` a second one, and the outputs of
    `recipe.head`, for segmentation also prototypes; the model has the input `image`, UINT8 (batch, height, width, 3), and the
    outputs of its graph in `heads`. `classes` and `shapes` are as there, by default the shapes in the network's graph.
    """
    # A batch of 1 is kept in a network whose graph contains it in a way that cannot be made dynamic: the model for any batch is
    # rejected here, or fails when it runs with a batch of two.
    _check(network, recipe)
    sizes = [(shapes or {}).get(value.name) or dims(value)[1:] for value in network.graph.output]
    after = heads.build(sizes, recipe, classes)
    version = max(OPSET, _opset(network))
    network = _convert(network, version)
    if batch is None:
        _free_batch(network)
    _unify_types(network, recipe)
    before, after = _convert(_preprocessing(recipe), version), _convert(after, version)
    digest = _digest(before, network, after)
    # Prefixes make the internal names of the graphs unique; the external names are the model's interface.
    before = compose.add_prefix(before, "before/", rename_inputs=False)
    model = join(join(before, compose.add_prefix(network, f"network-{digest}/")), after)
    model.graph.name = f"nereid-{digest}"
    versions = {entry.domain: entry.version for entry in model.opset_import}  # repeated for each graph
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in versions.items())
    model.producer_name = "nereid"
    onnx.checker.check_model(model, full_check=True)
    return model


def extract_network(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the network in a composed model, with its own names, FP32 inputs and outputs; raise ValueError for other models."""
    graph = onnx.shape_inference.infer_shapes(model).graph
    prefix = next((match[0] for node in graph.node for name in node.output if (match := _PREFIX.match(name))), None)
    if prefix is None:
        raise ValueError("it was not composed by pull or add")
    nodes = [node for node in graph.node if any(name.startswith(prefix) for name in node.output)]
    used = {name for node in graph.node if node not in nodes for name in node.input}
    network = helper.make_model(
        helper.make_graph(
            nodes,
            "network",
            [value for value in graph.value_info if value.name in _INPUTS],
            [value for value in graph.value_info if value.name in used and value.name.startswith(prefix)],
            [tensor for tensor in graph.initializer if tensor.name.startswith(prefix)],
        ),
        ir_version=model.ir_version,
        opset_imports=model.opset_import,
        functions=model.functions,
    )
    network.metadata_props.extend(model.metadata_props)
    _rename(network.graph, lambda name: _INPUTS.get(name, name.removeprefix(prefix)))
    return network


def _rename(message: Any, rename: Callable[[str], str]) -> None:  # noqa: ANN401 - any message of ONNX
    for field, value in message.ListFields():
        if field.message_type:
            for part in value if field.is_repeated else [value]:
                _rename(part, rename)
        elif field.name == "name":
            message.name = rename(value)
        elif field.name in {"input", "output"}:
            value[:] = map(rename, value)


def dims(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return the shape of an input or output; 0 for dynamic dimensions."""
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def use_known_names(network: onnx.ModelProto) -> None:
    """Give an input of sizes, and outputs with names in `ALIASES`, the names by which they are known here."""
    own = {value.name for value in network.graph.output}
    known = next((dict(zip(alias, names, strict=True)) for alias, names in ALIASES.items() if own == {*alias}), {})
    sizes = [value.name for value in network.graph.input if dims(value)[1:] == (2,)]
    known |= dict.fromkeys(sizes, SIZES) if len(sizes) == 1 else {}
    if known.keys() - {SIZES}:
        _rename(network.graph, lambda name: known.get(name, name))


def _digest(*parts: onnx.ModelProto) -> str:
    # ONNX Runtime finds a TensorRT engine in its cache by names only, not by weights or shapes: `TRTGenerateId`, issue 32254.
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part.SerializeToString(deterministic=True))
    return sha256.hexdigest()[:8]


def _preprocessing(recipe: Recipe) -> onnx.ModelProto:
    shape = [side if side > 0 else name for side, name in zip(recipe.input_shape, ("height", "width"), strict=True)]
    graph = Graph()
    image = graph.input("image", *shape, 3, kind="UINT8")
    pixels = image.op("Cast", to=FP32).op("Transpose", perm=[0, 3, 1, 2])  # TensorRT takes UINT8 in a Cast only
    if recipe.channels == "BGR":
        pixels = pixels.op("Gather", [2, 1, 0], axis=1)
    mean, std = (np.reshape([value * recipe.scale for value in values], (1, 3, 1, 1)) for values in (recipe.mean, recipe.std))
    if mean.any():
        pixels -= mean.astype(np.float32)
    outputs: dict[str, Output] = {"pixels": (pixels / std.astype(np.float32), "FP32", (3, *shape))}
    if _takes_sizes(recipe):
        size = recipe.size[::-1] if recipe.sizes == "height_width" else recipe.size
        sizes = graph.constant(size).op("Expand", image.op("Shape", start=0, end=1).op("Concat", [2], axis=0))
        outputs["sizes"] = sizes, "INT64", (2,)
    return graph.build("before", outputs)


def _takes_sizes(recipe: Recipe) -> TypeGuard[DetectionRecipe]:
    return isinstance(recipe, DetectionRecipe) and recipe.head == "dfine" and recipe.sizes != "fixed"


def _convert(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    # To an older opset, many operators cannot be converted.
    if _opset(model) != version:
        try:
            model = version_converter.convert_version(model, version)
        except Exception as error:  # of several types, also for an operator without conversion
            raise ValueError(f"it cannot be converted to opset {version}: export it again with opset={OPSET}") from error
    model.ir_version = IR_VERSION
    return model


def _opset(model: onnx.ModelProto) -> int:
    version: int = next(entry.version for entry in model.opset_import if not entry.domain)
    return version


def _free_batch(network: onnx.ModelProto) -> None:
    graph = network.graph
    is_fixed = graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del graph.value_info[:]  # they contain the fixed batch size
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    tensors |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant" and n.attribute[0].HasField("t")}
    for node in graph.node if is_fixed else ():
        if node.op_type == "Reshape" and node.input[0] not in tensors and (shape := tensors.get(node.input[1])) is not None:
            sizes = numpy_helper.to_array(shape)
            if sizes[0] == 1 and len(sizes) > 2:  # noqa: PLR2004 - (1, x) is also the shape of grids, which have no batch
                shape.CopyFrom(numpy_helper.from_array(np.array([0, *sizes[1:]], np.int64), shape.name))


def _unify_types(network: onnx.ModelProto, recipe: Recipe) -> None:
    # Images, boxes and scores become FP32; sizes, counts and class ids INT64.
    graph = network.graph
    whole = {SIZES, *_WHOLE.get(recipe.head, ())}
    for is_input, values in ((True, graph.input), (False, graph.output)):
        for value in values:
            own, tensor = value.name, value.type.tensor_type
            kind, due = tensor.elem_type, TensorProto.INT64 if own in whole else TensorProto.FLOAT
            if kind != due:
                value.name, tensor.elem_type = f"{own}/{'int64' if own in whole else 'fp32'}", due
                if is_input:
                    graph.node.insert(0, helper.make_node("Cast", [value.name], [own], to=kind))
                else:
                    graph.node.append(helper.make_node("Cast", [own], [value.name], to=due))


def _check(network: onnx.ModelProto, recipe: Recipe) -> None:
    inputs, outputs = network.graph.input, network.graph.output
    names = TENSORS.get(recipe.head, ())
    due_outputs = len(names) or 1 + isinstance(recipe, SegmentationRecipe)
    due, found = (1 + _takes_sizes(recipe), due_outputs), (len(inputs), len(outputs))
    if due != found or (names and {value.name for value in outputs} != {*names}):
        raise ValueError(f"expected {due[0]} input and {due[1]} output tensors, found {found[0]} and {found[1]}")
    inputs.sort(key=lambda value: value.name == SIZES)
    outputs.sort(key=lambda value: names.index(value.name) if names else len(dims(value)))
    image, planes = inputs[0].type.tensor_type, dims(inputs[0])
    expected = (3, *recipe.input_shape)
    is_float = image.elem_type in (TensorProto.FLOAT, TensorProto.FLOAT16)
    if not is_float or len(planes) != 4 or any(size not in (0, due) for size, due in zip(planes[1:], expected, strict=True)):  # noqa: PLR2004
        raise ValueError(f"the input {planes} is not FP32 or FP16 (batch, {', '.join(map(str, expected))})")
    for dim, size in zip(image.shape.dim[1:], expected, strict=True):
        if size > 0:
            dim.dim_value = size
