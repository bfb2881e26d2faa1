"""inference-sdk: the URL of the gateway and a picture; prints what is found with a configuration, and the sizes of pictures."""

import json
import sys
from dataclasses import replace

from inference_sdk import InferenceConfiguration, InferenceHTTPClient, VisualisationResponseFormat

api_url, path = sys.argv[1:]
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
print(json.dumps({"found": found, "sizes": sizes}))
