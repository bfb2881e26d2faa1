"""Check a composed model: it must find in photos what its network finds with a textbook post-processing."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.classification.outputs import softmax
from app.detection import nms
from app.detection.nms import Candidates
from app.errors import GatewayError
from app.host.program import CommandError
from app.imaging.photos import draw_on_canvas
from app.model.anchors import is_transposed
from app.model.golden import MEANS, Golden, picture
from app.model.outputs import MAX_PROBABILITY
from app.model.spec import ModelSpec
from app.obb import boxes as obb
from app.pipeline.golden import read_golden
from app.pipeline.probe import smallest_size
from app.zoo.inference import TYPES, run
from app.zoo.recipe import (
    FRACTIONS,
    MULTI_CLASS,
    PIXELS,
    SIZES,
    TENSORS,
    ClassificationRecipe,
    DetectionRecipe,
    EmbeddingRecipe,
    NamedRecipe,
    ObbRecipe,
    Recipe,
    TextDetectionRecipe,
)

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

MIN_BOXES = 20
"""Boxes below which the check says little."""
CONFIDENCE = 0.25
"""The default of requests."""
_COMPARED = 100
_MIN_OVERLAP = 0.98
_SCORE_TOLERANCE = 2e-3
_SAME_PIXELS = 0.01
_FEATURE_TOLERANCE = 0.02
_FEATURES = ("det_masks", "det_keypoints", "det_angles")
_PLANES = 3
"""Dimensions of the prototypes of an image."""
_BATCH_TOLERANCES = {
    **dict.fromkeys(("det_scores", "probabilities"), _SCORE_TOLERANCE),
    **dict.fromkeys(("det_masks", "det_angles", "prototypes"), _FEATURE_TOLERANCE),
    "num_dets": 0.5,
    **dict.fromkeys(("det_boxes", "det_keypoints", "text_map"), 1.0),
    "scores": _SCORE_TOLERANCE,
    "embedding": 1e-2,
}

Tensors = Mapping[str, NDArray[Any]]
Canvas = NDArray[np.uint8]


class Report(NamedTuple):
    """What the check of a model found."""

    f1: float
    """Agreement of the best candidates, or of the classes of a classifier, 0 to 1."""
    boxes: int
    """Boxes in all samples with the default confidence."""
    has_fractions: bool
    """Whether the boxes look like fractions of the input, although their unit is pixels."""
    milliseconds: float
    """Time of the model for one image with one thread."""
    is_plausible: bool
    """Whether all scores are between 0 and 1, and no box lies far outside of the input."""
    has_shares: bool
    """Whether the logits of a classifier look like probabilities."""
    classes: int
    """Number of classes, as far as they were seen."""


def separates_images(session: "InferenceSession", size: tuple[int, int], images: int) -> bool:
    """Return whether a model, composed without a floor, gives each image of a batch the results that it has alone."""
    batch = np.random.default_rng(0).integers(0, 256, (images, size[1], size[0], 3), np.uint8)
    together = run(session, {"image": batch})
    return all(
        len(together[name]) == images and np.allclose(together[name][index], tensor[0], rtol=1e-3, atol=atol, equal_nan=True)
        for index in range(images)
        for name, tensor in run(session, {"image": batch[index : index + 1]}).items()
        if (atol := _BATCH_TOLERANCES.get(name))
    )


def draw_samples(folder: Path, spec: ModelSpec) -> list[Canvas]:
    """Fit the images in a folder to a model's input, UINT8 (height, width, 3); raise CommandError if there are none."""
    canvases = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            canvases.append(draw_on_canvas(path.read_bytes(), spec))
        except (GatewayError, OSError):  # not an image, or a damaged one
            continue
    if not canvases:
        raise CommandError(f"there is no image in {folder}")
    return canvases


