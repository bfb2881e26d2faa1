"""Recognise head, input and classes of an exported network by names, types, shapes, metadata, and its rows for a picture."""

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app.host.program import CommandError, first_line
from app.model.anchors import possible_anchors, rows_of_anchors
from app.model.golden import picture
from app.model.heads import OTHERS_IOU, TASKS
from app.model.names import parse_names, read_literal
from app.model.triton_config import ModelParameters, Placement, Resize, ScoreKind
from app.zoo.description import read_labels
from app.zoo.evidence import Evidence, examine
from app.zoo.inference import TYPES, open_session, run
from app.zoo.recipe import SIZES, TENSORS, DetectionHeadName, FeatureHeadName, NamedTask, Recipe, measure

if TYPE_CHECKING:
    import onnx

MAX_MODEL_BYTES = 2047 << 20
"""The most that a file of protobuf, such as ONNX, may have."""
_LISTS = (".txt", ".yaml", ".yml", ".json", ".names")
_HINTS = ("author", "stride", "task", "names", "imgsz", "kpt_shape", "kpt_names")
_SINGLE = ("yolo", "yolov5", "yolox", "deepstream", "end_to_end", "rtdetr", "rtdetr_topk")
_MAX_QUERIES = 1000
# The largest id of a class of COCO, whose ids begin with 1.
_COCO = 90
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_CLASSIFIER = {"resize": "center_crop", "crop": 0.875, **IMAGENET}
# Of each family's own code; `docs/how-to/model-config.md` has the sources.
_STRETCH = {"resize": "stretch"}
_OTHERS = {"iou": OTHERS_IOU}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "yolox": {"channels": "BGR", "scale": 1.0, "placement": "top_left", **_OTHERS},
    **dict.fromkeys(("yolov5", "deepstream"), _OTHERS),
    **dict.fromkeys(("rtdetr", "rtdetr_topk", "dfine", "detr_sigmoid"), _STRETCH),
    "rfdetr": {**_STRETCH, **IMAGENET},
    "detr": {"placement": "top_left", **IMAGENET},
    **dict.fromkeys(("logits", "probabilities"), _CLASSIFIER),
}
_OWN = "; the page `Serve a model with a config of your own` of the documentation tells what else Triton can serve"
_UNITS = {"pixels": "pixels", "normalized": "fractions of the input"}
_PADDLE = {"channels": "BGR", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
# Padding of 127 is closest to the zeros that PaddleOCR pads a normalized line with.
_LINE = {"size": (320, 48), "resize": "line", "pad": 127, "widths": (160, 320, 480, 640, 960, 1280), **_PADDLE}
_NAMED: dict[NamedTask | None, dict[str, Any]] = {
    "text_detection": {"size": (736, 736), "resize": "text", **_PADDLE},
    "text_recognition": _LINE,
    "embedding": {**_STRETCH, **IMAGENET},
}


class Unrecognized(ValueError):
    """A network cannot be served, or not without an option. The message continues a sentence that begins with its name."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """What a model for computing AP has otherwise than one for serving; None for what the recipe says."""

    floor: Annotated[float | None, Meta(description="score that a detection must exceed; 0.05 unless stated, 0.001 for AP")] = None
    multi_label: Annotated[
        bool | None, Meta(description="a box counts for each class above the floor, not only for the best one, for AP")
    ] = None


class Options(Evaluation, frozen=True, kw_only=True):
    """What the user says about a network; None for what the network shall tell. These are the options of `nereid add`."""

    task: Annotated[NamedTask | None, Meta(description=f"what the outputs do not tell: {', '.join(get_args(NamedTask))}")] = None
    head: Annotated[
        DetectionHeadName | ScoreKind | None,
        Meta(description=f"format of the outputs: {', '.join((*get_args(DetectionHeadName), *get_args(ScoreKind)))}"),
    ] = None
    labels: Annotated[
        tuple[str, ...] | None,
        Meta(description="class names, separated by commas, or JSON; or a file with one in each line, JSON, or a data.yaml"),
    ] = None
    size: Annotated[tuple[int, int] | None, Meta(description="side of the input in pixels, or WIDTHxHEIGHT")] = None
    channels: Annotated[Literal["RGB", "BGR"] | None, Meta(description="RGB or BGR")] = None
    scale: Annotated[float | None, Meta(description="divisor of each byte, such as 255")] = None
    mean: Annotated[
        tuple[float, float, float] | None, Meta(description="three numbers, subtracted from the channels after the division")
    ] = None
    std: Annotated[tuple[float, float, float] | None, Meta(description="three numbers, by which the channels are divided then")] = (
        None
    )
    box_units: Annotated[
        Literal["pixels", "normalized"] | None, Meta(description="pixels or normalized (fractions of the input)")
    ] = None
    iou: Annotated[float | None, Meta(description="overlap above which two boxes of a class are one object")] = None
    resize: Annotated[Resize | None, Meta(description="letterbox, stretch or center_crop")] = None
    placement: Annotated[Placement | None, Meta(description="center or top_left, for a letterbox")] = None


def read_options(given: Mapping[str, Any], *, may_read_files: bool = True) -> Options:
    """Read the options of the command line, of which `labels` may name a file; raise CommandError if one is not valid."""
    texts = {name: given[name] for name in Options.__struct_fields__ if given.get(name) is not None}
    if "labels" in texts:
        text: str = texts["labels"]
        if may_read_files and (text.endswith(_LISTS) or os.path.isfile(text)):  # noqa: PTH113 - Path's raises if it is too long
            texts["labels"] = read_labels(Path(text))
        else:
            is_list = "," in text and not text.lstrip().startswith(("[", "{"))
            texts["labels"] = [label.strip() for label in text.split(",")] if is_list else parse_names(text)
    if "size" in texts:
        sides = texts["size"].split("x")
        texts["size"] = sides if len(sides) > 1 else sides * 2
    texts |= {name: texts[name].split(",") for name in texts.keys() & {"mean", "std"}}
    try:
        return msgspec.convert(texts, Options, strict=False)
    except msgspec.ValidationError as error:
        raise CommandError(f"an option is not valid: {error}") from error


class Recognized(NamedTuple):
    """What is known of a network."""

    recipe: Recipe
    labels: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of the outputs by name, without the batch."""
    licence: str
    """What the exporter wrote; empty if nothing."""
    max_batch: int | None = None
    """Images for which Ultralytics unrolled an NMS inside the network, which finds nothing in more; None for other networks."""


def recognize(network: "onnx.ModelProto", options: Options) -> Recognized:
    """Recognise a network, which runs on a blank image and on the golden picture; raise Unrecognized."""
    metadata = {entry.key: read_literal(entry.value) for entry in network.metadata_props}
    hints = read_hints(network)
    if hints.task not in (None, *TASKS):
        raise Unrecognized(f"is a model for the task {hints.task!r}; these can be served: {', '.join(TASKS)}")
    try:
        session = open_session(network)
    except Exception as error:  # ONNX Runtime has its own exception for every kind of broken file
        raise Unrecognized(f"cannot be loaded: {first_line(error)}") from error
    size = _input_size(session, options, hints)
    shapes = output_shapes(session, size)
    if options.task:
        return _name(network, shapes, size, options)
    task, features, properties = _find_features(shapes, hints)
    fits = _fit_heads(network, shapes, size, options, metadata, features)
    if options.head:
        fits = {head: classes for head, classes in fits.items() if head == options.head}
    if not fits:
        what = f"--head {options.head}" if options.head else f"a known head for {task}" if features else f"a known head{_OWN}"
        raise Unrecognized(f"has the outputs {_listed(shapes)} with {size[0]} x {size[1]} pixels, which do not fit {what}")
    is_classifier = bool(fits.keys() & {*get_args(ScoreKind)})
    known = {} if is_classifier else _examine(session, size, fits, features, is_obb=task == "obb")
    head, labels = _choose(fits, known, hints, options)
    defaults = {"resize": "center_crop", "crop": 1.0} if hints.is_ultralytics_classifier else _DEFAULTS.get(head, {})
    if not is_classifier:
        properties |= _told_by(known[head], options, features)
    is_letterbox = (options.resize or defaults.get("resize", "letterbox")) == "letterbox"
    if head in get_args(FeatureHeadName) and is_letterbox and "normalized" not in {options.box_units, properties.get("box_units")}:
        with suppress(Unrecognized):  # a side is fixed somewhere
            properties["shapes"] = [shape for shape in hints.rectangles(size) if output_shapes(session, shape)]
    recipe = _to_recipe(defaults, options, **properties, task="classification" if is_classifier else task, head=head, size=size)
    found = Recognized(recipe, labels, shapes, str(metadata.get("license", "")))
    match metadata:
        case {"args": {"nms": True}, "batch": int(batch)}:
            return found._replace(max_batch=max(1, int(batch)))
    return found


def _name(network: "onnx.ModelProto", shapes: Mapping[str, tuple[int, ...]], size: tuple[int, int], options: Options) -> Recognized:
    metadata = {entry.key: entry.value for entry in network.metadata_props}
    found: dict[str, Any] = {**_NAMED[options.task], "size": size}
    labels: tuple[str, ...] = ()
    match options.task, [*shapes.values()]:
        case "text_detection", [(1, _, _)]:
            pass
        case "text_recognition", [(_, classes)]:
            characters = options.labels or metadata.get("character", "").split("\n")
            if len(characters) not in {classes - 1, classes - 2}:
                text = f"has {classes} classes, not those of {len(characters)} characters: say --labels FILE with one in each line"
                raise Unrecognized(f"{text}; the blank is before them, and a space may be after them")
            labels = ("", *characters, " ")[:classes]
            width = network.graph.input[0].type.tensor_type.shape.dim[3].dim_value
            found |= {"widths": (width,)} if width else {}
        case "embedding", [(count,)]:
            found["dimensions"] = count
        case _:
            raise Unrecognized(f"has the outputs {_listed(shapes)}, which are not those of a network for {options.task}")
    return Recognized(_to_recipe(found, options), labels, shapes, metadata.get("license", ""))


def _to_recipe(defaults: Mapping[str, Any], options: Options, **known: Any) -> Recipe:  # noqa: ANN401
    given = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None and name != "labels"}
    try:
        recipe: Recipe = msgspec.convert({**defaults, **given, **known}, Recipe)
    except msgspec.ValidationError as error:
        raise Unrecognized(f"cannot be served so: {error}") from error
    return recipe


