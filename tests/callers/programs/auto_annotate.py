"""cvat-cli with these arguments; prints its exit status, or what is wrong with the function according to its last line."""

import json
import sys

from cvat_cli.__main__ import main
from cvat_sdk.auto_annotation import BadFunctionError

try:
    print(json.dumps({"status": main(sys.argv[1:])}))
except BadFunctionError as error:
    print(json.dumps({"error": str(error)}))
