"""inference-sdk: the URL of the gateway, a page of text and a photo; prints their text, and what is wrong with doctr."""

import asyncio
import json
import sys

from inference_sdk import InferenceHTTPClient
from inference_sdk.http.errors import HTTPCallErrorError

api_url, page, photo = sys.argv[1:]
client = InferenceHTTPClient(api_url=api_url, api_key="none")
printed = {
    "plain": client.ocr_image(page, model="pp_ocr", generate_bounding_boxes=False),
    "list": client.ocr_image([page, photo], model="pp_ocr"),
    "async": asyncio.run(client.ocr_image_async(page, model="pp_ocr")),
}
try:
    client.ocr_image(page)
except HTTPCallErrorError as error:
    printed["doctr"] = error.status_code, error.api_message
print(json.dumps(printed))
