"""The default models of tasks."""

from app.settings.schema import Settings
from app.settings.task_models import task_models


def test_models_that_are_not_named_keep_their_defaults() -> None:
    settings = Settings(task_models=" pose = people, obb=ships,")

    assert task_models(settings) == {
        "segmentation": "yolo11n-seg",
        "pose": "people",
        "obb": "ships",
        "classification": "efficientnet_lite0",
        "text_detection": "ocr_detection",
        "text_recognition": "ocr_recognition",
        "embedding": "embedding",
    }
