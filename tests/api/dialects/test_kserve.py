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

from app.api.dialects.kserve_tensors import InferRequest
from app.embedded.server import EmbeddedTriton
from app.errors import MalformedRequest
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
    """Put a tensor behind the JSON, as tritonclient does; arguments for httpx."""
    own = {"name": "image", "shape": shape, "datatype": datatype, "parameters": {"binary_data_size": len(binary)}}
    document = msgspec.json.encode({"inputs": [own], **others})
    return {"content": document + binary, "headers": {LENGTH: str(len(document))}}


def to_request(image: bytes, shape: tuple[int, ...] = (1,), **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return encoded(len(image).to_bytes(4, "little") + image, shape, "BYTES", **others)


def to_tensor_request(tensor: NDArray[Any], datatype: str = "FP32", **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return encoded(tensor.tobytes(), tensor.shape, datatype, **others)


def tensors_of(response: httpx.Response) -> dict[str, NDArray[Any]]:
    """Read the outputs, which are binary or JSON."""
    nbytes = int(response.headers.get(LENGTH, len(response.content)))
    answer, rest, tensors = msgspec.json.decode(response.content[:nbytes]), response.content[nbytes:], {}
    dtypes: dict[str, Any] = {"FP32": np.float32, "INT32": np.int32, "BYTES": object}
    for output in answer["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        data: Any = output.get("data")
        if size is not None:
            binary, rest = rest[:size], rest[size:]
            data = np.frombuffer(binary, dtypes[output["datatype"]]) if output["datatype"] != "BYTES" else texts_of(binary)
        tensors[output["name"]] = np.array(data, dtypes[output["datatype"]]).reshape(output["shape"])
    assert not rest
    return tensors


def texts_of(binary: bytes) -> list[str]:
    texts = []
    while binary:
        end = 4 + int.from_bytes(binary[:4], "little")
        texts.append(binary[4:end].decode())
        binary = binary[end:]
    return texts


def as_lists(response: httpx.Response) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in tensors_of(response).items()}


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
async def direct(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[TritonClient]:
    assert triton.poll() is None
    client = TritonClient(settings.triton_address)
    yield client
    await client.close()


async def direct_rows(direct: TritonClient, tensor: NDArray[Any], model: str = "six_columns") -> NDArray[Any]:
    """Return the output of Triton itself."""
    spec = from_triton_config(*await direct.read_config(model))
    outputs = (await direct.infer(spec, list(np.ascontiguousarray(tensor)), timeout_seconds=10)).outputs
    return next(iter(outputs.values()))


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
    binary = {"name": "class_names", "parameters": {"binary_data": True}}
    image = {**IMAGE, "shape": [1, 1], "data": [[TEXT]]}
    chosen = {"id": "7", "inputs": [image], "outputs": [binary, {"name": "num_dets", "parameters": None}]}
    some = await server.post(INFER, json=chosen)
    head = msgspec.json.decode(some.content[: int(some.headers[LENGTH])])

    nothing = to_request(SCENE, parameters={"confidence": 1.0, "binary_data_output": True})
    empty = tensors_of(await server.post(INFER, **nothing))
    assert (empty["num_dets"].tolist(), empty["det_boxes"].shape, empty["class_names"].shape) == ([0], (0, 4), (0,))
    assert expected["class_names"] == ["red", "blue"]
    assert as_lists(some) == {"class_names": [["red", "blue"]], "num_dets": [[2]]}
    assert (head["id"], head["model_name"], head["model_version"]) == ("7", "six_columns", "1")


@pytest.mark.parametrize(("model", "images"), [("six_columns", 4), ("unbatched", 1)])
async def test_tensor_gets_the_outputs_of_the_model(
    server: httpx.AsyncClient, direct: TritonClient, model: str, images: int
) -> None:
    """In JSON, flat or nested, and binary; each of its images has another red square."""
    tensor = np.zeros((images, 3, SIDE, SIDE), np.float32)
    for index, image in enumerate(tensor):
        image[0, 8 : 24 + 8 * index, 16:48] = 1
    expected = await direct_rows(direct, tensor)
    own = {**TENSOR, "shape": tensor.shape}
    assert len({row.tobytes() for row in expected}) == images
    for sent in (
        to_tensor_request(tensor),
        to_tensor_request(tensor, parameters={"binary_data_output": True}),
        {"json": {"inputs": [{**own, "data": tensor.tolist()}]}},
        {"json": {"inputs": [{**own, "data": tensor.ravel().tolist()}], "outputs": [{"name": "output0"}]}},
    ):
        found = tensors_of(await server.post(f"/v2/models/{model}/infer", **sent))
        np.testing.assert_array_equal(found["output0"], expected)


async def test_other_types_of_numbers(server: httpx.AsyncClient, direct: TritonClient) -> None:
    half = np.zeros((1, 3, SIDE, SIDE), np.float16)
    response = await server.post("/v2/models/half_four_tensors/infer", **to_tensor_request(half, "FP16"))
    pixels = np.full((1, 32, 32, 3), 200, np.uint8)
    document = {"name": "image", "shape": pixels.shape, "datatype": "UINT8", "data": pixels.ravel().tolist()}
    scores = tensors_of(await server.post("/v2/models/bytes_to_logits/infer", json={"inputs": [document]}))["scores"]

    types = {output["name"]: output["datatype"] for output in json(response)["outputs"]}
    assert types == {"labels": "INT64", "confidences": "FP16", "boxes_half": "FP16", "valid_rows": "INT64"}
    np.testing.assert_array_equal(scores, await direct_rows(direct, pixels, "bytes_to_logits"))


async def test_invalid_request_is_told_what_is_wrong(server: httpx.AsyncClient) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({**IMAGE, "shape": [2], "data": ["AAAA", "AAAA"]}, {}, "send one image per request"),
        ({**IMAGE, "data": ["%%%%"]}, {}, "not base64"),
        ({**IMAGE, "parameters": {"shared_memory_region": "x"}}, {}, "shared memory"),
        (IMAGE, {"outputs": [{"name": "num_dets", "parameters": {"classification": 1}}]}, "`classification`"),
        (IMAGE, {"parameters": {"confidence": 2}}, "parameters.confidence is not as expected"),
        (IMAGE, {"inputs": [IMAGE, IMAGE]}, "inputs is not as expected"),
        ({**TENSOR, "shape": [5, 3, SIDE, SIDE]}, {}, "of shape [1 to 4, 3, 128, 128]"),
        ({**TENSOR, "shape": [2**31 - 1] * 8}, {}, "of shape"),
        ({**TENSOR, "shape": [-1, 3, SIDE, SIDE]}, {}, "is not as expected"),
        ({**TENSOR, "data": TENSOR["data"][1:]}, {}, "no list of 49152 numbers"),
        (TENSOR, {"outputs": [{"name": "det_boxes"}]}, "there is no output 'det_boxes'; outputs: output0"),
        ({**TENSOR, "parameters": {"binary_data_size": 4}}, {}, "either `data`"),
    ]
    for tensor, others, says in rows:
        assert says in json(await server.post(INFER, json={"inputs": [tensor], **others}), 400)["error"]


async def test_invalid_body_is_told_what_is_wrong(server: httpx.AsyncClient) -> None:
    rows: list[tuple[bytes, str | bytes, str]] = [
        (HEAD + b"[NaN]}]}", str(len(HEAD) + 8), "expected a JSON object"),
        (HEAD + b"[" * 100_000, str(len(HEAD) + 100_000), "expected a JSON object"),
        (HEAD + b"[1]}]} ", str(len(HEAD) + 6), "nothing follows"),
        *((b"{}", length, LENGTH) for length in ("3", "-1", b"\xb2", "9" * 5000)),
    ]
    for body, length, says in rows:
        headers: dict[Any, Any] = {LENGTH.encode(): length}
        assert says in json(await server.post(INFER, content=body, headers=headers), 400)["error"]


async def test_binary_elements_of_another_size_are_refused(server: httpx.AsyncClient) -> None:
    for sent in (to_request(SCENE), to_tensor_request(np.zeros((1, 3, SIDE, SIDE), np.float32))):
        for content in (sent["content"][:-1], sent["content"] + b"x"):
            json(await server.post(INFER, **{**sent, "content": content}), 400)


async def test_models_are_described_as_triton_does(server: httpx.AsyncClient, direct: TritonClient) -> None:
    """Numbers of 64 bits are no texts."""
    metadata = json(await server.get("/v2/models/six_columns"))
    config = json(await server.get("/v2/models/two_versions/versions/2/config"))
    stats = json(await server.get("/v2/models/two_versions/versions/1/stats"))["model_stats"]

    assert metadata == {
        "name": "six_columns",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 3, SIDE, SIDE]}],
        "outputs": [{"name": "output0", "datatype": "FP32", "shape": [-1, 2, 6]}],
    }
    assert (config["name"], config["max_batch_size"], config["input"][0]["dims"]) == ("two_versions", 4, [3, SIDE, SIDE])
    assert config["parameters"] == (await direct.read_config("two_versions"))[0]["parameters"]
    assert [(one["version"], type(one["inference_count"])) for one in stats] == [("1", int)]


