"""The inference that checks Triton, against an HTTP endpoint that answers like Triton's."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread
from typing import Any, NamedTuple

import pytest

from app.embedded.inference_check import check_inference
from app.embedded.service import CheckError
from tests.support import free_port


class Asked(NamedTuple):
    request: dict[str, Any]
    data: bytes


CONFIG = {
    "name": "tiny",
    "max_batch_size": 4,
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
    "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [300, 6]}],
}


@contextmanager
def triton_like(
    config: dict[str, Any], output_bytes: int, *, error: str = "", missing_bytes: int = 0, is_stuck: bool = False
) -> Iterator[tuple[int, list[Asked]]]:
    """Answer like Triton's HTTP endpoint, with an output of so many bytes; yields the port and what was asked.

    The answer may be an error, it may come only when the block ends, and its last bytes may be missing.
    """
    asked: list[Asked] = []
    may_answer = Event()
    if not is_stuck:
        may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps(config).encode(), b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            length = int(self.headers["Inference-Header-Content-Length"])
            asked.append(Asked(json.loads(body[:length]), body[length:]))
            output = {"name": "output0", "parameters": {"binary_data_size": output_bytes}}
            may_answer.wait()
            answer = {"error": error} if error else {"outputs": [output]}
            self.reply(500 if error else 200, json.dumps(answer).encode(), bytes(output_bytes), missing_bytes)

        def reply(self, code: int, header: bytes, data: bytes, missing_bytes: int = 0) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(header) + len(data) + missing_bytes))
            self.send_header("Inference-Header-Content-Length", str(len(header)))
            self.end_headers()
            self.wfile.write(header + data)

        def log_message(self, *_: object) -> None: ...

    class Server(HTTPServer):
        def handle_error(self, *_: object) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield http.server_port, asked
        finally:
            may_answer.set()
            http.shutdown()
            thread.join()


def config_of(kind: str, dims: list[int], batch: int = 4) -> dict[str, Any]:
    return {**CONFIG, "max_batch_size": batch, "input": [{"name": "image", "data_type": f"TYPE_{kind}", "dims": dims}]}


@pytest.mark.parametrize("batch", [4, 0])
@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [("UINT8", [32, 48, 3], 1), ("FP32", [3, 32, 48], 4), ("FP16", [3, 32, 48], 2)],
)
def test_blank_image_of_the_models_type_is_sent(kind: str, dims: list[int], size: int, batch: int) -> None:
    """Shape, type and number of bytes are those of one image, as the model's config says."""
    with triton_like(config_of(kind, dims, batch), 24) as (port, asked):
        check_inference(port, "tiny", 10)
    ((request, data),) = asked

    (tensor,) = request["inputs"]
    assert (tensor["name"], tensor["datatype"], tensor["shape"]) == ("image", kind, [1, *dims] if batch else dims)
    assert tensor["parameters"]["binary_data_size"] == len(data) == 32 * 48 * 3 * size
    assert not any(data)
    assert request["outputs"] == [{"name": "output0", "parameters": {"binary_data": True}}]


@pytest.mark.parametrize("batch", [4, 0])
def test_empty_file_is_sent_to_a_model_that_can_tell_that_it_is_none(batch: int) -> None:
    """It runs all the same. Other models that take files might fail, so they are not run."""
    config = {**config_of("STRING", [1], batch), "parameters": {"square": {"string_value": "32"}}}
    with triton_like(config, 24) as (port, asked):
        check_inference(port, "tiny", 10)
        assert asked == []
    outputs = [
        {"name": "output0", "data_type": "TYPE_FP32", "dims": [300, 6]},
        {"name": "decoded", "data_type": "TYPE_INT32", "dims": [1]},
    ]
    with triton_like({**config, "output": outputs}, 24) as (port, asked):
        check_inference(port, "tiny", 10)
    ((request, data),) = asked

    (tensor,) = request["inputs"]
    assert (tensor["datatype"], tensor["shape"]) == ("BYTES", [1, 1] if batch else [1])
    assert data == bytes(4)


def test_empty_output_fails_the_check() -> None:
    """A backend that lost its shared memory answers without an error; the message names the empty tensor."""
    with triton_like(CONFIG, 0) as (port, _), pytest.raises(CheckError, match="of tiny returned empty output0"):
        check_inference(port, "tiny", 10)


def test_failed_inference_fails_the_check() -> None:
    with (
        triton_like(CONFIG, 24, error="out of luck") as (port, _),
        pytest.raises(CheckError, match=r"inference of tiny failed.*500"),
    ):
        check_inference(port, "tiny", 10)


def test_dead_process_of_the_model_is_final() -> None:
    """The next check might reach another process of the same model."""
    error = "Failed to process the request(s) for model 'tiny_0_0', message: Stub process 'tiny_0_0' is not healthy."
    with (
        triton_like(CONFIG, 24, error=error) as (port, _),
        pytest.raises(CheckError, match="of tiny has died") as caught,
    ):
        check_inference(port, "tiny", 10)

    assert caught.value.is_final


@pytest.mark.parametrize("error", ["Exceeds maximum queue size", "Request timeout expired"])
def test_busy_model_passes_the_check(error: str) -> None:
    """The model works, but for other clients."""
    with triton_like(CONFIG, 24, error=f"[request id: <id_unknown>] {error}") as (port, asked):
        check_inference(port, "tiny", 10)

    assert len(asked) == 1


def test_slow_inference_fails_the_check() -> None:
    with triton_like(CONFIG, 24, is_stuck=True) as (port, _), pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(port, "tiny", 0.2)


def test_answer_that_ends_early_fails_the_check() -> None:
    """A server that dies while it answers is reported like one that fails."""
    with triton_like(CONFIG, 24, missing_bytes=8) as (port, _), pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(port, "tiny", 10)


def test_model_without_an_adapter_fails_the_check() -> None:
    """A default model that the gateway cannot use is reported at once, with its tensors, and not asked."""
    config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512, 20, 20]}]}
    with triton_like(config, 24) as (port, asked), pytest.raises(CheckError, match="features FP32"):
        check_inference(port, "tiny", 10)

    assert asked == []


def test_missing_server_fails_the_check() -> None:
    """A server that is gone by then is reported like one that fails."""
    with pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(free_port(), "tiny", 10)
