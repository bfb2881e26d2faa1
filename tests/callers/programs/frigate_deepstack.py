"""The logic of Frigate's frigate/detectors/plugins/deepstack.py: its settings as JSON, and regions of a camera's image.

Prints, for each region, the rows with an object, or the name of the error that ends Frigate's detection process.
"""

import json
import sys
from pathlib import Path

import requests
from PIL import Image

settings, *regions = sys.argv[1:]
config = json.loads(settings)
labels = config["labelmap"]
session = requests.Session()


def find_label(name: str) -> int:
    """Return the index of a label; -1 for one that is not in the labelmap."""
    name = "car" if name.lower() == "truck" else name.lower()
    return labels.index(name) if name in labels else -1


def detect(region: str) -> list[list[float]]:
    """Return the objects of one region, a JPEG of the size of Frigate's model, as Frigate makes it."""
    width, height = Image.open(region).size
    form, files = {"api_key": config["api_key"]}, {"image": Path(region).read_bytes()}
    answer = session.post(config["api_url"], data=form, files=files, timeout=config["api_timeout"]).json()
    rows: list[list[float]] = [[0.0] * 6 for _ in range(20)]
    for i, found in enumerate(answer.get("predictions") or []):
        label = find_label(found["label"])
        if found["confidence"] < 0.4 or label < 0:
            break
        sides = (found["y_min"] / height, found["x_min"] / width, found["y_max"] / height, found["x_max"] / width)
        rows[i] = [label, found["confidence"], *sides]
    return [row for row in rows if row[1]]


results: list[object] = []
for region in regions:
    try:
        results.append(detect(region))
    except IndexError as error:
        results.append(type(error).__name__)
print(json.dumps(results))
