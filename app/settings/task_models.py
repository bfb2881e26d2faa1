"""The default models of tasks, from the settings."""

from app.settings.schema import Settings

_DEFAULTS = {
    "segmentation": "yolo11n-seg",
    "pose": "yolo11n-pose",
    "obb": "yolo11n-obb",
    "classification": "efficientnet_lite0",
    "text_detection": "ocr_detection",
    "text_recognition": "ocr_recognition",
    "embedding": "embedding",
}


def default_models(settings: Settings) -> dict[str, str]:
    """Return all default models by their settings, such as `MODEL` or `TASK_MODELS=pose`; raises as `task_models`."""
    by_task = task_models(settings).items()
    return {"MODEL": settings.model} | {f"TASK_MODELS={task}": model for task, model in by_task}


def task_models(settings: Settings) -> dict[str, str]:
    """Return the default model of each task that has one of its own; raise ValueError if the setting is not valid."""
    models = _DEFAULTS.copy()
    for given in filter(None, map(str.strip, settings.task_models.split(","))):
        task, _, model = map(str.strip, given.partition("="))
        if task not in models or not model:
            raise ValueError(f"{given!r} is not one of {', '.join(models)}, followed by = and the name of a model")
        models[task] = model
    return models
