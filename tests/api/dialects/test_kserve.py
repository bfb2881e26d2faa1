"""The dialect of KServe v2: an image as an element of type BYTES, tensors as the model declares them, and what describes models."""

import gzip
from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from tritonclient.http import InferResult

from app.main import create_app
from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton.client import TritonClient
from tests.api.conftest import write_keys
from tests.api.dialects.conformance import SECRET, Box, Conformance, Sent
from tests.fakes.models import SIDE
from tests.support import SCENE, json, started

LENGTH = "Inference-Header-Content-Length"
INFER = "/v2/models/six_columns/infer"
TEXT = b64encode(SCENE).decode()
IMAGE: dict[str, Any] = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["AAAA"]}
TENSOR: dict[str, Any] = {"name": "image", "shape": [1, 3, SIDE, SIDE], "datatype": "FP32", "data": [0.0] * 3 * SIDE * SIDE}
HEAD = b'{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1], "data": '


def encoded(binary: bytes, shape: tuple[int, ...], datatype: str, **others: Any) -> dict[str, Any]:  # noqa: ANN401
    own = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(binary)}}
    document = msgspec.json.encode({"inputs": [own], **others})
    return {"content": document + binary, "headers": {LENGTH: str(len(document))}}


def to_request(image: bytes, shape: tuple[int, ...] = (1,), **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return encoded(len(image).to_bytes(4, "little") + image, shape, "BYTES", **others)


def tensors_of(response: httpx.Response) -> dict[str, NDArray[Any]]:
    """Read the outputs, which are binary or JSON, as tritonclient does."""
    assert response.status_code == 200, response.text
    length = response.headers.get(LENGTH)
    result = InferResult.from_response_body(response.content, header_length=int(length) if length else None)
    return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def as_lists(response: httpx.Response) -> dict[str, Any]:
    """The same, in which texts are never bytes."""
    as_text = np.vectorize(lambda each: each.decode() if isinstance(each, bytes) else each, otypes=[object])
    return {name: as_text(tensor).tolist() for name, tensor in tensors_of(response).items()}


class TestConformance(Conformance):
    name = "kserve"
    paths = (INFER, "/v2/models/six_columns/versions/1/infer")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        """Send the file behind the JSON, as tritonclient does."""
        return Sent(INFER, to_request(image, parameters={"confidence": confidence}))

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401, ARG002
        found = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}
        assert found["num_dets"].tolist() == [len(found["det_boxes"])]
        columns = [found[name].tolist() for name in ("class_names", "det_scores", "det_boxes")]
        return [Box(name, score, tuple(corners)) for name, score, corners in zip(*columns, strict=True)]


@pytest.fixture
async def direct(served: Settings) -> AsyncIterator[TritonClient]:
    client = TritonClient(served.triton_address)
    yield client
    await client.close()


async def test_binary_outputs_are_those_of_json(server: httpx.AsyncClient) -> None:
    """The image is binary, compressed or base64, all outputs are chosen or some, each binary or not; what is absent may be null."""
    expected = as_lists(await server.post(INFER, **to_request(SCENE)))
    plain = to_request(SCENE)
    for sent in (
        {"content": gzip.compress(plain["content"]), "headers": {**plain["headers"], "Content-Encoding": "gzip"}},
        to_request(SCENE, parameters={"binary_data_output": True}),
        {"json": {"inputs": [{**IMAGE, "data": [TEXT], "parameters": None}], "id": None, "parameters": None, "outputs": None}},
    ):
        assert as_lists(await server.post(INFER, **sent)) == expected
    outputs = [{"name": "class_names", "parameters": {"binary_data": True}}, {"name": "num_dets", "parameters": None}]
    image = {**IMAGE, "shape": [1, 1], "data": [[TEXT]]}
    some = await server.post(INFER, json={"id": "7", "inputs": [image], "outputs": outputs})
    nothing = to_request(SCENE, parameters={"confidence": 1.0, "binary_data_output": True})

    assert expected["class_names"] == ["red", "blue"]
    assert as_lists(some) == {"class_names": [["red", "blue"]], "num_dets": [[2]]}
    assert msgspec.json.decode(some.content[: int(some.headers[LENGTH])])["id"] == "7"
    assert as_lists(await server.post(INFER, **nothing))["num_dets"] == [0]