def read_hints(network: "onnx.ModelProto") -> ModelParameters:
    """Return what the exporter wrote of the task, the classes and the input."""
    texts = {entry.key: read_literal(entry.value) for entry in network.metadata_props if entry.key in _HINTS}
    return ModelParameters(metadata=repr(texts))


def _input_size(session: Any, options: Options, hints: ModelParameters) -> tuple[int, int]:  # noqa: ANN401
    images = [value for value in session.get_inputs() if value.name != SIZES]
    shape: list[Any] = images[0].shape if len(images) == 1 and images[0].type in ("tensor(float)", "tensor(float16)") else []
    if len(shape) != 4 or (isinstance(shape[1], int) and shape[1] != 3):  # noqa: PLR2004
        found = " and ".join(f"{value.name} {value.type} {value.shape}" for value in session.get_inputs())
        raise Unrecognized(f"takes {found}, but must take one image, FP32 or FP16 (batch, 3, height, width){_OWN}")
    if isinstance(shape[0], int) and shape[0] != 1:
        raise Unrecognized(f"takes only batches of {shape[0]} images; export it again with a dynamic batch, or one of 1")
    wanted = options.size or hints.input_size() or _NAMED.get(options.task, {}).get("size", (None, None))
    width, height = (side if isinstance(side, int) else other for side, other in zip(shape[:1:-1], wanted, strict=True))
    if width is None or height is None:
        raise Unrecognized("does not say the size of its input: say --size 640, or --size 640x384 for width and height")
    if not all(side in range(32, 8193) for side in (width, height)):
        raise Unrecognized(f"takes {width} x {height} pixels; sides of 32 to 8192 can be served")
    if options.size not in (None, (width, height)):
        raise Unrecognized(f"takes {width} x {height} pixels: leave out --size")
    return width, height


