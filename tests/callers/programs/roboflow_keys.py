"""inference-sdk: the URLs of a gateway with keys and of one without Triton, a picture, a key; prints what is found, and errors."""

import json
import sys

from inference_sdk import InferenceConfiguration, InferenceHTTPClient
from inference_sdk.http.errors import HTTPCallErrorError

api_url, lone_url, path, key = sys.argv[1:]
client = InferenceHTTPClient(api_url=api_url, api_key=key).select_model("yolo11n/1")
found, errors = [], []

for transport in ("legacy", "both", "header"):
    client.configure(InferenceConfiguration(api_key_transport=transport))
    found.append(client.infer(path))
    with client.use_api_v0():
        found.append(client.infer(path))

for url in (api_url, lone_url):
    try:
        InferenceHTTPClient(api_url=url, api_key="wrong").select_api_v0().infer(path, "yolo11n/1")
    except HTTPCallErrorError as error:
        errors.append([error.status_code, error.api_message])
print(json.dumps({"found": found, "errors": errors}))
