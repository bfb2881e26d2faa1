"""Requests of KServe v2 that are damaged, crafted or nonsense: no answer says that the server has failed."""

import base64
import gzip
import json
import struct
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from bench.harness.triton import Triton
from tests.fakes.models import SIDE, scene
from tests.faults import corpus
from tests.faults.exchange import Case, ask_all, encode
from tests.faults.serving import serving, unharmed

_SEED, _REQUESTS = 3403, 3_000
_IMAGE = scene("PNG")
_ELEMENT = struct.pack("<I", len(_IMAGE)) + _IMAGE
_TENSOR = bytes(3 * SIDE * SIDE * 4)
_VALUES: list[Any] = [
    *[
        None,
        True,
        "",
        "image",
        [],
        {},
        [[]],
        0,
        -1,
        1.5,
        2**31,
        2**63,
        2**64,
        10**400,
        1e308,
        "\ud800",
        "\0",
        "a" * 1000,
        [1] * 1000,
    ],
    *[
        "FP32",
        "BYTES",
        "UINT8",
        "FP16",
        "INT64",
        "BF16",
        [1, 1],
        [2, 1],
        [4, 3, SIDE, SIDE],
        [2**31 - 1] * 8,
        {"binary_data_size": 2**40},
    ],
    *[{"shared_memory_region": "x", "shared_memory_byte_size": 9}, {"classification": 3}, {"binary_data": True}, [["AAAA"]]],
]
_TEXTS = [b"NaN", b"-Infinity", b"1e999", b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"\\u0000", b"\xff\xfe", b"0x10", b"1_0"]
_PATHS = [
    "",
    "/ready",
    "/config",
    "/stats",
    "/versions/1",
    "/versions/0/config",
    "/versions/999999999999999999/stats",
    "/versions/x",
]


def _change(value: Any, random: Random) -> Any:  # noqa: ANN401 - any JSON
    """Replace a part of a document, at any depth."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        name = random.choice(list(value))
        if random.random() < 0.1:
            return {other: own for other, own in value.items() if other != name}
        return {**value, name: _change(value[name], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], _change(value[at], random), *value[at + 1 :]]
    return random.choice(_VALUES)


def _infer(random: Random) -> bytes:
    is_image, is_binary = random.random() < 0.6, random.random() < 0.6
    binary = (_ELEMENT if is_image else _TENSOR) if is_binary else b""
    own = (
        {"name": "image", "shape": [1], "datatype": "BYTES"}
        if is_image
        else {"name": "image", "shape": [1, 3, SIDE, SIDE], "datatype": "FP32"}
    )
    data = [base64.b64encode(_IMAGE).decode()] if is_image else [0.5] * (3 * SIDE * SIDE)
    given = {**own, **({"parameters": {"binary_data_size": len(binary)}} if is_binary else {"data": data})}
    document: Any = {"id": "1", "inputs": [given], "parameters": {"confidence": 0.5, "iou": 0.5, "max_detections": 9}}
    document["outputs"] = [{"name": "num_dets" if is_image else "output0", "parameters": {"binary_data": random.random() < 0.5}}]
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        document = _change(document, random)
    head = json.dumps(document).encode()
    if random.random() < 0.2:
        at = random.randrange(len(head))
        head = head[:at] + random.choice(_TEXTS) + head[at + random.randrange(2) :]
    length = (
        str(len(head))
        if random.random() < 0.9
        else random.choice(["0", "-1", "1", "9" * 30, "x", str(len(head) + 1), "\xb2", "1 2"])
    )
    body, headers = head + binary, {"Inference_Header_Content_Length": length} if is_binary or random.random() < 0.1 else {}
    if random.random() < 0.2:
        body = corpus.damage(body, random)
    if random.random() < 0.1:
        headers["Content_Encoding"] = random.choice(["gzip", "deflate", "br", "identity"])
        body = gzip.compress(body) if random.random() < 0.5 else body
    if random.random() < 0.3:
        headers["Content_Type"] = random.choice(
            ["application/json", "application/octet-stream", "multipart/form-data", "text/html"]
        )
    model = random.choice(["six_columns"] * 6 + ["yolo_head", "unbatched", "half_four_tensors", "extra_string", "nothing", "%00"])
    return encode(body, f"/v2/models/{model}{random.choice(['', '', '', '/versions/1', '/versions/2'])}/infer", **headers)


def _ask(random: Random) -> bytes:
    if random.random() < 0.3:
        path = random.choice(["index", "models/six_columns/load", "models/x/unload", "models//load", "nothing"])
        return encode(
            corpus.damage(b'{"parameters": {"config": "{}", "file:1/model.py": "AAAA"}}', random), f"/v2/repository/{path}"
        )
    model = random.choice(["six_columns", "nothing", quote(random.randbytes(8)), "..", "a" * 300])
    return encode(
        b"", f"/v2/models/{model}{random.choice(_PATHS)}", random.choice(["GET", "GET", "HEAD", "POST", "PUT"]), Connection="close"
    )


async def test_any_request_of_kserve(null_triton: Triton, tmp_path: Path) -> None:
    """The worst answers are those of overload."""
    random = Random(_SEED)  # noqa: S311 - the same requests in each run
    cases = [Case(f"request {number}", _infer(random) if random.random() < 0.85 else _ask(random)) for number in range(_REQUESTS)]
    settings = {"model": "six_columns", "dialects": "kserve"}
    with serving(null_triton, tmp_path, settings=settings) as gateway, unharmed(gateway, growth_mb=150, allowed={503, 504}):
        answers = await ask_all(gateway.url, cases)

    statuses = Counter(answer.status for _, answer in answers)
    assert not [(label, answer) for label, answer in answers if answer.status >= 500 and answer.status not in {503, 504}]
    assert statuses[200] > _REQUESTS / 10
    assert statuses[400] > _REQUESTS / 10
    for _, answer in answers:
        if 400 <= answer.status < 500 and answer.headers["content-type"] == "application/json":
            assert list(json.loads(answer.body)) == ["error"]