def _examine(
    session: Any,  # noqa: ANN401
    size: tuple[int, int],
    heads: Collection[str],
    features: int,
    *,
    is_obb: bool,
) -> dict[str, Evidence]:
    pixels = picture(*size).transpose(2, 0, 1)[None] / 255
    own, order = {name: tensor[0] for name, tensor in _run(session, size, pixels).items()}, ""
    if "dfine" in heads:
        wider = _run(session, (2 * size[0], size[1]), pixels)["boxes"][0]
        has_order = any(value.name == SIZES for value in session.get_inputs())
        is_turned = not np.allclose(wider[:, 1::2], own["boxes"][:, 1::2], 0.01)
        order = "height_width" if is_turned else "width_height" if has_order else "fixed"
    return {head: examine(head, own, size, features, is_obb=is_obb)._replace(sizes=order) for head in heads}


def _told_by(evidence: Evidence, options: Options, features: int) -> dict[str, Any]:
    units = evidence.box_units
    if units and (units != (options.box_units or units) or (features and units != "pixels")):
        why = ": leave out --box-units" if options.box_units else ", as only detectors may have; export it with boxes in pixels"
        raise Unrecognized(f"has boxes in {_UNITS[units]}{why}")
    return ({"box_units": units} if units else {}) | ({"sizes": evidence.sizes} if evidence.sizes else {})


