"""deepstack-python or codeproject-ai-api: host and port of the gateway, and pictures; prints faces, and what names of faces say."""

import json
import sys
from pathlib import Path

try:
    from codeprojectai.core import CodeProjectAIException as FaceError
    from codeprojectai.core import CodeProjectAIFace as Face
except ImportError:
    from deepstack.core import DeepstackException as FaceError
    from deepstack.core import DeepstackFace as Face

ip, port, *pictures = sys.argv[1:]
client = Face(ip, int(port), timeout=60)
found = [client.detect(Path(picture).read_bytes()) for picture in pictures]
try:
    client.recognize(Path(pictures[0]).read_bytes())
except FaceError as error:
    print(json.dumps([found, str(error)]))
