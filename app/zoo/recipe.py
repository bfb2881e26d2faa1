"""Recipes: what a network's file does not say about the model to compose from it; and the heads that they name."""

from collections.abc import Sequence
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from app.detection.nms import MAX_DETECTIONS, MIN_SCORE
from app.model.anchors import is_transposed, possible_anchors
from app.model.golden import MEANS, ROWS, SAMPLE
from app.model.triton_config import Interpolation, Placement, Resize, ScoreKind

_Side = Annotated[int, Meta(ge=32, le=8192)]
_Value = Annotated[float, Meta(ge=-1e6, le=1e6)]
_Divisor = Annotated[float, Meta(gt=0, le=1e6)]
_Count = Annotated[int, Meta(ge=1, le=8192)]
_Name = Annotated[str, Meta(min_length=1, max_length=256)]

Architecture = Literal["efficientnet_lite0", "efficientnet_lite0_features", "centerface", "dlib_resnet"]
"""Networks whose file contains only weights, or has to be changed: `load_network` in `compose` builds them."""
_Detr = Literal["detr", "detr_sigmoid"]
DetectionHeadName = Literal[
    "yolo", "yolov5", "yolox", "deepstream", "end_to_end", "four_tensors", "rtdetr", "rtdetr_topk", "rfdetr", "dfine", _Detr
]
FeatureHeadName = Literal["yolo", "end_to_end"]
"""Heads of networks that give features of each object: Ultralytics' for segmentation, poses and oriented boxes."""
RAW_HEADS = ("yolo", "yolov5", "yolox", "deepstream")
"""Heads with duplicate detections, which the composed model suppresses. The others find each object once."""
PIXELS = ("yolo", "yolov5", "deepstream", "end_to_end", "four_tensors", "dfine")
"""Heads whose boxes are in pixels, or in fractions of the input if `box_units` says so."""
FRACTIONS = ("rtdetr", "rtdetr_topk", "rfdetr", "detr", "detr_sigmoid")
"""Heads whose boxes are always in fractions of the input."""
MULTI_CLASS = ("rfdetr", "detr_sigmoid")
"""Heads of which a row may be several objects, of several classes."""
TENSORS = {
    "rfdetr": ("dets", "labels"),
    **dict.fromkeys(("detr", "detr_sigmoid"), ("pred_boxes", "logits")),
    "dfine": ("labels", "boxes", "scores"),
    "four_tensors": ("num_dets", "det_boxes", "det_scores", "det_classes"),
}
"""Names of the outputs of heads of several tensors."""
SIZES = "orig_target_sizes"
"""The second input of a network with the head `dfine`, INT64 (batch, 2): the size that its boxes refer to, as `sizes` says."""
ALIASES = {
    ("num_predictions", "pred_boxes", "pred_scores", "pred_classes"): TENSORS["four_tensors"],
    ("num_detections", "nmsed_boxes", "nmsed_scores", "nmsed_classes"): TENSORS["four_tensors"],
}
"""Names of the same outputs in exports of others: YOLO-NAS, TensorRT's older NMS."""
Outputs = dict[str, tuple[str, tuple[int, ...]]]
"""Types and shapes, without the batch, of the outputs of a composed model."""
DETECTIONS: Outputs = {
    "num_dets": ("INT32", (1,)),
    "det_boxes": ("FP32", (MAX_DETECTIONS, 4)),
    "det_scores": ("FP32", (MAX_DETECTIONS,)),
    "det_classes": ("INT32", (MAX_DETECTIONS,)),
}
"""What a detector gives besides the outputs of its recipe."""
ANCHORS_OF_SAMPLE = 64
"""Anchors whose width and height are in the sample of a raw head."""


