"""codeproject-ai-api: the settings of CodeProjectAIObject as JSON, and a picture; prints what it finds."""

import json
import sys
from pathlib import Path

from codeprojectai.core import CodeProjectAIObject

settings, picture = sys.argv[1:]
print(json.dumps(CodeProjectAIObject(**json.loads(settings)).detect(Path(picture).read_bytes())))
