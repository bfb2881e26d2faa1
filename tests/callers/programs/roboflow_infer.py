"""inference-sdk: the URL of the gateway, a picture and a URL of it; prints what each way to give it finds."""

import asyncio
import json
import sys

import numpy as np
import supervision as sv
from inference_sdk import InferenceConfiguration, InferenceHTTPClient
from PIL import Image

api_url, path, url = sys.argv[1:]
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
print(json.dumps({"found": found, "each": each, "batch": batch, "supervision": supervision}))