class _Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="task"):
    """Properties of a network for composing a model; subclasses add those of a task."""

    architecture: Architecture | None = None
    """Architecture of the network; None if the file is the ONNX network itself."""
    size: tuple[_Side, _Side]
    """Width and height of the input, in pixels; those of a blank image, where they follow the image's size."""
    channels: Literal["RGB", "BGR"] = "RGB"
    scale: _Divisor = 255.0
    """Divisor of each byte."""
    mean: tuple[_Value, _Value, _Value] = (0.0, 0.0, 0.0)
    """For each channel, in the order of `channels`: each byte, after division by `scale`, becomes (value - mean) / std."""
    std: tuple[_Divisor, _Divisor, _Divisor] = (1.0, 1.0, 1.0)
    resize: Resize = "letterbox"
    """How images are fitted to the input, outside of the model; this and the fields up to `shapes` as in a model's config."""
    placement: Placement = "center"
    crop: Annotated[float, Meta(gt=0, le=1)] | None = None
    interpolation: Interpolation = "bilinear"
    pad: Annotated[int, Meta(ge=0, le=255)] | None = None
    widths: tuple[_Side, ...] | None = None
    shapes: tuple[tuple[_Side, _Side], ...] = ()

    @property
    def input_shape(self) -> tuple[int, int]:
        """Height and width of the model's input, -1 where it follows the image's size."""
        width, height = self.size
        if self.resize == "text" or self.shapes:
            return -1, -1
        return height, (-1 if len(self.widths or ()) > 1 else width)

    @property
    def task(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def outputs(self) -> Outputs:
        """Outputs of the composed model; of a detector's, those of the features."""
        return {}


class DetectionRecipe(_Recipe, frozen=True, kw_only=True, tag="detection"):
    """Recipe of a detector."""

    head: DetectionHeadName
    """Format of the outputs, without the batch; the scores are final except where it says otherwise.
    `yolo`: (4 + classes, anchors) centre, size, scores; or transposed.
    `yolov5`: (rows, 5 + classes) centre, size, objectness, scores; also of YOLOv6, YOLOv7 and YOLOX exported with decoded boxes.
    `yolox`: (anchors, 5 + classes) as `yolov5`, but centre and size are encoded in cells of the strides 8, 16 and 32.
    `deepstream`: (anchors, 6) x1 y1 x2 y2 score class, not suppressed, as DeepStream-Yolo exports.
    `end_to_end`: (rows, 6) x1 y1 x2 y2 score class; of oriented boxes centre, size, score, class.
    `four_tensors`: `num_dets` (1), `det_boxes` (rows, 4) x1 y1 x2 y2, `det_scores` (rows), `det_classes` (rows), of EfficientNMS.
    `rtdetr`: (rows, 4 + classes) centre and size as fractions of the input, scores.
    `rtdetr_topk`: (rows, 6) centre and size as fractions of the input, score, class.
    `rfdetr`: `dets` (rows, 4) centre and size as fractions, `labels` (rows, classes + 1) logits, the last one unused.
    `dfine`: `labels` (rows), `boxes` (rows, 4) x1 y1 x2 y2, `scores` (rows), mostly with a second input `orig_target_sizes`.
    `detr`: `pred_boxes` (rows, 4) as `dets`, `logits` (rows, classes + 1) for softmax, the last one no object, of Hugging Face.
    `detr_sigmoid`: `pred_boxes` (rows, 4), `logits` (rows, classes), each for a sigmoid, of their RT-DETR and D-FINE.
    The features of a subclass follow the scores of `yolo`, and the class of `end_to_end`."""
    iou: Annotated[float, Meta(ge=0, le=1)] = 0.7
    """Overlap above which two boxes of a class are one object; always 1 for heads that find each object once."""
    box_units: Literal["pixels", "normalized"] = "pixels"
    """Unit of the boxes of the heads in `PIXELS`; the boxes of the composed model are always in pixels."""
    sizes: Literal["width_height", "height_width", "fixed"] = "width_height"
    """Order in the second input of the head `dfine`; `fixed` if the size is in the network."""
    floor: Annotated[float, Meta(ge=0, lt=1)] = MIN_SCORE
    """Detections count above this score."""
    multi_label: bool = False
    """Whether an anchor of a raw head counts for each class whose score is above the floor, and not only for the best one."""

    @property
    def sample(self) -> Outputs:
        """Raw values, which tell nothing where nothing is found from zeros."""
        # Of a raw head, widths and heights of some anchors, and the mean of all. The order of other heads' rows follows from
        # rounding: their mean, x1 y1 x2 y2, and the share of rows with a score.
        return {SAMPLE: ("FP32", (2 * ANCHORS_OF_SAMPLE + MEANS if self.head in RAW_HEADS else ROWS,))}

    @property
    def features(self) -> int:
        """Number of values of each object besides its box, score and class: those of the first output."""
        return next((prod(shape[1:]) for _, shape in self.outputs.values()), 0)

    def __post_init__(self) -> None:
        if self.resize in {"text", "line"}:
            raise ValueError(f"resize {self.resize} is for text")
        if self.head not in RAW_HEADS:
            msgspec.structs.force_setattr(self, "iou", 1.0)
            if self.multi_label:
                raise ValueError(f"multi_label is for the heads {', '.join(RAW_HEADS)}")
        if self.features and self.box_units == "normalized":
            raise ValueError("box_units is for detectors")


class SegmentationRecipe(DetectionRecipe, frozen=True, kw_only=True, tag="segmentation"):
    """Recipe of a network for instance segmentation; the features are coefficients of the prototypes, its second output."""

    head: FeatureHeadName
    prototypes: tuple[_Count, _Count, _Count]
    """Shape of the prototypes: number, height, width."""

    @property
    def outputs(self) -> Outputs:
        """Coefficients and prototypes."""
        # FP16 halves the bytes on the way to the gateway.
        planes = (self.prototypes[0], -1, -1) if self.shapes else self.prototypes
        return {"det_masks": ("FP32", (MAX_DETECTIONS, self.prototypes[0])), "prototypes": ("FP16", planes)}


class PoseRecipe(DetectionRecipe, frozen=True, kw_only=True, tag="pose"):
    """Recipe of a network for poses; the features are keypoints."""

    head: FeatureHeadName
    keypoints: tuple[_Count, Literal[2, 3]]
    """Number of keypoints, and of the values of each: x y in pixels of the input, and perhaps the visibility, 0 to 1."""
    keypoint_names: tuple[_Name, ...] = ()

    @property
    def outputs(self) -> Outputs:
        """Keypoints."""
        return {"det_keypoints": ("FP32", (MAX_DETECTIONS, *self.keypoints))}


class ObbRecipe(DetectionRecipe, frozen=True, kw_only=True, tag="obb"):
    """Recipe of a network for oriented boxes; the feature is the angle in radians, about the centre of the box."""

    head: FeatureHeadName

    @property
    def outputs(self) -> Outputs:
        """Angles."""
        return {"det_angles": ("FP32", (MAX_DETECTIONS,))}


class ClassificationRecipe(_Recipe, frozen=True, kw_only=True, tag="classification"):
    """Recipe of a classification network."""

    head: ScoreKind
    """Kind of scores in the output (classes)."""


class TextDetectionRecipe(_Recipe, frozen=True, kw_only=True, tag="text_detection"):
    """Recipe of a network with one output (1, height, width): the probability of each pixel of the input that it is text."""

    head: ClassVar[str] = "text_map"

    @property
    def outputs(self) -> Outputs:
        """The map, of 255: a quarter of the bytes on the way to the gateway, and a threshold of .3 separates the same pixels."""
        return {"text_map": ("UINT8", self.input_shape)}


class TextRecognitionRecipe(_Recipe, frozen=True, kw_only=True, tag="text_recognition"):
    """Recipe of a network with one output (steps, classes): the probabilities of the blank and of each character."""

    head: ClassVar[str] = "steps"

    @property
    def outputs(self) -> Outputs:
        """The best class of each step, and its probability."""
        return {"classes": ("INT32", (-1,)), "scores": ("FP32", (-1,))}


class EmbeddingRecipe(_Recipe, frozen=True, kw_only=True, tag="embedding"):
    """Recipe of a network with one output (dimensions), a vector."""

    head: ClassVar[str] = "embedding"
    dimensions: _Count
    landmarks: tuple[Annotated[float, Meta(ge=0, le=1)], ...] = ()
    """This and the next field as in a model's config."""
    match_distance: _Divisor | None = None

    @property
    def outputs(self) -> Outputs:
        """The vector."""
        return {"embedding": ("FP32", (self.dimensions,))}


NamedTask = Literal["text_detection", "text_recognition", "embedding"]
"""Tasks that the outputs of a network do not tell."""
NamedRecipe = TextDetectionRecipe | TextRecognitionRecipe | EmbeddingRecipe
Recipe = DetectionRecipe | SegmentationRecipe | PoseRecipe | ObbRecipe | ClassificationRecipe | NamedRecipe


def measure(shapes: Sequence[Sequence[int]], head: str, size: tuple[int, int], features: int = 0) -> tuple[int, int] | None:
    """Return the numbers of rows and classes of a detector's outputs, 0 if they are not known; None if they cannot be this head."""
    # The shapes, with 0 for dynamic dimensions, are those without the batch and prototypes, in the order of `TENSORS`.
    anchors, found = possible_anchors(size), None
    match head, [tuple(shape) for shape in shapes]:
        case "yolo", [shape]:
            rows, channels = shape if is_transposed(shape, size) else shape[::-1]
            found = (rows, channels - 4 - features) if rows in (0, *anchors) or rows > channels else None
        case "yolov5", [(rows, columns)] if rows == 0 or rows > columns:
            found = rows, columns - 5
        case "yolox", [(rows, columns)] if rows in (0, anchors[0]):
            found = rows, columns - 5
        case "rtdetr", [(rows, columns)] if rows > 0:
            found = rows, columns - 4
        case "rfdetr" | "detr" | "detr_sigmoid", [(rows, 4), (others, columns)] if others == rows > 0:
            found = rows, columns - (head != "detr_sigmoid")
        case "end_to_end", [(rows, columns)] if rows > 0 and columns == 6 + features:
            return rows, 0
        case ("rtdetr_topk" | "deepstream", [(rows, 6)]) | ("dfine", [(rows,), (_, 4), (_,)]) if rows > 0:
            return rows, 0
        case "four_tensors", [(1,), (rows, 4), (_,), (_,)] if rows > 0:
            return rows, 0
    return found if found and found[1] > 0 else None
