# ruff: noqa: PLC0415 - each environment has only one of the packages
"""Each function runs in the environment of a client, with its arguments, and returns what is printed as JSON."""

import importlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any


def annotate(*arguments: str) -> object:
    """cvat-cli: return its exit status, or what is wrong with the function according to its last line."""
    from cvat_cli.__main__ import main
    from cvat_sdk.auto_annotation import BadFunctionError

    try:
        return {"status": main(arguments)}
    except BadFunctionError as error:
        return {"error": str(error)}


def deepstack(client_name: str, kind: str, settings: str, *pictures: str) -> object:
    """deepstack-python or codeproject-ai-api: find objects or faces with settings of its class as JSON.

    Returns what is found in each picture, or its error; for faces, in the end the error of their recognition by names.
    """
    package, class_, error_type = {
        "deepstack-python": ("deepstack", "DeepstackObject", "DeepstackException"),
        "codeproject-ai-api": ("codeprojectai", "CodeProjectAIObject", "CodeProjectAIException"),
    }[client_name]
    core = importlib.import_module(f"{package}.core")
    client = getattr(core, class_ if kind == "objects" else class_.replace("Object", "Face"))(**json.loads(settings))
    calls = [(client.detect, picture) for picture in pictures]
    if kind == "faces":
        calls.append((client.recognize, pictures[0]))
    results: list[object] = []
    for call, picture in calls:
        try:
            results.append(call(Path(picture).read_bytes()))
        except getattr(core, error_type) as error:
            results.append(str(error))
    return results


def deepstack_sdk(address: str, folder: str, key: str, *pictures: str) -> object:
    """deepstack-sdk: find objects in each picture, or its error; without a key, also in the first one by the model yolo11n."""
    from deepstack_sdk import Detection, ServerConfig

    config = ServerConfig(address, api_key=key or None)
    detection = Detection(config)

    def described(response: Any) -> list[list[object]]:  # noqa: ANN401 - of a package without types here
        return [[one.label, one.confidence, one.x_min, one.y_min, one.x_max, one.y_max] for one in response]

    results: dict[str, Any] = {"pictures": []}
    for picture in pictures:
        try:
            found = detection.detectObject(picture, min_confidence=0.3, output=f"{folder}/{Path(picture).name}")
            results["pictures"].append(described(found))
        except Exception as error:  # noqa: BLE001 - the client raises no other
            results["pictures"].append(str(error))
    if not key:
        results["custom"] = described(Detection(config, "yolo11n").detectObject(pictures[0]))
    return results


def hub(key: str, name: str, picture: str, parameters: str) -> object:
    """hub-sdk: return the data of a model, its answer, and what the SDK logged."""
    from hub_sdk import HUBClient

    logging.basicConfig(stream=(log := io.StringIO()), format="%(message)s")
    model = HUBClient({"api_key": key}).model(name)
    response = model.predict(picture, json.loads(parameters))
    return {"model": model.data, "answer": response and response.json(), "log": log.getvalue()}


def evaluate(truth: str, found: str, kind: str) -> object:
    """pycocotools: return the 12 statistics, computed as in docs/how-to/evaluate.md."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    ground_truth = COCO(truth)
    ids = ground_truth.getCatIds()
    results = json.loads(Path(found).read_text())
    for result in results:
        result["category_id"] = ids[result["category_id"]]
    evaluation = COCOeval(ground_truth, ground_truth.loadRes(results), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return list(evaluation.stats)


def allow_tokens(address: str, token: str, legacy: str) -> object:
    """label-studio-sdk: allow the legacy tokens of an organization, `on` or `off`; return a personal one, a new one with `off`."""
    from label_studio_sdk import LabelStudio

    client = LabelStudio(base_url=address, api_key=token)
    personal = client.tokens.create().token if legacy == "off" else token  # a user has at most one
    client.jwt_settings.update(api_tokens_enabled=True, api_token_ttl_days=1, legacy_api_tokens_enabled=legacy == "on")
    return personal


def label(address: str, token: str, backend: str, config: str, *pictures: str) -> object:
    """label-studio-sdk: make a project of uploaded pictures with an ML backend; return what Label Studio has of both."""
    import httpx
    from label_studio_sdk import LabelStudio

    client = LabelStudio(base_url=address, api_key=token)
    is_personal = token.startswith("eyJ")
    authorization = f"Bearer {client.tokens.refresh(refresh=token).access}" if is_personal else f"Token {token}"
    project = client.projects.create(title="Nereid", label_config=Path(config).read_text(encoding="utf-8"))
    for picture in map(Path, pictures):  # the SDK does not upload files
        httpx.post(
            f"{address}/api/projects/{project.id}/import",
            headers={"Authorization": authorization},
            files={"file": (picture.name, picture.read_bytes())},
            timeout=60,
        ).raise_for_status()
    ml = client.ml.create(project=project.id, is_interactive=True, **json.loads(backend))
    tasks = list(client.tasks.list(project=project.id, fields="all"))
    opened = client.tasks.get(tasks[0].id)
    client.actions.create(project=project.id, id="retrieve_tasks_predictions")
    client.ml.train(ml.id)
    interactive = client.ml.with_raw_response.predict_interactive(ml.id, task=tasks[0].id)
    return {
        "state": ml.readable_state,
        "model_version": ml.model_version,
        "versions": client.ml.list_model_versions(ml.id).model_dump(exclude_none=True),
        "images": [task.data["image"] for task in tasks],
        "opened": len(opened.predictions),
        "predictions": [[p.result for p in client.predictions.list(task=task.id)] for task in tasks],
        "interactive": interactive._response.json(),  # noqa: SLF001 - the SDK returns no answer
    }


name, *arguments = sys.argv[1:]
print(json.dumps(globals()[name](*arguments)))
