"""The dialect of KServe v2: an image as an element of type BYTES, tensors as the model declares them, and what describes models."""

import base64
import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.api.dialects.conformance import KEY, SECRET, Box, Conformance, Sent, with_header
from tests.faults.corpus import damage
from tests.support import SCENE, json, started

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