def check(
    network: "InferenceSession", model: "InferenceSession", recipe: Recipe, classes: int, canvases: Sequence[Canvas]
) -> Report:
    """Compare a model, composed without a floor of its scores, with its network of this many classes."""
    rates, boxes, has_fractions, seconds, last_class, is_plausible = [], 0, True, [], -1, True
    has_shares = recipe.head == "logits"
    for canvas in canvases:
        outputs = run(network, _feed(network, canvas, recipe))
        start = perf_counter()
        found = run(model, {"image": canvas[None]})
        seconds.append(perf_counter() - start)
        if not isinstance(recipe, DetectionRecipe):
            (values,) = outputs.values()
            rates.append(_agree(found, values[0], recipe))
            is_plausible &= bool(np.isfinite(values).all()) if recipe.head in {"embedding", "logits"} else _is_share(values)
            has_shares &= _is_share(values)
            continue
        expected, own = textbook(outputs, recipe, classes), detections(found)
        rates.append(agreement(own, expected, _MIN_OVERLAP, _SCORE_TOLERANCE))
        if (planes := found.get("prototypes")) is not None:
            own_planes = next(tensor for tensor in outputs.values() if tensor.ndim > _PLANES)
            rates.append(float(np.allclose(planes, own_planes, 0.01, _FEATURE_TOLERANCE)))
        is_plausible &= _is_share(expected.scores) and bool((np.abs(expected.boxes[:_COMPARED]) <= 10 * max(recipe.size)).all())
        last_class = max(last_class, int(expected.class_ids.max(initial=-1)))
        seen = own.boxes[own.scores >= CONFIDENCE]
        boxes += len(seen)
        has_fractions &= not len(seen) or float(np.abs(seen).max()) <= 2  # noqa: PLR2004 - pixels of a detector's input are more
    return Report(min(rates), boxes, has_fractions and boxes > 0, 1e3 * min(seconds), is_plausible, has_shares, last_class + 1)


def _agree(found: Tensors, own: NDArray[Any], recipe: ClassificationRecipe | NamedRecipe) -> float:
    # The share of the values that are those of the network's output, of a classifier 0 or 1.
    if isinstance(recipe, ClassificationRecipe):
        expected = own if recipe.head == "probabilities" else softmax(own)
        return float(np.allclose(found["probabilities"][0], expected, rtol=0.01, atol=1e-4))
    if isinstance(recipe, EmbeddingRecipe):
        same = np.isclose(found["embedding"][0], own, 0.01, 1e-3 * np.abs(own).max())
    elif isinstance(recipe, TextDetectionRecipe):
        same = np.abs(found["text_map"][0] - 255.0 * own[0]) <= 1
    else:
        chosen = np.take_along_axis(own, found["classes"][0][:, None], 1)[:, 0]
        same = np.isclose(found["scores"][0], own.max(1), 0, _SCORE_TOLERANCE) & (chosen >= own.max(1) - _SCORE_TOLERANCE)
    return float(same.mean())


def compare(one: "InferenceSession", other: "InferenceSession", canvases: Sequence[Canvas]) -> tuple[int, int]:
    """Return how many of the boxes of two detectors agree in class and place, and how many both have on average."""
    agreeing = total = 0.0
    for canvas in canvases:
        pair = [detections(run(session, {"image": canvas[None]}), CONFIDENCE)._replace(features=None) for session in (one, other)]
        count = sum(len(found.scores) for found in pair) / 2
        total += count
        agreeing += agreement(pair[0], pair[1], 0.5, 1.0) * count
    return round(agreeing), round(total)


def detections(outputs: Tensors, confidence: float = 0.0) -> Candidates:
    """Return the valid rows of a composed detector's outputs for one image."""
    (count,) = outputs["num_dets"][0]
    boxes, scores, classes = (outputs[name][0, :count] for name in ("det_boxes", "det_scores", "det_classes"))
    features = [outputs[name][0, :count] for name in _FEATURES if name in outputs]
    columns = features[0].reshape(count, prod(features[0].shape[1:])) if features else None
    return Candidates(boxes, scores, classes, columns).take(np.flatnonzero(scores >= confidence))


