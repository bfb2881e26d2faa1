"""The steps of a request, each timed in CPU seconds; one candidate per process, so that none warms another's caches.

Run as: python -m bench.candidates NAME FOLDER SECONDS [STEP ...]; its last line is JSON, behind what Nereid logs. It also
runs in the reference's environment, so everything but the standard library is imported where it is used.
With a Triton at BENCH_TRITON, `client` is a whole inference (message, RPC, answer) by a model that answers at once, and
`framework` a whole exchange of the web application whose detector has its answer ready: nothing found, and Nereid logs it.
"""
# ruff: noqa: PLC0415, ANN401

import asyncio
import atexit
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

Step = Callable[[Any], Any]
"""Takes what the step before returned; the first takes the bytes of a picture."""

_SIDE = 640
_MAX_PIXELS = 50_000_000


def nereid() -> dict[str, Step]:
    """Nereid's own functions, the tensor in the message."""
    import numpy as np

    return _nereid(lambda: np.empty((_SIDE, _SIDE, 3), np.uint8), "inline")


def nereid_shm() -> dict[str, Step]:
    """The same with the tensor in a place that is used again, as in shared memory: the message only names it."""
    import numpy as np

    slot = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    return _nereid(lambda: slot, "shm")


def _nereid(frame_of: Callable[[], Any], transport: str) -> dict[str, Step]:
    from app import image, letterbox

    def decode(unread: Any) -> Any:
        frame = frame_of()
        placement = letterbox.place((unread.width, unread.height), (_SIDE, _SIDE), centred=True, enlarge=True)
        return image.decode(unread, placement.decode_size, letterbox.area(placement, frame)), placement, frame

    def draw(decoded: Any) -> Any:
        picture, placement, frame = decoded
        letterbox.draw(picture, placement, 114, frame)
        return frame[None]

    return {
        "header": lambda data: image.read_header(data, _MAX_PIXELS),
        "decode": decode,
        "letterbox": draw,
        **_nereid_served(transport),
        "encode": _nereid_encode(),
    }


def pillow() -> dict[str, Step]:
    """The Pillow of this environment (pillow-simd in Nereid's), its affine transform for the resize."""
    from io import BytesIO

    import numpy as np
    from PIL import Image

    def resize(picture: Any) -> Any:
        scale = min(_SIDE / picture.width, _SIDE / picture.height)
        size = round(picture.width * scale), round(picture.height * scale)
        frame = np.full((_SIDE, _SIDE, 3), 114, np.uint8)
        coefficients = (1 / scale, 0, 0, 0, 1 / scale, 0)
        if size != picture.size:
            picture = picture.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
        left, top = (_SIDE - size[0]) // 2, (_SIDE - size[1]) // 2
        frame[top : top + size[1], left : left + size[0]] = np.asarray(picture)
        return frame

    return {
        "header": lambda data: Image.open(BytesIO(data)),
        "decode": lambda file: file.convert("RGB"),
        "letterbox": resize,
    }


def simplejpeg() -> dict[str, Step]:
    """libjpeg-turbo without anything around it, OpenCV's resize into the frame."""
    import simplejpeg as library

    def header(data: Any) -> Any:
        library.decode_jpeg_header(data, strict=False)
        return data

    return {"header": header, "decode": lambda data: library.decode_jpeg(data, "RGB"), "letterbox": _cv2_resize()}


def opencv() -> dict[str, Step]:
    """OpenCV for everything."""
    import cv2
    import numpy as np

    return {
        "decode": lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
        "letterbox": _cv2_resize(),
    }


def reference() -> dict[str, Step]:
    """The reference's way: stock Pillow, FP32 planes, orjson."""
    import orjson  # type: ignore[import-not-found]

    from bench.contestants.preparing import letterboxed, normalized

    triton = os.environ.get("BENCH_TRITON")
    answer = {"detections": [_DETECTION] * 5, "num_detections": 5, "status": "success"}
    return {
        "decode and letterbox": lambda data: letterboxed(data).square,
        "normalise": normalized,
        **(_reference_served(triton) if triton else {}),
        "encode": lambda _: orjson.dumps(answer),
    }


CANDIDATES: dict[str, Callable[[], dict[str, Step]]] = {
    "nereid": nereid,
    "nereid_shm": nereid_shm,
    "simplejpeg": simplejpeg,
    "opencv": opencv,
    "pillow": pillow,
    "reference": reference,
}

_DETECTION = {"x1": 0.1, "y1": 0.2, "x2": 0.3, "y2": 0.4, "confidence": 0.5, "class": 1, "class_id": 1, "class_name": "bicycle"}


def main(name: str, folder: Path, seconds: float, wanted: list[str]) -> None:
    """Run the steps on picture after picture and print what they took."""
    pictures = [file.read_bytes() for file in sorted(folder.iterdir())]
    steps = CANDIDATES[name]()
    if wanted:
        steps = {step: work for step, work in steps.items() if step in wanted}
    for data in pictures:  # libraries and allocator warm up
        _run(steps, data, {})
    totals: dict[str, float] = {}
    count, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        _run(steps, pictures[count % len(pictures)], totals)
        count += 1
    spent = {step: total / count * 1e3 for step, total in totals.items()}
    print(json.dumps({"pictures": count, "seconds": elapsed, "milliseconds": spent}), flush=True)


