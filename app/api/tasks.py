"""What HTTP adds to each task: the parameters of its requests, and the form of its answers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from app.api.classifications import to_classify_response
from app.api.formatting import to_response
from app.api.parameters import ClassifyParameters, Parameters
from app.model.heads import ClassificationHead, DetectionHead, Task
from app.pipeline.call import Classifications, Detections


class TaskForm(NamedTuple):
    """How requests for a task and their answers look."""

    parameters: type[Any]
    """`Parameters` or its like: it has `timeout_ms`, and `options`, which are the question to the detector."""
    respond: Callable[[Any, Any, float, str], msgspec.Struct]
    """Makes the response from the answer, the parameters, the time in milliseconds and the request id."""
    results: str
    """What the answer consists of, for the log, which has their number."""


def _respond_to_detect(found: Detections, wanted: Parameters, total_time_ms: float, request_id: str) -> msgspec.Struct:
    return to_response(found, wanted.boxes, total_time_ms, request_id)


def _respond_to_classify(found: Classifications, _: ClassifyParameters, total_time_ms: float, request_id: str) -> msgspec.Struct:
    return to_classify_response(found, total_time_ms, request_id)


FORMS: dict[Task, TaskForm] = {
    DetectionHead.task: TaskForm(Parameters, _respond_to_detect, "detections"),
    ClassificationHead.task: TaskForm(ClassifyParameters, _respond_to_classify, "classifications"),
}
