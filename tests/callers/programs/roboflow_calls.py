"""inference-sdk: what is to be called, the URL of the gateway, a picture, and more; prints what is found, and errors."""

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import supervision as sv
from inference_sdk import InferenceConfiguration, InferenceHTTPClient, VisualisationResponseFormat
from inference_sdk.http.errors import HTTPCallErrorError
from PIL import Image


def error_of(call: Callable[..., object], *arguments: object) -> list[object] | None:
    try:
        call(*arguments)
    except HTTPCallErrorError as error:
        return [error.status_code, error.api_message]
    return None


def infer(api_url: str, path: str, url: str) -> object:
    client = InferenceHTTPClient(api_url=api_url, api_key="none").select_model("yolo11n/1")
    image = Image.open(path)
    array = np.asarray(image)[:, :, ::-1]
    found = {"path": client.infer(path), "url": client.infer(url), "image": client.infer(image), "array": client.infer(array)}
    found["async"] = asyncio.run(client.infer_async(path))
    with client.use_api_v0():
        found["v0"] = client.infer(path)
        found["v0 async"] = asyncio.run(client.infer_async(path))
    each = client.infer([path, url])
    with client.use_configuration(InferenceConfiguration(max_batch_size=2)):
        batch = client.infer([path, url])
    with client.use_configuration(InferenceConfiguration(client_downsizing_disabled=False)):
        found["smaller"] = client.infer(path)
    detections = sv.Detections.from_inference(found["path"])
    supervision = [detections.xyxy.tolist(), detections.confidence.tolist(), detections.data["class_name"].tolist()]
    return {"found": found, "each": each, "batch": batch, "supervision": supervision}


def configure(api_url: str, path: str) -> object:
    """Change the configuration; the sizes of pictures are apart from what is found."""
    client = InferenceHTTPClient(api_url=api_url, api_key="none").select_model("yolo11n/1")
    usual = InferenceConfiguration(confidence_threshold=0.3, iou_threshold=0.4, max_detections=2)
    pictures = {"visualize_predictions": True, "output_visualisation_format": VisualisationResponseFormat.NUMPY}
    changes = {
        "usual": {},
        "filter": {"class_filter": ["cup", "dragon"]},
        "dragons": {"class_filter": ["dragon"]},
        "best": {"confidence_threshold": "best", "class_agnostic_nms": True},
        "picture": pictures,
    }
    found = {}
    for name, change in changes.items():
        with client.use_configuration(replace(usual, **change)):
            found[name] = client.infer(path)
    with client.use_api_v0():
        for format_ in ("json", "image", "image_and_json"):
            with client.use_configuration(replace(usual, format=format_, **pictures)):
                found[format_] = client.infer(path)
    sizes = [found[name].pop("visualization").shape for name in ("picture", "image", "image_and_json")]
    return {"found": found, "sizes": sizes}


def models(api_url: str, path: str) -> object:
    client = InferenceHTTPClient(api_url=api_url, api_key="none")
    listed = client.list_loaded_models()
    added = {name: asdict(client.load_model(name, set_as_default=True))["models"] for name in ("yolo11n", "yolo11n/1")}
    errors = {
        "model": error_of(client.infer, path, "dragon/1"),
        "version": error_of(client.infer, path, "yolo11n/7"),
        "image": error_of(client.infer, __file__),
        "unload": error_of(client.unload_model, "yolo11n/1"),
    }
    client.configure(InferenceConfiguration(confidence_threshold=40))
    errors["confidence"] = error_of(client.infer, path, "yolo11n/1")
    errors["async"] = error_of(asyncio.run, client.infer_async(path, "yolo11n/1"))
    return {"listed": asdict(listed)["models"], "added": added, "errors": errors}


def keys(api_url: str, path: str, lone_url: str, key: str) -> object:
    """Send a key in each way, and a wrong one, also to a gateway without Triton."""
    client = InferenceHTTPClient(api_url=api_url, api_key=key).select_model("yolo11n/1")
    found = []
    for transport in ("legacy", "both", "header"):
        client.configure(InferenceConfiguration(api_key_transport=transport))
        found.append(client.infer(path))
        with client.use_api_v0():
            found.append(client.infer(path))
    clients = [InferenceHTTPClient(api_url=url, api_key="wrong").select_api_v0() for url in (api_url, lone_url)]
    return {"found": found, "errors": [error_of(wrong.infer, path, "yolo11n/1") for wrong in clients]}


def text(api_url: str, page: str, photo: str) -> object:
    client = InferenceHTTPClient(api_url=api_url, api_key="none")
    return {
        "plain": client.ocr_image(page, model="pp_ocr", generate_bounding_boxes=False),
        "list": client.ocr_image([page, photo], model="pp_ocr"),
        "async": asyncio.run(client.ocr_image_async(page, model="pp_ocr")),
        "doctr": error_of(client.ocr_image, page),
    }


what, *arguments = sys.argv[1:]
print(json.dumps({"infer": infer, "configure": configure, "models": models, "keys": keys, "text": text}[what](*arguments)))
