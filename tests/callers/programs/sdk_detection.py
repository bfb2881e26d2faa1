"""deepstack-sdk: the gateway's address, a folder for output, a key, and pictures; prints what it finds in each, or its error.

Without a key, the first picture is also sent to yolo11n by its name.
"""

import json
import sys
from pathlib import Path

from deepstack_sdk import Detection, ServerConfig
from deepstack_sdk.structs import DetectionResponse

address, folder, key, *pictures = sys.argv[1:]
config = ServerConfig(address, api_key=key or None)
detection = Detection(config)


def described(response: DetectionResponse) -> list[list[object]]:
    return [[one.label, one.confidence, one.x_min, one.y_min, one.x_max, one.y_max] for one in response]


results = {"pictures": []}
for picture in pictures:
    try:
        found = detection.detectObject(picture, min_confidence=0.3, output=f"{folder}/{Path(picture).name}")
        results["pictures"].append(described(found))
    except Exception as error:  # noqa: BLE001 - the client raises no other
        results["pictures"].append(str(error))
if not key:
    results["custom"] = described(Detection(config, "yolo11n").detectObject(pictures[0]))
print(json.dumps(results))