def _run(steps: dict[str, Step], value: Any, totals: dict[str, float]) -> None:
    kept = [value]  # else a step would pay for freeing what the one before it has made
    for step, work in steps.items():
        before = process_time()
        kept.append(work(kept[-1]))
        totals[step] = totals.get(step, 0.0) + process_time() - before
    before = process_time()
    kept.clear()
    totals["free"] = totals.get("free", 0.0) + process_time() - before


def _nereid_served(transport: str) -> dict[str, Step]:
    """Nereid's client and its web application, if there is a Triton."""
    address = os.environ.get("BENCH_TRITON")
    if not address:
        return {}
    from app.config import Settings
    from app.detector import Found
    from app.main import create_app

    settings = Settings(triton_urls=address, model="null", transport=transport, log_format="json")  # type: ignore[arg-type]
    application: Any = create_app(settings)
    loop = _loop()
    _begin(loop, application)
    detector = application.app.state.detector
    model = loop.run_until_complete(detector.ready("null"))
    found = Found([], _SIDE, _SIDE, model, "1")

    async def ready(*_: Any) -> Found:
        return found

    def infer(tensor: Any) -> Any:
        slot = detector.transport.take(tensor.nbytes)
        return loop.run_until_complete(detector.triton.infer(model, tensor, 10, "id", slot))

    detector.detect = ready
    return {"client": infer, "framework": _exchange(loop, application)}


def _reference_served(address: str) -> dict[str, Step]:
    """The reference's client and its web application."""
    from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

    from bench.contestants import reference as contestant

    client = InferenceServerClient(address)
    names = ("num_dets", "det_boxes", "det_scores", "det_classes")
    nothing: dict[str, Any] = {"detections": [], "num_detections": 0, "status": "success"}

    def infer(tensor: Any) -> Any:
        picture = InferInput("images", list(tensor.shape), "FP32")
        picture.set_data_from_numpy(tensor)
        answer = client.infer("null_fp32", [picture], outputs=[InferRequestedOutput(name) for name in names])
        return [answer.as_numpy(name) for name in names]

    contestant._answer = lambda *_: nothing  # noqa: SLF001
    application = contestant.create_app()
    loop = _loop()
    _begin(loop, application)
    return {"client": infer, "framework": _exchange(loop, application)}


def _loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop


def _begin(loop: asyncio.AbstractEventLoop, application: Any) -> None:
    """Run the lifespan of an ASGI application until this process ends."""
    to_app: asyncio.Queue[Any] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    life = loop.create_task(application({"type": "lifespan", "asgi": {"version": "3.0"}}, to_app.get, from_app.put))

    async def begin() -> None:
        await to_app.put({"type": "lifespan.startup"})
        if (said := await from_app.get())["type"] != "lifespan.startup.complete":
            raise RuntimeError(said)

    async def end() -> None:
        await to_app.put({"type": "lifespan.shutdown"})
        await life

    loop.run_until_complete(begin())
    atexit.register(lambda: loop.run_until_complete(end()))


def _exchange(loop: asyncio.AbstractEventLoop, application: Any) -> Step:
    """Post a picture's worth of bytes."""
    body = bytes(150_000)
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"image/jpeg"), (b"content-length", b"%d" % len(body))]
    received = {"type": "http.request", "body": body, "more_body": False}

    async def ask() -> None:
        sent: list[Any] = []

        async def receive() -> Any:
            return received

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/detect",
            "raw_path": b"/detect",
            "root_path": "",
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }
        await application(scope, receive, send)
        if sent[0]["status"] != 200:  # noqa: PLR2004
            raise RuntimeError(sent)

    return lambda _: loop.run_until_complete(ask())


def _nereid_encode() -> Step:
    import msgspec

    from app.schema import Detection, DetectResponse, ImageSize, ModelUsed

    one = Detection(x1=0.1, y1=0.2, x2=0.3, y2=0.4, confidence=0.5, class_=1, class_id=1, class_name="bicycle")
    model = ModelUsed("null", "1", "triton", "cpu")

    def encode(_: Any) -> bytes:
        answer = DetectResponse(
            detections=[one] * 5,
            num_detections=5,
            status="success",
            image=ImageSize(640, 480),
            model=model,
            total_time_ms=1.0,
            request_id="0123456789abcdef",
        )
        return msgspec.json.encode(answer)

    return encode


def _cv2_resize() -> Step:
    import cv2
    import numpy as np

    cv2.setNumThreads(1)

    def resize(pixels: Any) -> Any:
        height, width = pixels.shape[:2]
        scale = min(_SIDE / width, _SIDE / height)
        inner = round(width * scale), round(height * scale)
        frame = np.full((_SIDE, _SIDE, 3), 114, np.uint8)
        left, top = (_SIDE - inner[0]) // 2, (_SIDE - inner[1]) // 2
        cv2.resize(pixels, inner, dst=frame[top : top + inner[1], left : left + inner[0]])
        return frame

    return resize


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
