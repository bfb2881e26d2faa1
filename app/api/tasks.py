"""What HTTP adds to each task: the parameters of its requests, and the formats of its answers."""

from typing import NamedTuple

from app.api.formats.choice import CLASSIFICATIONS, DETECTIONS, Formats
from app.api.parameters import Parameters
from app.api.task_parameters import ClassifyParameters, DetectParameters
from app.model.heads import ClassificationHead, DetectionHead, Task


class TaskForm(NamedTuple):
    """How requests for a task and their answers look."""

    parameters: type[Parameters]
    formats: Formats
    results: str
    """What the answer consists of, for the log, which has their number."""


FORMS: dict[Task, TaskForm] = {
    DetectionHead.task: TaskForm(DetectParameters, DETECTIONS, "detections"),
    ClassificationHead.task: TaskForm(ClassifyParameters, CLASSIFICATIONS, "classifications"),
}
