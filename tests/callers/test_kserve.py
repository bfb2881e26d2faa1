"""tritonclient's HTTP client, and Ultralytics' use of it."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from tritonclient.http import InferenceServerClient, InferenceServerException, InferInput, InferRequestedOutput
from tritonclient.http.auth import BasicAuth

from tests.api.conftest import write_keys
from tests.callers.conftest import MODEL, serving
from tests.fakes.models import SIDE
from tests.processes import PATIENCE_SECONDS
from tests.support import SCENE, sample_image

SMALL = "six_columns"
SECRET = "not-a-secret"  # noqa: S105 - it protects nothing


def key(scope: str = "detect") -> dict[str, str]:
    """Make headers, to which tritonclient adds its own."""
    return {"X-API-Key": f"{scope}.{SECRET}"}


class Service(NamedTuple):
    url: str
    client: InferenceServerClient


def to_input(image: bytes, shape: tuple[int, ...] = (1,)) -> InferInput:
    given = InferInput("image", shape, "BYTES")
    given.set_data_from_numpy(np.array([image], object).reshape(shape))
    return given


@pytest.fixture(scope="module")
def service(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A gateway with keys, to which the second model is added."""
    folder = tmp_path_factory.mktemp("kserve")
    keys = write_keys(folder, *((scope, SECRET, scope) for scope in ("detect", "health", "admin")))
    with serving(folder, repository, dialects="kserve", api_keys_file=keys) as url:
        client = InferenceServerClient(url.removeprefix("http://"))
        shutil.copytree(repository / SMALL, folder / "models" / SMALL)
        client.load_model(SMALL, headers=key("admin"))
        yield Service(url, client)
        client.close()


@pytest.mark.client("tritonclient")
def test_health_and_descriptions(service: Service) -> None:
    """Health, metadata, config, statistics and the index of models, with a key in a header."""
    client = service.client
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata(headers=key())["name"] == "nereid"
    assert client.is_model_ready(MODEL, "1", headers=key())
    assert not client.is_model_ready("nothing", headers=key())
    assert client.get_model_metadata(MODEL, headers=key())["inputs"][0]["shape"][1:] == [640, 640, 3]
    assert client.get_model_config(MODEL, "1", headers=key())["name"] == MODEL
    assert client.get_inference_statistics(MODEL, headers=key("health"))["model_stats"][0]["inference_count"] > 0
    index = {model["name"]: model["state"] for model in client.get_model_repository_index(headers=key())}
    assert index == {MODEL: "READY", SMALL: "READY"}
    with pytest.raises(InferenceServerException, match="API key"):
        client.get_model_config(MODEL)


@pytest.mark.client("tritonclient")
def test_boxes_are_those_of_the_gateways_own_answer(service: Service) -> None:
    """Pictures as files: class, score and place of each box are those of `/detect`."""
    with httpx.Client(base_url=service.url, headers=key(), timeout=PATIENCE_SECONDS) as own:
        for image in map(sample_image, ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")):
            expected = own.post("/detect?boxes=pixel&confidence=0.3", content=image).json()["detections"]
            found = service.client.infer(MODEL, [to_input(image)], parameters={"confidence": 0.3}, headers=key())
            boxes = [[one[corner] for corner in ("x1", "y1", "x2", "y2")] for one in expected]

            assert [name.decode() for name in found.as_numpy("class_names")] == [one["class_name"] for one in expected] != []
            assert found.as_numpy("num_dets").tolist() == [len(boxes)]
            np.testing.assert_allclose(found.as_numpy("det_scores"), [one["confidence"] for one in expected], atol=1e-4)
            np.testing.assert_allclose(found.as_numpy("det_boxes"), np.reshape(boxes, (-1, 4)), atol=0.011)


@pytest.mark.client("tritonclient")
def test_tensor_in_json_and_binary(service: Service) -> None:
    """Tensors in JSON and in binary, compressed by gzip and deflate, with the key as user and password."""
    client = InferenceServerClient(service.url.removeprefix("http://"))
    client.register_plugin(BasicAuth("detect", SECRET))
    tensor = np.zeros((1, 3, SIDE, SIDE), np.float32)
    tensor[0, 0, 8:24, 16:48] = tensor[0, 2, 60:80, 16:48] = 1  # red, and blue
    results = []
    for binary, output, compression in ((True, True, None), (False, False, None), (True, False, "gzip"), (False, True, "deflate")):
        given = InferInput("image", tensor.shape, "FP32")
        given.set_data_from_numpy(tensor, binary_data=binary)
        wanted = [InferRequestedOutput("output0", binary_data=output)]
        results.append(client.infer(SMALL, [given], "1", wanted, "id-1", request_compression_algorithm=compression))
    client.close()

    assert {result.get_response()["id"] for result in results} == {"id-1"}
    assert results[0].as_numpy("output0")[0, :, 5].tolist() == [0, 1]
    for result in results[1:]:
        np.testing.assert_array_equal(result.as_numpy("output0"), results[0].as_numpy("output0"))


@pytest.mark.client("tritonclient")
def test_models_are_unloaded_and_loaded(service: Service) -> None:
    """A model is unloaded and loaded, with a key that may do so."""
    client = service.client
    with pytest.raises(InferenceServerException, match="scope 'admin'"):
        client.unload_model(SMALL, headers=key())
    client.unload_model(SMALL, headers=key("admin"))
    assert not client.is_model_ready(SMALL, headers=key())
    with pytest.raises(InferenceServerException) as raised:
        client.infer(SMALL, [to_input(SCENE)], headers=key())
    assert raised.value.status() in {"404", "503"}
    with pytest.raises(InferenceServerException, match="load takes no parameters"):
        client.load_model(SMALL, headers=key("admin"), config="{}")
    client.load_model(SMALL, headers=key("admin"))
    assert client.is_model_ready(SMALL, headers=key())
    assert client.infer(SMALL, [to_input(SCENE, (1, 1))], headers=key()).as_numpy("num_dets").tolist() == [[2]]
