"""deepstack-python: the address and port of the gateway, and a picture; prints what it finds."""

import json
import sys
from pathlib import Path

from deepstack.core import DeepstackObject

address, port, picture = sys.argv[1:]
found = DeepstackObject(address, int(port)).detect(Path(picture).read_bytes())
print(json.dumps(found))