def output_shapes(session: Any, size: tuple[int, int]) -> dict[str, tuple[int, ...]]:  # noqa: ANN401
    """Run a network on a blank image, and return the shapes of its outputs, without the batch."""
    width, height = size
    outputs = _run(session, size, np.zeros((1, 3, height, width)))
    shapes = {name: np.shape(tensor) for name, tensor in outputs.items()}
    if any(shape[:1] != (1,) for shape in shapes.values()):
        raise Unrecognized(f"has outputs without the dimension of the batch, {_listed(shapes)}; export it without NMS")
    return {name: shape[1:] for name, shape in shapes.items()}


def _run(session: Any, size: tuple[int, int], image: NDArray[np.float64]) -> dict[str, NDArray[Any]]:  # noqa: ANN401
    inputs = {value.name: np.array([size]) if value.name == SIZES else image for value in session.get_inputs()}
    feed = {value.name: inputs[value.name].astype(TYPES.get(value.type, np.float32)) for value in session.get_inputs()}
    try:
        return run(session, feed)
    except Exception as error:
        text = f"does not run with {size[0]} x {size[1]} pixels; say another --size, or export it again"
        raise Unrecognized(f"{text}: {first_line(error)}") from error


def _find_features(shapes: Mapping[str, tuple[int, ...]], hints: ModelParameters) -> tuple[str, int, dict[str, Any]]:
    prototypes = [shape for shape in shapes.values() if len(shape) == 3]  # noqa: PLR2004
    match hints.task, prototypes:
        case None | "segmentation", [shape] if len(shapes) == 2:  # noqa: PLR2004
            return "segmentation", shape[0], {"prototypes": shape}
        case "pose", []:
            if keypoints := hints.keypoint_shape():
                names = hints.keypoint_names(keypoints[0])
                return "pose", prod(keypoints), {"keypoints": keypoints, "keypoint_names": names}
            raise Unrecognized("does not say `kpt_shape`, the number of its keypoints, in its metadata; export it with Ultralytics")
        case "obb", []:
            return "obb", 1, {}
        case "segmentation" | "pose" | "obb" as task, _:
            raise Unrecognized(f"has the outputs {_listed(shapes)}, which are not those of Ultralytics' networks for {task}")
    return "detection", 0, {}


def _fit_heads(  # noqa: PLR0913, PLR0917 - what tells heads apart
    network: "onnx.ModelProto",
    shapes: Mapping[str, tuple[int, ...]],
    size: tuple[int, int],
    options: Options,
    metadata: Mapping[str, Any],
    features: int,
) -> dict[str, tuple[int, ...]]:
    # With the possible numbers of classes of each; () if the shapes do not tell them.
    fits: dict[str, tuple[int, ...]] = {}
    match [shape for shape in shapes.values() if not features or len(shape) == 2]:  # noqa: PLR2004 - no prototypes
        case [(classes,)] if classes > 1 and not features:
            default = "probabilities" if _ends_in_probabilities(network) or metadata.get("task") == "classify" else "logits"
            fits = dict.fromkeys(("logits", "probabilities") if options.head else (default,), (classes,))
        case [(rows, columns)]:
            heads = get_args(FeatureHeadName) if features else _SINGLE
            found = {head: count for head in heads if (count := measure([(rows, columns)], head, size, features))}
            if not options.head:
                found = _plausible(found, (rows, columns), size, metadata)
            fits = {head: (classes,) if classes else () for head, (_, classes) in found.items()}
        case _:
            for head, names in TENSORS.items():
                if shapes.keys() == {*names} and (count := measure([shapes[name] for name in names], head, size)):
                    # Without an unused column if the numbers of the classes begin with 1, as those of COCO do.
                    fits[head] = (count[1], count[1] + 1) if head == "rfdetr" else (count[1],) if count[1] else ()
    return fits


