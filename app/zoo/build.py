"""Build the models of a recognised network: for the check, for the embedded Triton, and in FP16 for production."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from app.host.program import first_line
from app.telemetry.logging import say
from app.zoo import check
from app.zoo.description import Description
from app.zoo.inference import open_session, run
from app.zoo.recipe import DetectionRecipe
from app.zoo.recognize import Recognized, output_shapes

if TYPE_CHECKING:
    import onnx

MIN_F1 = 0.99
# Of FP16. That of other outputs is a share of the largest value.
_MIN_OVERLAP, _SCORE_TOLERANCE, _FEATURE_TOLERANCE, _TOLERANCE = 0.9, 0.05, 0.1, 0.05


def build(content: bytes, recognized: Recognized, *, batch: int | None, is_half: bool = False) -> "onnx.ModelProto":
    """Compose the model of a network; raise what onnx raises."""
    import onnx  # noqa: PLC0415 - heavy, and not installed if only the API runs

    from app.zoo.compose import compose_model  # noqa: PLC0415

    network = onnx.load_from_string(content)
    if is_half:
        from app.zoo.half import to_half  # noqa: PLC0415

        network = to_half(network)
    return compose_model(network, recognized.recipe, shapes=recognized.shapes, batch=batch, classes=len(recognized.labels))


def write_half(file: Path, content: bytes, recognized: Recognized, canvases: Sequence[check.Canvas]) -> str:
    """Write the model of a network in FP16, with batches as they are there; return why there is none, if so."""
    plain = strip_floor(recognized)
    try:
        share = agreement(build(content, plain, batch=1), build(content, plain, batch=1, is_half=True), canvases)
        if share < MIN_F1:
            return f"it finds only {share:.1%} of what it finds in FP32"
        file.write_bytes(build(content, recognized, batch=1, is_half=True).SerializeToString())
    except Exception as error:  # noqa: BLE001 - onnx, its converter and onnxruntime have their own exceptions
        return first_line(error)
    return ""


def say_why_fp32(reference: str, reason: str) -> None:
    """Warn of a model that production runs in FP32, if there is a reason."""
    if reason:
        say(f"warning: {reference} has no model in FP16, so that production runs FP32: {reason}")


def extract(file: Path, model: Description) -> tuple[bytes, Recognized]:
    """Return the network in a composed model, with batches as they are there, and what is known of it."""
    import onnx  # noqa: PLC0415

    from app.zoo.compose import extract_network  # noqa: PLC0415

    content = extract_network(onnx.load(file)).SerializeToString()
    return content, Recognized(model.recipe, model.labels, output_shapes(open_session(content), model.recipe.size), model.licence)


def strip_floor(recognized: Recognized) -> Recognized:
    """Return what to compose for a check: without a floor, and with one class for each box."""
    if isinstance(recognized.recipe, DetectionRecipe):
        return recognized._replace(recipe=msgspec.structs.replace(recognized.recipe, floor=0.0, multi_label=False))
    return recognized


def agreement(model: "onnx.ModelProto", half: "onnx.ModelProto", canvases: Sequence[check.Canvas]) -> float:
    """Return how far a model and that in FP16, composed without a floor, find the same: the F1 of boxes, or the share of values."""
    from app.zoo.half import keep_rounding  # noqa: PLC0415 - heavy

    sessions = open_session(model), open_session(keep_rounding(half), optimizes=False)
    same = total = 0.0
    for canvas in canvases:
        one, other = (run(session, {"image": canvas[None]}) for session in sessions)
        if not all(np.isfinite(tensor).all() for tensor in other.values()):
            return 0.0
        if "num_dets" in one:
            pair = check.detections(one), check.detections(other)
            # Those that a caller gets, or the best ones where there are none.
            least = min(check.CONFIDENCE, *(found.scores.max(initial=0) / 2 for found in pair))
            count = sum(int((found.scores >= least).sum()) for found in pair)
            same += count * check.agreement(
                *pair, _MIN_OVERLAP, _SCORE_TOLERANCE, min_score=least, feature_tolerance=_FEATURE_TOLERANCE
            )
            total += count
        else:
            for name in one.keys() - {"classes"}:  # their scores tell as much
                values, others = one[name].astype(np.float64), other[name].astype(np.float64)
                same += float((np.abs(values - others) <= _TOLERANCE * np.abs(values).max(initial=0)).mean())
                total += 1
    return same / total if total else 1.0
