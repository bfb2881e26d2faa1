"""deepstack-python or codeproject-ai-api: objects or faces, settings of that class as JSON, and pictures.

Prints what is found in each picture, or its error; for faces, in the end the error of their recognition by names.
"""

import json
import sys
from pathlib import Path

try:
    from codeprojectai.core import CodeProjectAIException as Error
    from codeprojectai.core import CodeProjectAIFace as Face
    from codeprojectai.core import CodeProjectAIObject as Object
except ImportError:
    from deepstack.core import DeepstackException as Error
    from deepstack.core import DeepstackFace as Face
    from deepstack.core import DeepstackObject as Object

kind, settings, *pictures = sys.argv[1:]
client = {"objects": Object, "faces": Face}[kind](**json.loads(settings))
calls = [(client.detect, picture) for picture in pictures]
if kind == "faces":
    calls.append((client.recognize, pictures[0]))
results: list[object] = []
for call, picture in calls:
    try:
        results.append(call(Path(picture).read_bytes()))
    except Error as error:
        results.append(str(error))
print(json.dumps(results))