async def test_tensor_gets_the_outputs_of_the_model(server: httpx.AsyncClient, direct: TritonClient) -> None:
    """In JSON, flat or nested, and binary; each of its images has another red square."""
    tensor = np.zeros((4, 3, SIDE, SIDE), np.float32)
    for index, image in enumerate(tensor):
        image[0, 8 : 24 + 8 * index, 16:48] = 1
    spec = from_triton_config(*await direct.read_config("six_columns"))
    expected = (await direct.infer(spec, list(tensor), timeout_seconds=10)).outputs["output0"]
    own = {**TENSOR, "shape": tensor.shape}
    assert len({row.tobytes() for row in expected}) == 4
    for sent in (
        encoded(tensor.tobytes(), tensor.shape, "FP32"),
        encoded(tensor.tobytes(), tensor.shape, "FP32", parameters={"binary_data_output": True}),
        {"json": {"inputs": [{**own, "data": tensor.tolist()}]}},
        {"json": {"inputs": [{**own, "data": tensor.ravel().tolist()}], "outputs": [{"name": "output0"}]}},
    ):
        np.testing.assert_array_equal(tensors_of(await server.post(INFER, **sent))["output0"], expected)


def with_tensor(tensor: dict[str, Any], **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"json": {"inputs": [tensor], **others}}


def headed(body: bytes, length: str | bytes = "") -> dict[str, Any]:
    return {"content": body, "headers": {LENGTH.encode(): length or str(len(body))}}


async def test_invalid_request_is_told_what_is_wrong(server: httpx.AsyncClient) -> None:
    for sent, says in (
        (with_tensor({**IMAGE, "shape": [2], "data": ["AAAA", "AAAA"]}), "send one image per request"),
        (with_tensor({**IMAGE, "parameters": {"shared_memory_region": "x"}}), "shared memory"),
        (with_tensor(IMAGE, outputs=[{"name": "num_dets", "parameters": {"classification": 1}}]), "`classification`"),
        (with_tensor(IMAGE, parameters={"confidence": 2}), "parameters.confidence is not as expected"),
        (with_tensor({**TENSOR, "shape": [5, 3, SIDE, SIDE]}), "of shape [1 to 4, 3, 128, 128]"),
        (with_tensor({**TENSOR, "shape": [2**31 - 1] * 8}), "of shape"),
        (with_tensor({**TENSOR, "data": TENSOR["data"][1:]}), "no list of 49152 numbers"),
        (with_tensor(TENSOR, outputs=[{"name": "det_boxes"}]), "there is no output 'det_boxes'; outputs: output0"),
        (with_tensor({**TENSOR, "parameters": {"binary_data_size": 4}}), "either `data`"),
        (headed(HEAD + b"[NaN]}]}"), "expected a JSON object"),
        (headed(HEAD + b"[" * 100_000), "expected a JSON object"),
        (headed(HEAD + b"[1]}]} ", str(len(HEAD) + 6)), "nothing follows"),
        *((headed(b"{}", length), LENGTH) for length in ("3", "-1", b"\xb2", "9" * 5000)),
    ):
        assert says in json(await server.post(INFER, **sent), 400)["error"]


async def test_state_of_server_and_models(server: httpx.AsyncClient) -> None:
    assert json(await server.get("/v2/models/two_versions/versions/1/ready")) == {"name": "two_versions", "ready": True}
    for path in ("nothing", "nothing/ready", "two_versions/versions/9/config", "nothing/stats", "%00/stats"):
        assert json(await server.get(f"/v2/models/{path}"), 404)["error"]
    index = json(await server.post("/v2/repository/index", json={"ready": True}))
    assert [one["version"] for one in index if (one["name"], one["state"]) == ("two_versions", "READY")] == ["1", "2"]
    for content, status in ((b"[", 400), (b" " * 70_000, 413)):
        json(await server.post("/v2/repository/index", content=content), status)


async def test_models_are_changed_and_described_by_callers_who_may(served: Settings, tmp_path: Path) -> None:
    """Not at all in an open API, and never with a config or files, which could run programs in Triton."""
    keys = write_keys(tmp_path, *((scope, SECRET, scope) for scope in ("detect", "health", "admin")))
    path, config = "/v2/repository/models/six_columns", {"parameters": {"config": "{}"}}
    small = msgspec.structs.replace(served, model="six_columns", dialects="kserve")
    async with started(create_app(small)) as client:
        json(await client.post(f"{path}/load"), 403)
    async with started(create_app(msgspec.structs.replace(small, api_keys_file=keys))) as client:

        async def ask(key: str, line: str, status: int, **others: Any) -> Any:  # noqa: ANN401
            headers = {"X-API-Key": f"{key}.{SECRET}", **others.pop("headers", {})}
            return json(await client.request(*line.split(), headers=headers, **others), status)

        for action in ("load", "unload"):
            await ask("detect", f"POST {path}/{action}", 403)
            await ask("admin", f"POST {path}/{action}", 403, headers={"Origin": "http://elsewhere.example"})
        assert "load takes no parameters" in (await ask("admin", f"POST {path}/load", 400, json=config))["error"]
        for line in ("POST /v2/repository/index", "GET /v2/models/six_columns/config", f"POST {INFER}"):  # as at /models
            await ask("admin", line, 403)
        for key, status in (("detect", 403), ("admin", 403), ("health", 200)):  # of all callers, as at /metrics
            await ask(key, "GET /v2/models/six_columns/stats", status)
