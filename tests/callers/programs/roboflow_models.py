"""inference-sdk: the URL of the gateway and a picture; prints lists of models, and errors."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict

from inference_sdk import InferenceConfiguration, InferenceHTTPClient
from inference_sdk.http.errors import HTTPCallErrorError

api_url, path = sys.argv[1:]
client = InferenceHTTPClient(api_url=api_url, api_key="none")


def error_of(call: Callable[..., object], *arguments: object) -> list[object] | None:
    try:
        call(*arguments)
    except HTTPCallErrorError as error:
        return [error.status_code, error.api_message]
    return None


listed = client.list_loaded_models()
added = {name: asdict(client.load_model(name, set_as_default=True))["models"] for name in ("yolo11n", "yolo11n/1")}
found = client.infer(path)
errors = {
    "model": error_of(client.infer, path, "dragon/1"),
    "version": error_of(client.infer, path, "yolo11n/7"),
    "image": error_of(client.infer, __file__),
    "unload": error_of(client.unload_model, "yolo11n/1"),
}
client.configure(InferenceConfiguration(confidence_threshold=40))
errors["confidence"] = error_of(client.infer, path, "yolo11n/1")
errors["async"] = error_of(asyncio.run, client.infer_async(path, "yolo11n/1"))
print(json.dumps({"listed": asdict(listed)["models"], "added": added, "found": found, "errors": errors}))
