"""inference-sdk: the URL of the gateway, a page of text and a photo; prints their text and the lengths of their vectors."""

import asyncio
import json
import sys

from inference_sdk import InferenceHTTPClient

api_url, page, photo = sys.argv[1:]
client = InferenceHTTPClient(api_url=api_url, api_key="none")
texts = {
    "doctr": client.ocr_image(page),
    "boxes": client.ocr_image(page, generate_bounding_boxes=True),
    "pp_ocr": client.ocr_image([page, photo], model="pp_ocr"),
    "easy_ocr": client.ocr_image(page, model="easy_ocr", language_codes=["en"], quantize=True),
    "async": asyncio.run(client.ocr_image_async(page)),
}
vectors = [client.get_clip_image_embeddings(photo), *client.get_clip_image_embeddings([photo, page])]
print(json.dumps({"texts": texts, "vectors": [vector["embeddings"] for vector in vectors]}))
