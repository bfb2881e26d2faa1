"""What was found comes back from bytes as it was; all other bytes are nothing."""

from typing import Any

import msgspec
import numpy as np
import pytest

from app.cache import entry
from app.detection.nms import Candidates
from app.imaging.transform import Crop, ImageTransform
from app.model.heads import ClassificationHead, DetectionHead, Head, ObbHead, OutputFormat, PoseHead
from app.model.spec import ModelSpec
from app.pipeline.call import Decoded, DetectOptions, Question, TaskOptions
from app.resilience.deadline import Deadline
from tests.cache.conftest import SECRET
from tests.fakes.triton import SPEC

KEY = b"k" * 32
FIT = ImageTransform(0, 4, 32, 24, 640, 480)
RANDOM = np.random.default_rng(1)


def head(kind: type[Any], **more: Any) -> Any:  # noqa: ANN401
    return kind(output_format=OutputFormat.YOLO_HEAD, has_normalized_boxes=False, iou=0.7, max_iou=1.0, **more)


def of(head: Head) -> ModelSpec:
    return msgspec.structs.replace(SPEC, head=head, labels=("red", "blue"))


def candidates(n: int, features: int = 0) -> Candidates:
    corners = RANDOM.uniform(0, 32, (n, 4)).astype(np.float32)
    boxes = np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], axis=1)
    more = RANDOM.uniform(0, 1, (n, features)).astype(np.float32) if features else None
    return Candidates(boxes, RANDOM.uniform(0, 1, n).astype(np.float32), RANDOM.integers(0, 2, n, np.int32), more)


POSE = of(head(PoseHead, features=6, keypoint_names=("nose", "ear")))
CASES: dict[str, tuple[Decoded, Question[Any]]] = {
    "detection": (Decoded(of(head(DetectionHead)), "1", candidates(40), FIT), DetectOptions(None, 0.3, ["red"], 10, iou=0.4)),
    "nothing": (Decoded(of(head(DetectionHead)), "1", candidates(0), FIT), DetectOptions(None, 0.3, None, 10)),
    "pose": (Decoded(POSE, "2", candidates(9, 6), FIT), DetectOptions(None, 0.1, None, 10, task="pose")),
    "obb": (Decoded(of(head(ObbHead, features=1)), "1", candidates(9, 1), FIT), DetectOptions(None, 0.1, None, 10, task="obb")),
    "classification": (
        Decoded(
            of(ClassificationHead(classes=1000, scores="probabilities")),
            "1",
            RANDOM.uniform(0, 1, 1000).astype(np.float32),
            FIT._replace(crop=Crop(1, 2, 300, 300)),
        ),
        TaskOptions("classification", None, 0.1, 5),
    ),
}


def plain(result: Any) -> object:  # noqa: ANN401
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in result]


@pytest.mark.parametrize("case", CASES)
def test_a_stored_result_is_read_as_before(case: str) -> None:
    decoded, question = CASES[case]
    loaded = entry.load(entry.dump(decoded, 0.25, KEY, SECRET), KEY, decoded.spec, SECRET)
    assert loaded is not None
    found, seconds = loaded
    reader = question.reader(decoded.spec)

    assert (found.transform, found.version, seconds) == (decoded.transform, decoded.version, 0.25)
    assert plain(reader.read(found, Deadline.after(60))) == plain(reader.read(decoded, Deadline.after(60)))


def test_altered_and_foreign_bytes_are_rejected() -> None:
    decoded, _ = CASES["pose"]
    value = entry.dump(decoded, 0.25, KEY, SECRET)
    changed = [value[:n] + bytes([value[n] ^ 1]) + value[n + 1 :] for n in range(0, len(value), 37)]

    for other in (b"", value[:-1], value + b"\0", *changed):
        assert entry.load(other, KEY, decoded.spec, SECRET) is None
    assert entry.load(value, b"o" * 32, decoded.spec, SECRET) is None
    assert entry.load(value, KEY, decoded.spec, b"o" * 64) is None
    assert entry.load(value, KEY, decoded.spec, SECRET) is not None