def textbook(outputs: Tensors, recipe: DetectionRecipe, classes: int) -> Candidates:
    """Decode a detection network's outputs for one image, without a floor; boxes in pixels of the input, by descending score."""
    tensors = {name: tensor[0].astype(np.float32) for name, tensor in outputs.items()}
    first = next(tensor for tensor in tensors.values() if tensor.ndim < _PLANES)
    is_obb, size = isinstance(recipe, ObbRecipe), np.array(recipe.size * 2, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # of what another head would make of these numbers
        if recipe.head == "yolox":
            found = nms.from_yolox(first, recipe.size, 0)
        elif recipe.head == "yolov5":
            found = nms.from_yolov5(first, 0)
        elif recipe.head in {"end_to_end", "rtdetr_topk", "deepstream"}:
            boxes = first[:, :4] if recipe.head != "rtdetr_topk" and not is_obb else nms.to_corners(first[:, :4])
            class_ids = np.round(first[:, 5]).astype(np.int32)
            found = Candidates(boxes, first[:, 4], class_ids, first[:, 6:] if recipe.features else None)
        elif recipe.head == "four_tensors":
            count = int(tensors["num_dets"][0])
            boxes, scores, class_ids = (tensors[name][:count] for name in TENSORS["four_tensors"][1:])
            found = Candidates(boxes, scores, np.round(class_ids).astype(np.int32))
        elif recipe.head == "dfine":
            found = Candidates(tensors["boxes"], tensors["scores"], outputs["labels"][0].astype(np.int32))
        elif recipe.head == "detr":
            scores = softmax(tensors["logits"])[:, :-1]
            found = Candidates(nms.to_corners(tensors["pred_boxes"]), scores.max(1), scores.argmax(1).astype(np.int32))
        elif recipe.head in MULTI_CLASS:
            boxes, logits = (tensors[name] for name in TENSORS[recipe.head])
            logits, boxes = logits[:, :classes], np.repeat(nms.to_corners(boxes), classes, axis=0)
            class_ids = np.tile(np.arange(classes, dtype=np.int32), len(logits))
            found = Candidates(boxes, (1 / (1 + np.exp(-logits))).ravel(), class_ids)
        else:
            is_upright = recipe.head == "yolo" and not is_transposed(first.shape, recipe.size)
            found = nms.from_yolo(first if is_upright else first.T, 0, recipe.features)
        if recipe.head in FRACTIONS or (recipe.head in PIXELS and recipe.box_units == "normalized"):
            found = found._replace(boxes=found.boxes * size)
        found = found.take(np.flatnonzero(found.scores > 0))  # other rows are padding
        found = found.take(np.argsort(-found.scores, kind="stable")[: nms.MAX_CANDIDATES])
        if recipe.iou == 1:
            return found
        return found.take((obb if is_obb else nms).suppress(found, found.class_ids, recipe.iou))


def golden(session: "InferenceSession", spec: ModelSpec) -> Golden:
    """Return what a composed model finds in the golden picture, as far as noise does not change it; `spec` is of its pixels."""
    pixels = picture(*smallest_size(spec))[None]
    found, noisy = (read_golden(spec, run(session, {spec.input_name: each})) for each in (pixels, pixels ^ 1))
    samples = (found.sample, found.sample[-MEANS:], ())
    return next((golden for golden in (Golden(each, found.boxes) for each in samples) if not golden.difference(noisy)), Golden())


def _is_share(scores: NDArray[Any]) -> bool:
    return bool(((scores >= 0) & (scores <= MAX_PROBABILITY)).all())


def agreement(  # noqa: PLR0913 - what is equal
    one: Candidates,
    other: Candidates,
    min_overlap: float,
    score_tolerance: float,
    *,
    min_score: float = 0.0,
    feature_tolerance: float = _FEATURE_TOLERANCE,
) -> float:
    """Return the F1 of the best boxes of two results: equal ones have the same class and almost the same rest."""
    counts = []
    for found, expected in ((one, other), (other, one)):
        best = found.take(np.flatnonzero(found.scores >= min_score)[:_COMPARED])
        hits = 0
        for row, (box, score, class_id) in enumerate(zip(best.boxes, best.scores, best.class_ids, strict=True)):
            alike = (expected.class_ids == class_id) & (np.abs(expected.scores - score) <= score_tolerance)
            if best.features is not None and expected.features is not None:
                alike &= np.isclose(expected.features, best.features[row], 0.01, feature_tolerance).all(axis=1)
            hits += bool((_overlaps(box, expected.boxes[alike]) >= min_overlap).any())
        counts.append((hits, len(best.scores)))
    (right, found_count), (recalled, expected_count) = counts
    return 1.0 if found_count == expected_count == 0 else (right + recalled) / (found_count + expected_count)


def _feed(network: "InferenceSession", canvas: Canvas, recipe: Recipe) -> dict[str, NDArray[Any]]:
    rgb = canvas if recipe.channels == "RGB" else canvas[:, :, ::-1]
    normalized = (rgb / np.float64(recipe.scale) - recipe.mean) / recipe.std
    is_turned = isinstance(recipe, DetectionRecipe) and recipe.sizes == "height_width"
    feed: dict[str, NDArray[Any]] = {}
    for tensor in network.get_inputs():
        value = (
            np.array([recipe.size[::-1] if is_turned else recipe.size])
            if tensor.name == SIZES
            else normalized.transpose(2, 0, 1)[None]
        )
        feed[tensor.name] = np.ascontiguousarray(value, TYPES[tensor.type])
    return feed


def _overlaps(box: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    # Intersection over union of a box (4,) with boxes (n, 4); 1 for equal boxes without an area.
    with np.errstate(over="ignore", invalid="ignore"):  # areas of huge boxes may overflow
        sides = np.clip(np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2]), 0, None)
        shared, areas = sides.prod(axis=1), (others[:, 2:] - others[:, :2]).prod(axis=1)
        union = (box[2:] - box[:2]).prod() + areas - shared
        overlaps: NDArray[np.float32] = shared / np.where(union > 0, union, 1)
        overlaps[np.abs(others - box).max(axis=1, initial=0) <= _SAME_PIXELS] = 1
    return overlaps