def _ends_in_probabilities(network: "onnx.ModelProto") -> bool:
    makers = {name: node for node in network.graph.node for name in node.output}
    node = makers.get(network.graph.output[0].name)
    while node is not None and node.op_type in ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"):
        node = makers.get(node.input[0])
    return node is not None and node.op_type in {"Softmax", "Sigmoid", "HardSigmoid"}


def _plausible(
    found: Mapping[str, tuple[int, int]], shape: tuple[int, int], size: tuple[int, int], metadata: Mapping[str, Any]
) -> dict[str, tuple[int, int]]:
    # Without `--head`, objects found once have few rows, and not one for each anchor.
    usual, (rows, columns) = rows_of_anchors(size), shape
    implausible = {"end_to_end", "rtdetr_topk"} if rows in usual else {"yolov5", "deepstream"}
    if not usual & {rows, columns} or rows in usual.difference(possible_anchors(size)):
        implausible.add("yolo")
    if max(shape) > _MAX_QUERIES or columns in possible_anchors(size):
        implausible.add("rtdetr")
    if metadata.get("task") != "detect":
        implausible.add("rtdetr_topk")
    else:  # Ultralytics
        implausible |= {"yolov5", "yolox", "deepstream"}
        arguments = metadata.get("args")
        if metadata.get("end2end") is True or (isinstance(arguments, dict) and arguments.get("nms") is True):
            implausible |= {"rtdetr", "rtdetr_topk"}
        elif metadata.get("head") == "RTDETRDecoder" and columns == 6:  # noqa: PLR2004 - newer than rows of class scores
            implausible |= {"end_to_end", "rtdetr"}
    return {head: count for head, count in found.items() if head not in implausible}


def _choose(
    fits: Mapping[str, tuple[int, ...]], known: Mapping[str, Evidence], hints: ModelParameters, options: Options
) -> tuple[str, tuple[str, ...]]:
    labels = options.labels or hints.class_names()
    named = [head for head, counts in fits.items() if not (labels and counts) or len(labels) in counts] or [*fits]
    sound = {head: counts for head, counts in fits.items() if head not in known or not known[head].contradiction}
    if not (fitting := {head: counts for head, counts in sound.items() if head in named} or sound):
        what = f"does not fit --head {options.head}" if options.head else "cannot be served"
        raise Unrecognized(f"{what}: {known[named[0]].contradiction}")
    possible = sorted({count for counts in fitting.values() for count in counts}) if all(fitting.values()) else ()
    classes = f"{' or '.join(map(str, possible)) or 'its'} {'class' if possible == [1] else 'classes'}"
    if not labels:
        raise Unrecognized(f"does not name {classes}: say --labels a,b,c or --labels names.txt, with one name for each class")
    heads = [head for head, counts in fitting.items() if not counts or len(labels) in counts]
    if not heads:
        raise Unrecognized(
            f"has {classes}, not {len(labels)}: say --labels a,b,c or --labels names.txt, with one name for each class"
        )
    heads += ["yolov5"] if heads == ["yolo"] and "yolov5" in sound else []  # one name too many looks the same
    # Rows of seven may also be those of oriented boxes.
    if len(heads) > 1 or (heads == ["rtdetr"] and len(labels) == 3 and not options.head and hints.task is None):  # noqa: PLR2004
        raise Unrecognized(f"does not tell the format of its output: say {' or '.join(f'--head {head}' for head in heads)}")
    head = heads[0]
    if head == "rfdetr" and len(labels) == fits[head][0]:
        is_first_unused = known[head].is_first_unused
        if is_first_unused is None and len(labels) == _COCO:
            text = f"has {_COCO + 1} columns for {_COCO} classes: say --labels with {_COCO + 1} names, of which one is N/A"
            raise Unrecognized(f"{text}: the first if ids begin with 1, as in COCO, or the last")
        return head, ("N/A", *labels) if is_first_unused else labels
    return head, labels


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
