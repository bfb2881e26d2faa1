"""hub-sdk: an API key, a model, a picture and parameters in JSON; prints the model's data, the answer, and what the SDK logged."""

import io
import json
import logging
import sys

from hub_sdk import HUBClient

logging.basicConfig(stream=(log := io.StringIO()), format="%(message)s")
key, name, picture, parameters = sys.argv[1:]
model = HUBClient({"api_key": key}).model(name)
response = model.predict(picture, json.loads(parameters))
print(json.dumps({"model": model.data, "answer": response and response.json(), "log": log.getvalue()}))
