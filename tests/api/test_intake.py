"""What receiving a request costs: memory that its body takes is counted."""

import base64
import gzip
import random
import tracemalloc
from typing import Any

import httpx
import msgspec
import pytest

from app.api import body
from app.resilience.uploads import Upload
from tests.fakes.triton import FakeTriton
from tests.support import json

NOISE = random.Random(0).randbytes(4 << 20)  # noqa: S311 - an image that hardly shrinks


@pytest.mark.parametrize("is_compressed", [True, False])
async def test_all_memory_of_a_body_that_is_parsed_is_counted(
    gateway: tuple[FakeTriton, httpx.AsyncClient],
    monkeypatch: pytest.MonkeyPatch,
    is_compressed: bool,  # noqa: FBT001
) -> None:
    """The body, what it was before it was compressed, and what parsing adds: no less than is in use, and not much more."""
    counted: list[int] = []
    add = Upload.add
    parse = body.parse_body
    peaks: list[int] = []

    def noted(upload: Upload, nbytes: int) -> None:
        add(upload, nbytes)
        counted.append(nbytes)

    def measured(*arguments: Any) -> Any:  # noqa: ANN401
        try:
            return parse(*arguments)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])

    monkeypatch.setattr(Upload, "add", noted)
    monkeypatch.setattr(body, "parse_body", measured)
    plain = msgspec.json.encode({"image": base64.urlsafe_b64encode(NOISE).decode()})
    data = gzip.compress(plain) if is_compressed else plain
    headers = {"Content-Type": "application/json"} | ({"Content-Encoding": "gzip"} if is_compressed else {})
    tracemalloc.start()
    try:
        response = await gateway[1].post("/detect", content=data, headers=headers)
    finally:
        tracemalloc.stop()

    assert json(response, 415)["code"] == "unsupported_format"
    assert sum(counted) == len(data) + is_compressed * len(plain) + body.parsing_bytes(len(plain), "application/json")
    assert 0.8 * sum(counted) < peaks[0] < 1.05 * sum(counted)
