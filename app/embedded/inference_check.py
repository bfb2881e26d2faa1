"""Test inference over HTTP. Triton itself does not report a backend with empty outputs or a model whose process has died."""

import json
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

import numpy as np

from app.embedded.service import CheckError
from app.errors import UnsupportedModel
from app.host.http import LOOPBACK
from app.model.spec import from_triton_config

# A BYTES element with an empty file consists of its length.
_EMPTY_FILE = np.zeros(4, np.uint8)
_DEAD = b"is not healthy"
# Triton's errors when it works, but is overloaded.
_BUSY = (b"maximum queue size", b"Request timeout expired")


def check_inference(http_port: int, model: str, seconds: float) -> None:
    """Run a model once over HTTP.

    Args:
        http_port: Triton's HTTP port on 127.0.0.1.
        model: Name of the model. A model that takes encoded files gets an empty file if it has the output `DECODED`; otherwise it
            is not run, because its valid inputs are unknown.
        seconds: Time limit.

    Raises:
        CheckError: The inference failed, or an output is empty. It is final if a process of the model has died, because other
            processes of the model may still respond to another check.
    """
    base = f"http://127.0.0.1:{http_port}/v2/models/{model}"
    try:
        with LOOPBACK.open(f"{base}/config", timeout=5) as answer:
            spec = from_triton_config(json.load(answer), "1")
        if spec.dtype is None and not spec.tells_decoded:
            return
        shape = spec.batch_shape(1)
        tensor = _EMPTY_FILE if spec.dtype is None else np.zeros(shape, spec.dtype)
        request = {
            "inputs": [
                {
                    "name": spec.input_name,
                    "shape": shape,
                    "datatype": spec.datatype,
                    "parameters": {"binary_data_size": tensor.nbytes},
                }
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in spec.output_names],
        }
        header = json.dumps(request).encode()
        post = urllib.request.Request(  # noqa: S310 - loopback address
            f"{base}/infer", header + tensor.tobytes(), {"Inference-Header-Content-Length": str(len(header))}
        )
        with LOOPBACK.open(post, timeout=seconds) as answer:
            length = int(answer.headers["Inference-Header-Content-Length"])
            outputs = json.loads(answer.read()[:length])["outputs"]
    except (OSError, HTTPException, UnsupportedModel, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError):
            with error:
                text = error.read()
            if any(busy in text for busy in _BUSY):
                return
            if _DEAD in text:
                raise CheckError(f"a process of {model} has died", is_final=True) from error
        raise CheckError(f"the inference of {model} failed: {error}") from error
    empty = [output["name"] for output in outputs if not output["parameters"]["binary_data_size"]]
    if empty:
        raise CheckError(f"the inference of {model} returned empty {', '.join(empty)}")
