"""deepstack-sdk: the gateway's address, a folder for output, a key, and pictures; prints what it finds in each, or its error.

Without a key, the first picture is also sent as an array, as a Pillow image, to yolo11n by its name, and as a video of two frames.
"""

import json
import sys
from pathlib import Path

import cv2
from deepstack_sdk import Detection, ServerConfig
from deepstack_sdk.structs import DetectionResponse
from PIL import Image

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
first = pictures[0]
if not key:
    results["custom"] = described(Detection(config, "yolo11n").detectObject(first))
    results["array"] = described(detection.detectObject(cv2.imread(first), format="png"))
    results["pillow"] = described(detection.detectObject(Image.open(first), format="png"))
    frame = cv2.imread(first)
    video = cv2.VideoWriter(f"{folder}/video.mp4", cv2.VideoWriter_fourcc(*"mp4v"), 24, frame.shape[1::-1])
    for _ in range(2):
        video.write(frame)
    video.release()
    frames = detection.detectObjectVideo(f"{folder}/video.mp4", output=f"{folder}/found.mp4")
    results["video"] = {number: described(found) for number, found in frames.items()}
print(json.dumps(results))
