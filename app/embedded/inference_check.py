"""Test inference. Triton itself does not report a backend with empty outputs or a model whose process has died."""

import numpy as np

from app.embedded.service import CheckError
from app.errors import GatewayError
from app.triton.blocking_client import BlockingClient
from app.triton.status import ModelDied, own_message

# A BYTES element with an empty file consists of its length.
_EMPTY_FILE = np.zeros(4, np.uint8)
# Triton's errors when it works, but is overloaded.
_BUSY = ("maximum queue size", "Request timeout expired")


def check_inference(client: BlockingClient, model: str, seconds: float) -> None:
    """Run a model once.

    A model that takes encoded files gets an empty file if it has the output `DECODED`; otherwise it is not run, because its valid
    inputs are unknown.

    Raises:
        CheckError: The inference failed, or an output is empty. It is final if a process of the model has died, because other
            processes of the model may still respond to another check.
    """
    try:
        spec = client.read_spec(model)
        if spec.dtype is None and not spec.tells_decoded:
            return
        tensor = _EMPTY_FILE if spec.dtype is None else np.zeros(spec.image_shape, spec.dtype)
        outputs = client.infer(spec, tensor, seconds)
    except ModelDied as error:
        raise CheckError(f"a process of {model} has died", is_final=True) from error
    except GatewayError as error:
        reason = own_message(error)
        if any(busy in reason for busy in _BUSY):
            return
        raise CheckError(f"the inference of {model} failed: {reason}") from error
    if empty := [name for name, content in outputs.items() if not content]:
        raise CheckError(f"the inference of {model} returned empty {', '.join(empty)}")
