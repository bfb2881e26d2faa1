"""Implementations of the steps from an encoded image to a canvas, and of a response: Nereid's own, and plain libraries'."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import cv2
import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.api.answering.native import to_response
from app.imaging.decode import decode
from app.imaging.fit import Letterbox
from app.imaging.header import ImageHeader, PixelLimits, read_header
from app.imaging.transform import ImageTransform
from app.model.spec import from_triton_config
from app.pipeline.results import Detections

Canvas = NDArray[np.uint8]
Steps = dict[str, Callable[[Any], Any]]
"""Each takes the result of the previous step; the first one takes the bytes of an image."""

_SIDE, _PAD = 640, 114
_PIXEL_LIMITS = PixelLimits(jpeg=50_000_000, non_jpeg=50_000_000)


def _new_canvas() -> Canvas:
    return np.empty((_SIDE, _SIDE, 3), np.uint8)


def _nereid(allocate_canvas: Callable[[], Canvas] = _new_canvas) -> Steps:
    """Draw on a new canvas for each image."""
    letterbox = Letterbox((_SIDE, _SIDE), "center", enlarge=True, pad=_PAD)
    inputs = [{"name": "image", "data_type": "TYPE_UINT8", "dims": [_SIDE, _SIDE, 3]}]
    outputs = [{"name": "output0", "data_type": "TYPE_FP32", "dims": [300, 6]}]
    spec = from_triton_config({"name": "null", "input": inputs, "output": outputs}, "1")
    boxes, scores = np.tile(np.array([64, 96, 192, 192], np.float32), (5, 1)), np.full(5, 0.5, np.float32)
    found = Detections(boxes, scores, np.zeros(5, np.int32), 640, 480, spec, "1")
    more = {"total_time_ms": 1.0, "request_id": "0123456789abcdef"}

    def decode_step(header: ImageHeader) -> tuple[Canvas, ImageTransform, Canvas]:
        canvas = allocate_canvas()
        transform = letterbox.fit(header.width, header.height)
        return decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas

    return {
        "header": lambda data: read_header(data, _PIXEL_LIMITS),
        "decode": decode_step,
        "letterbox": lambda decoded: letterbox.draw(*decoded),
        "encode": lambda _: msgspec.json.encode(to_response(found, "normalized", more)),
    }


def _nereid_shm() -> Steps:
    """Draw on a reused canvas, like a slot in shared memory."""
    canvas = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    return _nereid(lambda: canvas)


def _opencv() -> Steps:
    """OpenCV for everything."""

    def letterbox(pixels: Canvas) -> Canvas:
        canvas, inside, _ = _fit(pixels.shape[1], pixels.shape[0])
        cv2.resize(pixels, inside.shape[1::-1], dst=inside)
        return canvas

    return {
        "decode": lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
        "letterbox": letterbox,
    }


def _pillow() -> Steps:
    """Pillow in this environment (pillow-simd in Nereid's), with its affine transform as the resize."""

    def letterbox(image: Image.Image) -> Canvas:
        canvas, inside, scale = _fit(image.width, image.height)
        size = inside.shape[1], inside.shape[0]
        if size != image.size:
            coefficients = (1 / scale, 0, 0, 0, 1 / scale, 0)
            image = image.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
        inside[:] = np.asarray(image)
        return canvas

    return {
        "header": lambda data: Image.open(BytesIO(data)),
        "decode": lambda image: image.convert("RGB"),
        "letterbox": letterbox,
    }


CANDIDATES: dict[str, Callable[[], Steps]] = {"nereid": _nereid, "nereid_shm": _nereid_shm, "opencv": _opencv, "pillow": _pillow}


def time_steps(name: str, folder: Path, seconds: float, wanted: tuple[str, ...]) -> tuple[int, float, dict[str, float]]:
    """Run the wanted steps of a candidate, or all, on one image of a folder after the other.

    Returns:
        Number of images; seconds that they took; and CPU milliseconds per image by step.
    """
    cv2.setNumThreads(1)
    images = [file.read_bytes() for file in sorted(folder.iterdir())]
    steps = {step: work for step, work in CANDIDATES[name]().items() if not wanted or step in wanted}
    for image in images:  # warm up libraries and allocator
        _run(steps, image, {})
    totals: dict[str, float] = {}
    count, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        _run(steps, images[count % len(images)], totals)
        count += 1
    return count, elapsed, {step: total / count * 1e3 for step, total in totals.items()}


def _run(steps: Steps, value: Any, totals: dict[str, float]) -> None:  # noqa: ANN401 - steps differ in it
    kept = [value]  # otherwise the time of a step would include freeing the previous one's objects
    for step, work in steps.items():
        before = process_time()
        kept.append(work(kept[-1]))
        totals[step] = totals.get(step, 0.0) + process_time() - before
    before = process_time()
    kept.clear()
    totals["free"] = totals.get("free", 0.0) + process_time() - before


def _fit(width: int, height: int) -> tuple[Canvas, Canvas, float]:
    """Return a padded canvas, the part of it for an image of this size, and the scale of the image."""
    scale = min(_SIDE / width, _SIDE / height)
    inner = round(width * scale), round(height * scale)
    canvas = np.full((_SIDE, _SIDE, 3), _PAD, np.uint8)
    left, top = (_SIDE - inner[0]) // 2, (_SIDE - inner[1]) // 2
    return canvas, canvas[top : top + inner[1], left : left + inner[0]], scale
