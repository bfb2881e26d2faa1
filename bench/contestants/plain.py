"""What one writes without Nereid: FastAPI, and a composed model in ONNX Runtime or OpenVINO. The body of POST /detect is the image.

Settings: BENCH_MODEL and BENCH_LABELS, files; BENCH_ENGINE, `openvino` or another; BENCH_THREADS per process, 0 for all cores.
"""

import os
from pathlib import Path
from typing import Annotated, Any

import cv2
import numpy as np
from fastapi import Body, FastAPI, HTTPException  # type: ignore[import-not-found]

MODEL, THREADS, CONFIDENCE = os.environ["BENCH_MODEL"], int(os.environ["BENCH_THREADS"]), 0.25
FIELDS = ("x1", "y1", "x2", "y2", "confidence", "class_name")
LABELS = Path(os.environ["BENCH_LABELS"]).read_text(encoding="utf-8").splitlines()
if os.environ["BENCH_ENGINE"] == "openvino":
    import openvino  # type: ignore[import-not-found]

    # Pinned, the threads of all processes would share the first core.
    hints = {"INFERENCE_NUM_THREADS": THREADS, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32", "ENABLE_CPU_PINNING": False}
    infer = openvino.compile_model(MODEL, "CPU", hints)
else:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(MODEL, options)
    names = [output.name for output in session.get_outputs()]

    def infer(inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs by name, as OpenVINO does."""
        return dict(zip(names, session.run(names, inputs), strict=True))


app = FastAPI()


def find(file: bytes) -> dict[str, Any]:
    """Return the objects in an encoded image, with corners as fractions of its size."""
    image = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise HTTPException(400, "not an image")
    height, width = image.shape[:2]
    scale = 640 / max(height, width)
    inner = cv2.resize(image, (round(width * scale), round(height * scale)))
    top, left = (640 - inner.shape[0]) // 2, (640 - inner.shape[1]) // 2
    canvas = np.full((1, 640, 640, 3), 114, np.uint8)
    canvas[0, top : top + inner.shape[0], left : left + inner.shape[1]] = inner
    outputs = infer({"image": canvas})
    corners = (outputs["det_boxes"][0] - [left, top, left, top]) / scale / [width, height, width, height]
    rows = zip(corners.clip(0, 1).tolist(), outputs["det_scores"][0].tolist(), outputs["det_classes"][0].tolist(), strict=True)
    kept = [(*box, score, LABELS[id_]) for box, score, id_ in rows if score >= CONFIDENCE]
    return {"detections": [dict(zip(FIELDS, row, strict=True)) for row in kept]}


# Without a thread: one image after the other is faster, and OpenVINO's model takes one at a time.
@app.post("/detect")  # type: ignore[untyped-decorator]
async def detect(file: Annotated[bytes, Body(media_type="image/jpeg")]) -> dict[str, Any]:
    """Respond with the objects."""
    return find(file)
