"""deepstack-python: the settings of DeepstackObject as JSON, and pictures; prints what it finds in each, or its error."""

import json
import sys
from pathlib import Path

from deepstack.core import DeepstackException, DeepstackObject, get_objects_summary

settings, *pictures = sys.argv[1:]
client = DeepstackObject(**json.loads(settings))
results: list[object] = []
for picture in pictures:
    try:
        found = client.detect(Path(picture).read_bytes())
        results.append([found, get_objects_summary(found)])
    except DeepstackException as error:
        results.append(str(error))
print(json.dumps(results))
