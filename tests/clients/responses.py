"""Responses of a gateway, for tests that need none."""

from typing import Any

import httpx

MODEL = {"name": "tiny", "version": "1", "backend": "triton", "device": "cpu"}


def detected(
    *boxes: tuple[str, int, float, tuple[float, float, float, float]], size: tuple[int, int] = (200, 100)
) -> httpx.Response:
    """Make the response with these objects: class name, class id, confidence and corners."""
    detections: list[dict[str, Any]] = [
        {
            **dict(zip(("x1", "y1", "x2", "y2"), corners, strict=True)),
            "confidence": score,
            "class": id_,
            "class_id": id_,
            "class_name": name,
        }
        for name, id_, score, corners in boxes
    ]
    body = {
        "detections": detections,
        "num_detections": len(detections),
        "status": "success",
        "image": {"width": size[0], "height": size[1]},
        "model": MODEL,
        "total_time_ms": 1.5,
        "request_id": "0123456789abcdef",
    }
    return httpx.Response(200, json=body)


def refused(status: int, code: str, retry_after: str | None = None) -> httpx.Response:
    """Make the response with a problem."""
    body = {
        "type": f"urn:nereid:problem:{code}",
        "title": "Refused",
        "status": status,
        "detail": "not now",
        "code": code,
        "request_id": "7",
    }
    return httpx.Response(status, json=body, headers={"Retry-After": retry_after} if retry_after else None)
