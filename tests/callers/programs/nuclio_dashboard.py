"""requests, as CVAT's class LambdaGateway uses it: the URL of the gateway, a model and a picture; prints what CVAT gets."""

import json
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import requests

url, model, picture = sys.argv[1:]
USUAL = {
    "x-nuclio-project-name": "cvat",
    "x-nuclio-function-namespace": "nuclio",
    "x-nuclio-invoke-via": "domain-name",
    "X-Nuclio-Invoke-Timeout": "120s",
}


def ask(method: str, path: str, headers: dict[str, str], data: object = None) -> Any:  # noqa: ANN401
    with requests.Session() as session:
        reply = session.request(method, url + path, headers={**USUAL, **headers}, timeout=120, json=data)
    reply.raise_for_status()
    return reply.json()


functions = ask("get", "/api/functions", {})
own = ask("get", f"/api/functions/{model}", {})
headers = {"x-nuclio-function-name": model, "x-nuclio-path": "/"}
content = {"threshold": 0.4, "image": b64encode(Path(picture).read_bytes()).decode()}
found = ask("post", "/api/function_invocations", headers, content)
try:
    ask("post", "/api/function_invocations", headers, {"image": ""})
except requests.HTTPError as error:
    print(json.dumps({"version": requests.__version__, "functions": functions, "own": own, "found": found, "error": str(error)}))
