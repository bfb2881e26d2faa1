"""The dialect of KServe v2: an image as an element of type BYTES, tensors as the model declares them, and what describes models."""

import base64
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.api.admission import middleware
from app.api.receiving import client_watch
from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton.client import TritonClient
from tests.api.conftest import settings_for, write_keys
from tests.api.dialects.conformance import SECRET, Box, Conformance, Sent, with_header
from tests.fakes.models import SIDE
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, call, captured_log, json, lifespan_of, receiving, started, staying

LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="session")
def settings(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, dialects="kserve")


@pytest.fixture(scope="module")
async def server(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose default model finds red and blue rectangles."""
    assert triton.poll() is None
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns"))) as client:
        yield client


def encoded(head: dict[str, Any], binary: bytes) -> dict[str, Any]:
    """Put a tensor behind the JSON, as tritonclient does; arguments for httpx."""
    document = msgspec.json.encode(head)
    return {"content": document + binary, "headers": {LENGTH: str(len(document))}}


def to_element(image: bytes) -> bytes:
    return len(image).to_bytes(4, "little") + image


def to_request(image: bytes, shape: tuple[int, ...] = (1,), **others: Any) -> dict[str, Any]:  # noqa: ANN401
    element = to_element(image)
    own = {"name": "image", "shape": shape, "datatype": "BYTES", "parameters": {"binary_data_size": len(element)}}
    return encoded({"inputs": [own], **others}, element)


def tensors_of(response: httpx.Response) -> dict[str, NDArray[Any]]:
    """Read the outputs, which are binary or JSON."""
    nbytes = int(response.headers.get(LENGTH, len(response.content)))
    answer, rest, found = msgspec.json.decode(response.content[:nbytes]), response.content[nbytes:], {}
    dtypes: dict[str, Any] = {"FP32": np.float32, "INT32": np.int32, "BYTES": object}
    for output in answer["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        data: Any = output.get("data")
        if size is not None:
            binary, rest = rest[:size], rest[size:]
            data = np.frombuffer(binary, dtypes[output["datatype"]]) if output["datatype"] != "BYTES" else texts_of(binary)
        found[output["name"]] = np.array(data, dtypes[output["datatype"]]).reshape(output["shape"])
    assert not rest
    return found


def texts_of(binary: bytes) -> list[str]:
    texts = []
    while binary:
        end = 4 + int.from_bytes(binary[:4], "little")
        texts.append(binary[4:end].decode())
        binary = binary[end:]
    return texts


class TestConformance(Conformance):
    name = "kserve"
    paths = ("/v2/models/six_columns/infer", "/v2/models/six_columns/versions/1/infer")

    def request(self, image: bytes, confidence: float = 0.25) -> Sent:
        """Send the file behind the JSON, as tritonclient does."""
        return Sent(self.paths[0], to_request(image, parameters={"confidence": confidence}))

    def boxes(self, answer: Any, width: int, height: int) -> list[Box]:  # noqa: ANN401, ARG002
        found = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in answer["outputs"]}
        assert found["num_dets"].tolist() == [len(found["det_boxes"])]
        return [
            Box(name, score, tuple(corners))
            for name, score, corners in zip(
                found["class_names"].tolist(), found["det_scores"].tolist(), found["det_boxes"].tolist(), strict=True
            )
        ]

    def is_error(self, answer: Any, status: int) -> bool:  # noqa: ANN401, ARG002
        return list(answer) == ["error"] and bool(answer["error"])

    def with_key(self, sent: Sent, key: str) -> Sent:
        return with_header(sent, "Authorization", f"Bearer {key}")


def a_tensor(images: int = 1, dtype: Any = np.float32) -> NDArray[Any]:  # noqa: ANN401
    """Draw red squares, each image another one, as an input (n, 3, 128, 128)."""
    tensor = np.zeros((images, 3, SIDE, SIDE), dtype)
    for index, image in enumerate(tensor):
        image[0, 8 : 24 + 8 * index, 16:48] = 1
    return tensor


def to_tensor_request(tensor: NDArray[Any], datatype: str = "FP32", **others: Any) -> dict[str, Any]:  # noqa: ANN401
    binary = tensor.tobytes()
    own = {"name": "image", "shape": tensor.shape, "datatype": datatype, "parameters": {"binary_data_size": len(binary)}}
    return encoded({"inputs": [own], **others}, binary)


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


@pytest.mark.parametrize("model", ["six_columns", "file_in"])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
async def test_outputs_have_the_batch_dimension_of_the_image(server: httpx.AsyncClient, model: str, shape: tuple[int, ...]) -> None:
    """Also of a model that itself takes files."""
    found = tensors_of(await server.post(f"/v2/models/{model}/infer", **to_request(SCENE, shape)))
    batch = shape[1:]

    assert found["num_dets"].shape == (*batch, 1)
    assert found["num_dets"].tolist() == np.full((*batch, 1), 2).tolist()
    assert [found[name].shape for name in ("det_boxes", "det_scores", "det_classes", "class_names")] == [
        (*batch, 2, 4),
        *[(*batch, 2)] * 3,
    ]


async def test_binary_outputs_are_those_of_json(server: httpx.AsyncClient) -> None:
    """The image is binary or base64, all outputs are chosen or some, each binary or not."""
    path, document = "/v2/models/six_columns/infer", {"name": "x", "shape": [1], "datatype": "BYTES"}
    text = base64.b64encode(SCENE).decode()
    expected = tensors_of(await server.post(path, **to_request(SCENE)))
    binary = tensors_of(await server.post(path, **to_request(SCENE, parameters={"binary_data_output": True})))
    flat = tensors_of(await server.post(path, json={"inputs": [{**document, "data": [text]}]}))
    nested = await server.post(
        path,
        json={
            "id": "7",
            "inputs": [{**document, "shape": [1, 1], "data": [[text]]}],
            "outputs": [{"name": "class_names", "parameters": {"binary_data": True}}, {"name": "num_dets"}],
        },
    )

    assert expected["class_names"].tolist() == ["red", "blue"]
    for found in (binary, flat):
        assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in expected.items()}
    chosen = tensors_of(nested)
    assert {name: tensor.tolist() for name, tensor in chosen.items()} == {"class_names": [["red", "blue"]], "num_dets": [[2]]}
    head = msgspec.json.decode(nested.content[: int(nested.headers[LENGTH])])
    assert (head["id"], head["model_name"], head["model_version"]) == ("7", "six_columns", "1")


async def test_absent_members_of_a_request_may_be_null(server: httpx.AsyncClient) -> None:
    """Python clients that send all fields of their classes do so."""
    own = {"name": "x", "shape": [1], "datatype": "BYTES", "parameters": None, "data": [base64.b64encode(SCENE).decode()]}
    output = {"name": "num_dets", "parameters": None}
    for outputs in (None, [output]):
        sent = {"id": None, "parameters": None, "inputs": [own], "outputs": outputs}
        answer = await server.post("/v2/models/six_columns/infer", json=sent)
        assert tensors_of(answer)["num_dets"].tolist() == [2]
        assert "id" not in json(answer)


async def test_the_header_may_have_the_length_of_a_body_without_binary_tensors(server: httpx.AsyncClient) -> None:
    """Also of a long one."""
    for document in ({**IMAGE, "data": [base64.b64encode(SCENE).decode()]}, TENSOR):
        content = msgspec.json.encode({"inputs": [document]})
        sent = {LENGTH: str(len(content))}
        assert tensors_of(await server.post("/v2/models/six_columns/infer", content=content, headers=sent))


async def test_image_without_objects_is_an_empty_tensor(server: httpx.AsyncClient) -> None:
    for output in (False, True):
        sent = to_request(SCENE, parameters={"confidence": 1.0, "binary_data_output": output})
        found = tensors_of(await server.post("/v2/models/six_columns/infer", **sent))
        assert (found["num_dets"].tolist(), found["det_boxes"].shape, found["class_names"].shape) == ([0], (0, 4), (0,))


async def test_a_classifier_answers_its_best_classes(server: httpx.AsyncClient) -> None:
    sent = to_request(SCENE, parameters={"max_detections": 2, "confidence": 0})
    found = tensors_of(await server.post("/v2/models/planes_to_logits/infer", **sent))
    own = json(await server.post("/predict/planes_to_logits?top_k=2", content=SCENE))["classifications"]

    assert found["class_names"].tolist() == [one["class_name"] for one in own]
    assert found["classes"].tolist() == [one["class_id"] for one in own]
    np.testing.assert_allclose(found["scores"], [one["confidence"] for one in own], atol=1e-4)


@pytest.mark.parametrize("model", ["six_columns", "unbatched"])
async def test_a_tensor_gets_the_outputs_of_the_model(server: httpx.AsyncClient, direct: TritonClient, model: str) -> None:
    """In JSON, flat or nested, and binary."""
    tensor, path = a_tensor(), f"/v2/models/{model}/infer"
    expected = await direct_rows(direct, tensor)
    own = {"name": "image", "shape": tensor.shape, "datatype": "FP32"}
    for sent in (
        to_tensor_request(tensor),
        to_tensor_request(tensor, parameters={"binary_data_output": True}),
        {"json": {"inputs": [{**own, "data": tensor.tolist()}]}},
        {"json": {"inputs": [{**own, "data": tensor.ravel().tolist()}], "outputs": [{"name": "output0"}]}},
    ):
        np.testing.assert_array_equal(tensors_of(await server.post(path, **sent))["output0"], expected)


async def test_the_images_of_a_tensor_keep_their_order(server: httpx.AsyncClient, direct: TritonClient) -> None:
    tensor = a_tensor(4)
    found = tensors_of(await server.post("/v2/models/six_columns/infer", **to_tensor_request(tensor)))["output0"]

    assert len({row.tobytes() for row in found}) == 4
    np.testing.assert_array_equal(found, await direct_rows(direct, tensor))


async def test_other_types_of_numbers(server: httpx.AsyncClient, direct: TritonClient) -> None:
    """FP16 and UINT8 in, FP16 out; integers are not rounded."""
    half = a_tensor(dtype=np.float16)
    response = await server.post("/v2/models/half_four_tensors/infer", **to_tensor_request(half, "FP16"))
    found = {output["name"]: output for output in json(response)["outputs"]}
    pixels = np.full((1, 32, 32, 3), 200, np.uint8)
    document = {"name": "image", "shape": pixels.shape, "datatype": "UINT8", "data": pixels.ravel().tolist()}
    scores = tensors_of(await server.post("/v2/models/bytes_to_logits/infer", json={"inputs": [document]}))["scores"]

    assert {name: output["datatype"] for name, output in found.items()} == {
        "labels": "INT64",
        "confidences": "FP16",
        "boxes_half": "FP16",
        "valid_rows": "INT64",
    }
    np.testing.assert_array_equal(scores, await direct_rows(direct, pixels, "bytes_to_logits"))
    document["data"] = [256, *pixels.ravel().tolist()[1:]]
    json(await server.post("/v2/models/bytes_to_logits/infer", json={"inputs": [document]}), 400)


async def test_a_compressed_body(server: httpx.AsyncClient) -> None:
    sent = to_request(SCENE)
    sent["headers"]["Content-Encoding"] = "gzip"
    whole = await server.post("/v2/models/six_columns/infer", **{**sent, "content": gzip.compress(sent["content"])})

    assert tensors_of(whole)["num_dets"].tolist() == [2]
    json(await server.post("/v2/models/six_columns/infer", **sent), 400)


IMAGE: dict[str, Any] = {"name": "image", "shape": [1], "datatype": "BYTES", "data": ["AAAA"]}
TENSOR: dict[str, Any] = {"name": "image", "shape": [1, 3, SIDE, SIDE], "datatype": "FP32", "data": [0.0] * 3 * SIDE * SIDE}


@pytest.mark.parametrize(
    ("tensor", "others", "says"),
    [
        ({**IMAGE, "shape": [2], "data": ["AAAA", "AAAA"]}, {}, "send one image per request"),
        ({**IMAGE, "data": ["AAAA", "AAAA"]}, {}, "list of one text"),
        ({**IMAGE, "data": [1]}, {}, "list of one text"),
        ({**IMAGE, "data": ["%%%%"]}, {}, "not base64"),
        ({**IMAGE, "parameters": {"shared_memory_region": "x"}}, {}, "shared memory"),
        (IMAGE, {"outputs": [{"name": "num_dets", "parameters": {"classification": 1}}]}, "`classification`"),
        (IMAGE, {"parameters": {"confidence": 2}}, "parameters.confidence is not as expected"),
        (IMAGE, {"parameters": {"max_detections": 301}}, "parameters.max_detections is not as expected"),
        (IMAGE, {"inputs": [IMAGE, IMAGE]}, "inputs is not as expected"),
        ({**TENSOR, "shape": [5, 3, SIDE, SIDE]}, {}, "of shape [1 to 4, 3, 128, 128]"),
        ({**TENSOR, "shape": [2**31 - 1] * 8}, {}, "of shape"),
        ({**TENSOR, "shape": [2**64]}, {}, "expected a JSON object"),
        ({**TENSOR, "shape": [-1, 3, SIDE, SIDE]}, {}, "is not as expected"),
        ({**TENSOR, "data": TENSOR["data"][1:]}, {}, "no list of 49152 numbers"),
        ({**TENSOR, "data": [*TENSOR["data"], 0]}, {}, "no list of 49152 numbers"),
        (TENSOR, {"outputs": [{"name": "det_boxes"}]}, "there is no output 'det_boxes'; outputs: output0"),
        ({name: value for name, value in TENSOR.items() if name != "data"}, {}, "either `data`"),
        ({**TENSOR, "parameters": {"binary_data_size": 4}}, {}, "either `data`"),
    ],
)
async def test_invalid_inference_request_says_what_is_wrong(server: httpx.AsyncClient, tensor: Any, others: Any, says: str) -> None:  # noqa: ANN401
    response = await server.post("/v2/models/six_columns/infer", json={"inputs": [tensor], **others})

    assert says in json(response, 400)["error"]


@pytest.mark.parametrize("cut", [-1, 1])
async def test_binary_elements_of_another_size(server: httpx.AsyncClient, cut: int) -> None:
    for sent in (to_request(SCENE), to_tensor_request(a_tensor())):
        sent["content"] = sent["content"][:cut] if cut < 0 else sent["content"] + b"x"
        json(await server.post("/v2/models/six_columns/infer", **sent), 400)


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
    assert [one["version"] for one in stats] == ["1"]
    assert isinstance(stats[0]["inference_count"], int)
    file = json(await server.get("/v2/models/file_in"))
    assert [(tensor["name"], tensor["shape"]) for tensor in [*file["inputs"], *file["outputs"]]] == [
        ("file", [1]),
        ("num_dets", [1]),
        ("det_boxes", [-1, 4]),
        ("det_scores", [-1]),
        ("det_classes", [-1]),
        ("class_names", [-1]),
    ]


async def test_the_answer_for_a_route_names_the_model_that_gave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To an image and to a tensor; the log line names both."""
    (tmp_path / "routes.toml").write_text('[detector]\nto = "tiny:1"\n')
    fake = FakeTriton()
    fake.model_versions, fake.answer = ["1", "2"], infer_response(output0=np.array([[0, 0, 8, 8, 0.75, 1]] * 2, np.float32))
    pixels = to_tensor_request(np.zeros((32, 32, 3), np.uint8), "UINT8")
    async with serving(fake):
        routed = settings_for(fake.url, dialects="kserve", routes_file=str(tmp_path / "routes.toml"))
        async with started(create_app(routed)) as client:
            log = captured_log(monkeypatch, middleware)
            for sent in (to_request(SCENE), pixels):
                answer = json(await client.post("/v2/models/detector/infer", **sent))
                assert (answer["model_name"], answer["model_version"]) == ("tiny", "1")
    assert [(line.kwargs["route_name"], line.kwargs["model"]) for line in log] == [("detector", "tiny:1")] * 2


async def test_state_of_server_and_models(server: httpx.AsyncClient) -> None:
    assert json(await server.get("/v2"))["name"] == "nereid"
    assert json(await server.get("/v2/health/live")) == {"live": True}
    assert json(await server.get("/v2/health/ready")) == {"ready": True}
    assert json(await server.get("/v2/models/two_versions/versions/1/ready")) == {"name": "two_versions", "ready": True}
    for path in (
        "/v2/models/nothing",
        "/v2/models/nothing/ready",
        "/v2/models/two_versions/versions/9/config",
        "/v2/models/nothing/stats",
        "/v2/models/%00/stats",
    ):
        assert json(await server.get(path), 404)["error"]
    listed = json(await server.post("/v2/repository/index", json={"ready": True}))
    assert [one for one in listed if one["name"] == "two_versions"] == [
        {"name": "two_versions", "version": version, "state": "READY", "reason": ""} for version in "12"
    ]
    json(await server.post("/v2/repository/index", content=b"["), 400)


async def test_a_body_that_pauses_is_given_up(settings: Settings, triton: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no model is asked; otherwise a client could hold any number of requests for ever."""
    assert triton.poll() is None
    monkeypatch.setattr(client_watch, "PAUSE_SECONDS", 0.05)
    async with lifespan_of(app := create_app(msgspec.structs.replace(settings, model="six_columns"))):
        pausing = staying({"type": "http.request", "body": b"{", "more_body": True})
        reply = await call(app, pausing, "/v2/repository/index")
        large = receiving({"type": "http.request", "body": b" " * 70_000, "more_body": False})
        too_large = await call(app, large, "/v2/repository/index")

    assert (reply.status, too_large.status) == (408, 413)


async def test_models_are_changed_by_callers_who_may(settings: Settings, triton: EmbeddedTriton, tmp_path: Path) -> None:
    """Not at all in an open API, and never with a config or files, which could run programs in Triton."""
    assert triton.poll() is None
    keys = [(scope, SECRET, scope) for scope in ("detect", "health", "admin")]
    locked = msgspec.structs.replace(settings, model="six_columns", api_keys_file=write_keys(tmp_path, *keys))
    path, config = "/v2/repository/models/six_columns", {"parameters": {"config": "{}"}}
    async with started(create_app(msgspec.structs.replace(settings, model="six_columns"))) as client:
        for action in ("load", "unload"):
            json(await client.post(f"{path}/{action}"), 403)
    async with started(create_app(locked)) as client:

        async def ask(key: str, path: str, **others: Any) -> httpx.Response:  # noqa: ANN401
            return await client.post(path, headers={"X-API-Key": f"{key}.{SECRET}", **others.pop("headers", {})}, **others)

        for action in ("load", "unload"):
            json(await ask("detect", f"{path}/{action}"), 403)
            json(await ask("admin", f"{path}/{action}", headers={"Origin": "http://elsewhere.example"}), 403)
        assert "load takes no parameters" in json(await ask("admin", f"{path}/load", json=config), 400)["error"]
        for key in ("health", "admin"):  # as at /models
            json(await ask(key, "/v2/repository/index"), 403)
            json(await client.get("/v2/models/six_columns/config", headers={"X-API-Key": f"{key}.{SECRET}"}), 403)
            json(await ask(key, "/v2/models/six_columns/infer", content=b"{}"), 403)
        for key, status in (("detect", 403), ("admin", 403), ("health", 200)):  # of all callers, as at /metrics
            json(await client.get("/v2/models/six_columns/stats", headers={"X-API-Key": f"{key}.{SECRET}"}), status)