async def test_state_of_server_and_models(server: httpx.AsyncClient) -> None:
    assert json(await server.get("/v2"))["name"] == "nereid"
    assert json(await server.get("/v2/health/live")) == {"live": True}
    assert json(await server.get("/v2/health/ready")) == {"ready": True}
    assert json(await server.get("/v2/models/two_versions/versions/1/ready")) == {"name": "two_versions", "ready": True}
    for path in ("nothing", "nothing/ready", "two_versions/versions/9/config", "nothing/stats", "%00/stats"):
        assert json(await server.get(f"/v2/models/{path}"), 404)["error"]
    index = "/v2/repository/index"
    assert [one for one in json(await server.post(index, json={"ready": True})) if one["name"] == "two_versions"] == [
        {"name": "two_versions", "version": version, "state": "READY", "reason": ""} for version in "12"
    ]
    for content, status in ((b"[", 400), (b" " * 70_000, 413)):
        json(await server.post(index, content=content), status)


async def test_models_are_changed_and_described_by_callers_who_may(
    settings: Settings, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """Not at all in an open API, and never with a config or files, which could run programs in Triton."""
    assert triton.poll() is None
    keys = [(scope, SECRET, scope) for scope in ("detect", "health", "admin")]
    path, config = "/v2/repository/models/six_columns", {"parameters": {"config": "{}"}}
    small = msgspec.structs.replace(settings, model="six_columns", dialects="kserve")
    async with started(create_app(small)) as client:
        for action in ("load", "unload"):
            json(await client.post(f"{path}/{action}"), 403)
    locked = msgspec.structs.replace(small, api_keys_file=write_keys(tmp_path, *keys))
    async with started(create_app(locked)) as client:

        async def ask(key: str, method: str, path: str, status: int, **others: Any) -> Any:  # noqa: ANN401
            headers = {"X-API-Key": f"{key}.{SECRET}", **others.pop("headers", {})}
            return json(await client.request(method, path, headers=headers, **others), status)

        for action in ("load", "unload"):
            await ask("detect", "POST", f"{path}/{action}", 403)
            await ask("admin", "POST", f"{path}/{action}", 403, headers={"Origin": "http://elsewhere.example"})
        assert "load takes no parameters" in (await ask("admin", "POST", f"{path}/load", 400, json=config))["error"]
        for key in ("health", "admin"):  # as at /models
            await ask(key, "POST", "/v2/repository/index", 403)
            await ask(key, "GET", "/v2/models/six_columns/config", 403)
            await ask(key, "POST", INFER, 403, content=b"{}")
        for key, status in (("detect", 403), ("admin", 403), ("health", 200)):  # of all callers, as at /metrics
            await ask(key, "GET", "/v2/models/six_columns/stats", status)


def read(data: str, count: int, dtype: Any = np.float32) -> Any:  # noqa: ANN401
    document = f'{{"inputs": [{{"name": "image", "datatype": "FP32", "shape": [1], "data": {data}}}]}}'
    return InferRequest.parse(document.encode(), "").read_numbers(np.dtype(dtype), count).tolist()


def test_numbers_of_many_digits_are_read_in_pieces() -> None:
    numbers = np.arange(12_000, dtype=np.float32).reshape(3, 4000) / 7
    rows = [", ".join(f"{number:.40f}" for number in row) for row in numbers.tolist()]
    for text in (f"[[{'], ['.join(rows)}]]", f"[{','.join(rows)}]"):
        assert read(text, 12_000) == numbers.ravel().tolist()


def test_data_other_than_two_numbers_of_the_type_is_malformed() -> None:
    for data, dtype in (
        ('["0", 1]', np.float32),
        ("[1e39, 1]", np.float32),
        ("[256, 1]", np.uint8),
        ("[0.5, 1]", np.uint8),
        ("{}", np.float32),
        (f"[{'1' * 500_000}, 1]", np.float32),
    ):
        with pytest.raises(MalformedRequest, match="no list of 2 numbers"):
            read(data, 2, dtype)
