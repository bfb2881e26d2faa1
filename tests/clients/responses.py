"""Responses of a gateway, for tests that need none."""

import httpx

MODEL = {"name": "tiny", "version": "1", "backend": "triton", "device": "cpu"}


def detected(
    *boxes: tuple[str, int, float, tuple[float, float, float, float]], size: tuple[int, int] = (200, 100), **others: object
) -> httpx.Response:
    """Make the response with these objects: class name, class id, confidence and corners."""
    detections = [
        {**dict(zip(("x1", "y1", "x2", "y2"), corners, strict=True)), "confidence": score, "class_id": id_, "class_name": name}
        for name, id_, score, corners in boxes
    ]
    body = {"detections": detections, "image": {"width": size[0], "height": size[1]}, "model": MODEL}
    return httpx.Response(200, json={**body, "total_time_ms": 1.5, "request_id": "0123456789abcdef", **others})


def refused(status: int, code: str, retry_after: str | None = None) -> httpx.Response:
    """Make the response with a problem."""
    problem = {"type": f"urn:nereid:problem:{code}", "title": "Refused", "status": status, "code": code}
    body = {**problem, "detail": "not now", "request_id": "7"}
    return httpx.Response(status, json=body, headers={"Retry-After": retry_after} if retry_after else None)
